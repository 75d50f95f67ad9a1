"""A table of 8 GB is saved while it changes, loaded, merged and exported with at most 1 GiB extra. And old files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hostdev import LazyAdam, RowWiseAdagrad
from hostdev.checkpoint import folder
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import verify
from hostdev.core.memory import available_bytes
from hostdev.host.table import HostTable
from hostdev.runtime.runtime import Runtime
from tests.conftest import ROOT, environment

GIB = 1 << 30
VERSION_1 = Path(__file__).parent / "version1"

CODE = """
import sys, threading, time
import numpy as np, torch
import hostdev
from hostdev.ext.checkpoints import cli as command

most, done = [0], threading.Event()
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
def watch():
    while not done.wait(0.01):
        most[0] = max(most[0], anonymous())

what, path, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
if what in ("save", "load"):
    table = hostdev.HostTable(rows, 80, hostdev.LazyAdam(), name="t")
    runtime = hostdev.Runtime({"t": table}, device="cpu", depth=0)
    ids, grads = np.arange(0, rows, 3, dtype=np.int32)[:400_000], np.ones((400_000, 80), np.float32)
    table.update(ids, grads)
    hostdev.ops.unique(ids)
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
if what == "save":
    saving = runtime.save(path, wait=False)
    while saving.is_running:  # what is written meanwhile is copied aside
        table.update(ids, grads)
        ids = (ids + 1) % rows
    saving.wait()
    runtime.pipeline.steps = 1
    runtime.save(path)
elif what == "load":
    runtime.load(path)
    print("sum", table.block.sum(dtype=np.float64))
else:
    assert command.main([what, path, *sys.argv[4:]]) == 0
done.set()
print("beside", most[0] - before)
"""


@pytest.mark.slow
def test_a_large_table_with_little_memory_beside(tmp_path):
    rows = 8 * GIB // (3 * 80 * 4)
    if available_bytes() < 11 * GIB or shutil.disk_usage(tmp_path).free < 40 * GIB:
        pytest.skip("less than 11 GiB of memory or 40 GiB of disk are free")

    def run(what, *more):
        command = [sys.executable, "-c", CODE, what, str(tmp_path / "c"), str(rows), *map(str, more)]
        ran = subprocess.run(
            command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=900, check=False
        )
        assert ran.returncode == 0, ran.stderr
        lines = dict(line.split(None, 1) for line in ran.stdout.splitlines() if line.startswith(("beside", "sum")))
        print(what, lines)
        assert int(lines["beside"]) < GIB, (what, lines)
        return lines.get("sum")

    run("save")
    chain = folder.read_chain(tmp_path / "c" / folder.names_in(tmp_path / "c")[-1])
    assert len(chain) == 2
    expected = run("load")
    run("compact", "--keep", 1)
    assert run("load") == expected
    run("export", "--out", tmp_path / "out", "--format", "npy")
    weights = np.load(tmp_path / "out/t.weights.npy", mmap_mode="r")
    layers = Layers(folder.read_chain(tmp_path / "c" / folder.names_in(tmp_path / "c")[-1]))
    start, stop = layers.ranges("t")[-1]
    np.testing.assert_array_equal(weights[start:stop], layers.read("t", start, stop, ["weights"])["weights"])


def test_files_of_version_1_are_read(tmp_path):
    """Files of hostdev 0.1.0, by tests/checkpoint/version1/make.py: a full checkpoint and an increment."""
    expected = json.loads((VERSION_1 / "expected.json").read_text())
    path = tmp_path / "c"
    shutil.copytree(VERSION_1 / "c", path)
    chain = folder.read_chain(path / folder.names_in(path)[-1])
    verify(chain)
    tables = {
        "a": HostTable(70, 3, LazyAdam(), name="a", seed=9),
        "b": HostTable(5, 2, RowWiseAdagrad(), name="b", seed=9),
    }
    extra = Runtime(tables, device="cpu").load(path)
    assert extra["number"] == 2
    assert extra["pair"] == (1, "x")
    assert extra["tensor"].tolist() == [0.5, 1.5]
    for name, table in tables.items():
        assert table.step == expected[name]["step"]
        assert table.optimizer.lr == expected[name]["lr"]
        assert table.block.tobytes().hex() == expected[name]["block"]
        assert table.row_slots.tobytes().hex() == expected[name]["row_slots"]
