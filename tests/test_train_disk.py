"""Tables on disk from the command line: the same digests, resuming, verifying, a full disk, and what is refused."""

import errno
import json
import os
import re
import shutil
import signal
import sys

import numpy as np
import pyarrow.csv
import pytest

from hostdev.checkpoint import folder
from hostdev.checkpoint.loading import verify as verify_files
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from hostdev.ext.verify import cli as verify
from hostdev.host.disk import segments as segments_module
from hostdev.kernels import disk_records
from tests import forks
from tests.conftest import digest_of
from tests.data import events

ON_DISK = ["--table-dir", "disk", "--table-memory", "200KB"]
BOTH = pytest.mark.parametrize("kind", ["vocabulary", "raw"])
RAW_IS_SLOW = pytest.mark.parametrize("kind", ["vocabulary", pytest.param("raw", marks=pytest.mark.slow)])
VOCABULARY_IS_SLOW = pytest.mark.parametrize("kind", [pytest.param("vocabulary", marks=pytest.mark.slow), "raw"])
SIZES = disk_records._CHUNK, segments_module.SEGMENT_BYTES
BY_KEY = ["--tables", "dynamic", "--capacity", "20MiB", "--admit-count", 2, "--evict-unused", 12]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(disk_records, "_CHUNK", 1 << 14)
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", 1 << 16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a data set of eight days of events, with a vocabulary and with raw ids, and the file with its last day."""
    folder = tmp_path_factory.mktemp("events")
    table = events.make(days=8, rows=1_000)
    pyarrow.csv.write_csv(table, folder / "events.csv")
    pyarrow.csv.write_csv(table.slice(7_000), folder / "last.csv")
    flags = ["--label", "clicked", "--numeric", "hour", "--categorical", "user,item,device", "--test-after", "day=6"]
    for name, ids in (("raw", ["--ids", "raw"]), ("vocabulary", ["--threshold", "0"])):
        arguments = ["table", folder / "events.csv", "--out", folder / name, *flags, *ids]
        preprocess.main(list(map(str, arguments)))
    return folder


@pytest.fixture
def every(kind, data):
    common = ["--data", data / kind, "--host-device-mix", "--model", "deepfm", "--emb-dim", 8]
    common += ["--device", "cpu", "--batch-size", 100, "--order", "stored"]
    return common + (BY_KEY if kind == "raw" else [])


@BOTH
def test_the_digest_is_that_of_memory(run, every, data, tmp_path):
    trained = [*every, "--epochs", 1, "--checkpoint-every", 25]
    run(train, *trained, "--run-dir", "memory")
    out = run(train, *trained, *ON_DISK, "--table-window", 40, "--run-dir", "one")
    assert "places of rows on disk" in out
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "memory")
    assert list((tmp_path / "disk").iterdir()) == []
    for name, start, more in (("in memory", "one", []), ("on disk", "memory", ON_DISK)):
        resumed = f"{start}/checkpoints/step-0000000025"
        held = any(each.name.startswith("segment-") for each in (tmp_path / resumed).rglob("*"))
        assert held == (start == "one")
        run(train, *trained, *more, "--run-dir", name, "--resume", resumed)
        assert digest_of(tmp_path / name) == digest_of(tmp_path / "memory")
    scores = "--data", data / "last.csv", "--out", "s.parquet"
    assert "AUC" in run(predict, "--checkpoint", "one", *scores)


@RAW_IS_SLOW
def test_a_run_does_not_start_from_a_damaged_segment(run, in_process, every, tmp_path):
    trained = [*every, "--epochs", 1, *ON_DISK]
    run(train, *trained, "--run-dir", "one", "--checkpoint-every", 25)
    saved = tmp_path / "one/checkpoints" / folder.names_in(tmp_path / "one/checkpoints")[0]
    segment = next(each for each in sorted(saved.rglob("segment-*")) if each.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 4
    segment.write_bytes(content)
    code, _, error = in_process(train, *trained, "--run-dir", "two", "--start-from", saved)
    assert code == 2 and error.count("\n") == 1 and segment.name in error, error
    assert not (tmp_path / "two").exists()
    code, _, error = in_process(train, *trained, "--run-dir", "two", "--start-from", "one")  # whose newest is intact
    assert code == 0, error


@BOTH
def test_batches_that_do_not_fit_end_no_run(in_process, every, tmp_path):
    """They take more memory for a while, which is told once and counted; the advised memory has room for all."""
    trained = [*every, "--epochs", 1, "--pipeline-depth", 3, "--checkpoint-every", 25]
    assert in_process(train, *trained, "--run-dir", "memory")[0] == 0
    disk = ["--table-dir", "disk", "--table-memory"]
    code, out, error = in_process(train, *trained, *disk, "75KB", "--run-dir", "one")
    assert code == 0, error
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "memory")
    summary = json.loads((tmp_path / "one/summary.json").read_text())["disk"]
    short = sorted(name for name, one in summary.items() if one["exceeded"])
    assert short and sorted(line.split("'")[1] for line in error.splitlines() if "Disk" in line) == short
    [advised] = re.findall(r"(--table-memory \S+) has room", out)
    code, out, error = in_process(train, *trained, "--table-dir", "disk", *advised.split(), "--run-dir", "two")
    assert code == 0 and "has room" not in out and "Disk" not in error
    summary = json.loads((tmp_path / "two/summary.json").read_text())["disk"]
    assert not any(one["exceeded"] for one in summary.values())


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("memory", ["10MiB", "11MiB"])
def test_wide_rows_and_little_memory(in_process, every, tmp_path, monkeypatch, memory):
    """256 columns, batches of 300, chunks and segments of the usual size: such budgets ended a run in its middle."""
    monkeypatch.setattr(disk_records, "_CHUNK", SIZES[0])
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", SIZES[1])
    capacity = ["--capacity", "60MiB"] if "--capacity" in every else []
    trained = [*every, "--batch-size", 300, "--emb-dim", 256, "--epochs", 3, *capacity]
    assert in_process(train, *trained, "--run-dir", "memory")[0] == 0
    on_disk = [*trained, "--run-dir", "one", "--table-dir", "disk", "--table-memory"]
    code, _, error = in_process(train, *on_disk, memory)
    if code:  # refused before the first step, with what would do
        assert "step" not in error and not (tmp_path / "one").exists()
        [memory] = re.findall(r"--table-memory (\S+)", error)
        code, _, error = in_process(train, *on_disk, memory)
    assert code == 0, error
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "memory")


@VOCABULARY_IS_SLOW
def test_by_two_processes(run, every, tmp_path):
    """Checkpoints hold the segments of all processes; any number of processes resumes from them."""
    trained = [*every, "--epochs", 1, "--micro-batches", 2, "--checkpoint-every", 20]
    run(train, *trained, "--run-dir", "one")
    here = [*trained, "--table-dir", "disk", "--table-memory", "9MiB"]
    command = [sys.executable, "-m", "hostdev.train", *here, "--spawn", 2, "--run-dir"]
    assert not forks.run(list(map(str, [*command, "two"])), check=False).returncode
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two")
    middle = sorted((tmp_path / "two/checkpoints").glob("step-*"))[0]
    assert any("1-segment-" in each.name for each in middle.rglob("*"))
    for name, more in (("memory", trained), ("disk again", here)):
        run(train, *more, "--run-dir", name, "--resume", middle)
        assert digest_of(tmp_path / name) == digest_of(tmp_path / "one")
    middle = sorted((tmp_path / "disk again/checkpoints").glob("step-*"))[-2]
    assert not forks.run(list(map(str, [*command, "two again", "--resume", middle])), check=False).returncode
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two again")
    assert list((tmp_path / "disk").iterdir()) == []


@RAW_IS_SLOW
def test_every_mode_and_a_fault(in_process, run, every):
    options = [*(each for each in every if each not in ("--host-device-mix", "--order", "stored")), *ON_DISK]
    assert "all modes agree in every bit of every step" in run(verify, *options, "--steps", 10)
    code, out, _ = in_process(verify, *options, "--steps", 10, "--inject-fault")
    assert code == 1 and "the injected fault was caught in every group of tables" in out


@VOCABULARY_IS_SLOW
def test_a_full_disk_is_saved(run, in_process, every, tmp_path, monkeypatch):
    trained = [*every, "--epochs", 1]
    run(train, *trained, "--run-dir", "whole")
    allocate, made = os.posix_fallocate, []

    def fail(file, offset, size):
        made.append(size)
        if len(made) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, size)

    with monkeypatch.context() as patch:
        patch.setattr(segments_module.os, "posix_fallocate", fail)
        patch.setattr("hostdev.train.build.warm_up_disk", lambda dtype: None)
        code, _, error = in_process(train, *trained, *ON_DISK, "--checkpoint-every", 500, "--run-dir", "one")
    assert code == 2 and error.count("\n") == 1
    assert "(No space left on device); " in error
    assert "continue with --resume" in error and "a --table-dir with more space" in error
    run(train, *trained, *ON_DISK, "--checkpoint-every", 500, "--run-dir", "one", "--resume")
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--table-dir", "disk"], "--table-dir has no effect without --table-memory"),
        (["--table-memory", "1GiB"], "--table-memory has no effect without --table-dir"),
        ([*ON_DISK[:3], "much"], "--table-memory: a size must be a number of bytes"),
        ([*ON_DISK, "--emb-dim", 1], "--table-dir has no effect: no table has rows of 64 bytes or more"),
        ([*ON_DISK, "--model", "wide_deep", "--l2", "table"], "--table-dir cannot be combined with --l2 table"),
        (["--table-window", 4], "--table-window has no effect without --table-dir; leave out --table-window"),
        ([*ON_DISK, "--table-window", 2_000], "--table-window must be in 0..1024 batches, not 2000"),
    ],
)
def test_what_is_refused(in_process, data, options, error):
    every = ["--data", data / "vocabulary", "--device", "cpu", "--batch-size", 100]
    code, _, found = in_process(train, *every, "--host-device-mix", *options)
    assert code == 2 and error in found and found.count("\n") == 1
    code, _, found = in_process(train, *every, *ON_DISK)
    assert code == 2 and "--table-dir needs --host-device-mix" in found


KILLED = """
import os, signal, sys, threading, time
from hostdev.kernels import disk_records
import hostdev.host.disk.tier
disk_records._CHUNK, hostdev.host.disk.tier.SEGMENT_BYTES = 1 << 14, 1 << 16
from hostdev.checkpoint.manager import CheckpointManager
save, after = CheckpointManager.save, float(sys.argv.pop(1))

def begin(*arguments, **options):  # from the first checkpoint on, so that each run gets further
    if after:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return save(*arguments, **options)

CheckpointManager.save = begin
from hostdev.ext.training import cli as train
train.main(sys.argv[1:])
"""


@pytest.mark.slow
@BOTH
def test_thirty_kills(run, every, tmp_path, kind):
    """Killed at any moment of saving and training, resumed from segments that the killed run has left behind."""
    trained = [*every, "--epochs", 2, "--checkpoint-every", 6, "--keep-checkpoints", 2]
    run(train, *trained, "--run-dir", "whole")
    command = [*trained, *ON_DISK, "--run-dir", "one", "--resume"]
    random, kills = np.random.default_rng(0 if kind == "raw" else 1), 0
    while kills < 15:
        after = float(random.random() ** 2 * 0.6) + 1e-4
        done = forks.run([sys.executable, "-c", KILLED, str(after), *map(str, command)], check=False, text=True)
        assert done.returncode in (0, -signal.SIGKILL)
        if not done.returncode:
            assert digest_of(tmp_path / "one") == digest_of(tmp_path / "whole")
            shutil.rmtree(tmp_path / "one")
            continue
        kills += 1
        newest = folder.names_in(tmp_path / "one/checkpoints")[-1:]
        if newest:
            verify_files(folder.read_chain(tmp_path / "one/checkpoints" / newest[0]), segments=True)
    run(train, *command)
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "whole")
    assert list((tmp_path / "disk").iterdir()) == []
