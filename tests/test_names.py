"""Files whose names are bytes in no encoding, as POSIX allows them: they work as others do."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hostdev import HostTable, LazyAdam, Runtime, UserError
from hostdev.core import cli
from hostdev.core.errors import write_stderr
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.distributed.world import ALONE_WORLD
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.parallel import state
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from tests import forks

ODD = Path(os.fsdecode(b"caf\xe9"))  # in Latin-1


@pytest.fixture
def odd(tmp_path, monkeypatch):
    try:
        (tmp_path / ODD).mkdir()
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    monkeypatch.chdir(tmp_path)
    return ODD


def run(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


def test_from_text_to_probabilities(odd):
    write_text(Synthetic(1000, 5), odd / "raw.txt")
    command = [sys.executable, "-m", "hostdev.data.preprocess", "criteo", odd / "raw.txt", "--out", odd / "data"]
    done = forks.run(command, capture_output=True, check=True)
    assert done.stdout.startswith(os.fsencode(odd / "data") + b": 908 training and 92 test rows")
    assert run(preprocess, "check", odd / "data") == 0
    assert run(preprocess, "info", odd / "data") == 0
    options = ["--data", odd / "data", "--batch-size", 100, "--emb-dim", 4, "--device", "cpu", "--host-device-mix"]
    for more in (["--epochs", 1], ["--epochs", 2, "--resume"]):
        assert run(train, *options, "--checkpoint-every", 3, "--run-dir", odd / "run", *more) == 0
    saved = odd / "run/checkpoints"
    for data in (odd / "data", odd / "raw.txt"):
        assert run(predict, "--checkpoint", saved, "--data", data, "--out", odd / f"{data.name}.parquet") == 0
        assert len(pq.read_table(pa.OSFile(os.fsencode(odd / f"{data.name}.parquet")))) == (1000 if data.suffix else 92)
    for kind in ("parquet", "npy"):
        assert run(checkpoint, "export", saved, "--out", odd / kind, "--format", kind) == 0
        assert (odd / kind / "dense.pt").exists()
    assert run(checkpoint, "verify", saved) == 0
    together = [*options, "--spawn", 2, "--micro-batches", 2, "--checkpoint-every", 3, "--run-dir", odd / "two"]
    assert run(train, *together, "--epochs", 1) == 0


def test_tables(odd):
    """The same rows, whatever their files are called."""
    table = pa.table({"y": [0, 1] * 50, "c": ["a", "b", "c", "d"] * 25})
    pq.write_table(table, "t.parquet")
    with pa.ipc.new_file("t.arrow", table.schema) as file:
        file.write_table(table)
    Path("t.csv").write_text("y,c\n" + "".join(f"{i % 2},{'abcd'[i % 4]}\n" for i in range(100)))
    made = []
    for name in ("t.parquet", "t.arrow", "t.csv"):
        (odd / name).write_bytes(Path(name).read_bytes())
        for path in (Path(name), odd / name):
            out = odd / f"{len(made)}"
            assert run(preprocess, "table", path, "--label", "y", "--categorical", "c", "--out", out) == 0
            made.append([shard.sha256 for shard in manifest.read(out).train])
    assert made == made[:1] * 6


def test_a_runtime_is_saved(odd):
    tables = [HostTable(50, 4, LazyAdam(), name="a", seed=seed) for seed in (1, 2)]
    Runtime({"a": tables[0]}, device="cpu").save(odd / "c", extra={"w": torch.ones(3)})
    extra = Runtime({"a": tables[1]}, device="cpu").load(odd / "c")
    assert torch.equal(extra["w"], torch.ones(3))
    assert (tables[0].weights == tables[1].weights).all()


def test_a_network_in_parts_is_not(odd):
    """Safetensors would write the file, and not read it again."""
    with pytest.raises(UserError, match="the name is not UTF-8"):
        state.save(odd / "network", "a.safetensors", {"w": (torch.ones(3), None)}, {}, ALONE_WORLD)


def test_a_network_in_parts_that_was_moved_there(odd):
    state.save(Path("network"), "a.safetensors", {"w": (torch.ones(3), None)}, {}, ALONE_WORLD)
    Path("network").rename(odd / "network")
    with pytest.raises(UserError, match="the name is not UTF-8, and safetensors cannot read such a file; rename"):
        state.load(odd / "network", lambda name: True)


@pytest.mark.parametrize(("how", "shown"), [("ascii:replace", b"caf?/data: "), ("ascii:strict", b"caf\xe9/data: ")])
def test_what_a_terminal_cannot_show(odd, how, shown):
    write_text(Synthetic(100, 5), Path("raw.txt"))
    command = [sys.executable, "-m", "hostdev.data.preprocess", "criteo", "raw.txt", "--out", odd / "data"]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": how})
    assert done.stdout.startswith(shown)


def test_what_is_told_at_the_end(odd, capfd):
    write_stderr(f"continue with --resume {odd}")
    assert capfd.readouterr().err == "continue with --resume caf\\udce9\n"


@pytest.mark.slow
def test_all_processes_tell_what_has_failed_on_one(odd):
    write_text(Synthetic(1000, 5), Path("raw.txt"))
    assert run(preprocess, "criteo", "raw.txt", "--out", "data") == 0
    options = ["--data", "data", "--batch-size", 100, "--emb-dim", 4, "--device", "cpu", "--host-device-mix"]
    options += ["--micro-batches", 2, "--checkpoint-every", 3, "--checkpoint-dir", odd / "c"]
    assert run(train, *options, "--run-dir", "run", "--epochs", 1) == 0
    for file in (odd / "c").rglob("checkpoint.json"):
        file.write_text("damaged")
    options += ["--spawn", 2, "--run-dir", "run", "--resume", odd / "c"]
    command = [sys.executable, "-m", "hostdev.train", *map(str, options)]
    done = forks.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    told = "no checkpoint in caf\\udce9/c is valid; the newest: caf\\udce9/c/step-"
    assert f"hostdev.train: error: rank 0 of 2: {told}" in done.stderr
