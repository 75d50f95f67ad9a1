"""A process that is killed, interrupted, or fails: all end soon, and one line names the rank and the cause."""

import os
import re
import shutil
import signal
import sys
import time

import psutil
import pytest

from tests.distributed.conftest import flags_of
from tests.distributed.processes import wait_until
from tests.ports import free_port
from tests.test_shards import rewrite

TRAIN = ("-m", "hostdev.train")
MANY = ("--emb-dim", 4, "--epochs", 500, "--max-steps", 100_000)
SOON = 30.0  # seconds until all have ended


def begun(processes, folder):
    """Wait until both ranks have written a step."""

    def has_begun():
        assert all(process.poll() is None for process in processes.started), processes.ended()
        logs = [folder / "loss.log", folder / "rank1" / "loss.log"]
        return all(log.is_file() and log.stat().st_size for log in logs)

    wait_until(has_begun)


def ended_soon(processes, since):
    done = processes.ended(seconds=60)
    assert time.monotonic() - since < SOON
    return done


def one_line(err):
    """Return the only line about a rank; torch and its threads may print more."""
    [line] = [line for line in err.splitlines() if re.search(r"rank \d+ of 2", line)]
    return line


@pytest.mark.slow
def test_a_process_that_is_killed(processes, small_data):
    folder = processes.folder / "run"
    first, second = processes.start_ranks(2, *TRAIN, *flags_of(small_data, folder, *MANY))
    begun(processes, folder)
    since = time.monotonic()
    second.kill()
    done, killed = ended_soon(processes, since)
    assert (killed.code, done.code) == (-signal.SIGKILL, 2)
    assert one_line(done.err) == "hostdev.train: error: rank 1 of 2: stopped answering; was it killed?"
    assert "Traceback" not in done.err
    assert (folder / "summary.json").is_file()  # the logs are complete
    assert first.poll() == 2


def test_a_spawned_process_that_is_killed(processes, small_data):
    """Rank 0 is killed, so another rank reports it; the command that has started them ends, too."""
    folder = processes.folder / "run"
    parent = processes.start(
        sys.executable, *TRAIN, *flags_of(small_data, folder, *MANY, "--spawn", 2), HOSTDEV_TESTS_EXEC=1
    )
    begun(processes, folder)  # by Python itself, since /proc has the environment with which it began
    children = psutil.Process(parent.pid).children(recursive=True)
    ranks = {child.environ()["RANK"]: child for child in children if "RANK" in child.environ()}
    assert ranks.keys() == {"0", "1"}
    since = time.monotonic()
    ranks["0"].kill()
    [done] = ended_soon(processes, since)
    assert done.code in (2, 128 + signal.SIGKILL)
    assert one_line(done.err) == "hostdev.train: error: rank 0 of 2: stopped answering; was it killed?"
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_process_is_interrupted(processes, small_data, rank):
    """All end after the same step, with their logs complete."""
    folder = processes.folder / "run"
    started = processes.start_ranks(2, *TRAIN, *flags_of(small_data, folder, *MANY))
    begun(processes, folder)
    since = time.monotonic()
    os.kill(started[rank].pid, signal.SIGINT)
    first, second = ended_soon(processes, since)
    assert (first.code, second.code) == (130, 130)
    lines = (folder / "loss.log").read_bytes()
    steps = len(lines.splitlines())
    assert f"hostdev.train: interrupted; {steps} steps are in the logs in {folder}" in first.err
    assert (folder / "rank1" / "loss.log").read_bytes() == lines


@pytest.mark.slow
def test_a_shard_that_is_damaged_on_one_host(processes, own_data):
    """The rank that reads the shard logs the cause, and rank 0 prints the rank and the cause."""
    folder, port = processes.folder / "run", free_port()
    shutil.copytree(own_data, processes.folder / "whole")
    rewrite(own_data, lambda table: table.slice(0, len(table) - 1))
    shutil.copy(processes.folder / "whole" / "manifest.json", own_data)  # or it would be another data set
    for rank, data in enumerate([processes.folder / "whole", own_data]):
        where = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.start(sys.executable, *TRAIN, *flags_of(data, folder, "--emb-dim", 4), **where)
    first, second = processes.ended()
    shard = own_data / "train" / "part-00001.arrow"
    words = f"shard {shard} has a wrong checksum: it is damaged or was changed; preprocess the data again"
    assert (first.code, second.code) == (2, 2)
    assert one_line(first.err) == f"hostdev.train: error: rank 1 of 2: {words}"
    assert f"hostdev.train: error: {words}" in (folder / "rank1" / "output.log").read_text()
    assert "Traceback" not in first.err + second.err


FAILING = """
import hostdev, torch
with hostdev.join() as ranks:
    raise ValueError("a program's own error")
"""


def test_all_processes_fail_at_once(processes):
    """Python ends in each with its own error, while others still ask; none is aborted."""
    processes.start_ranks(3, "-c", FAILING)
    for done in processes.ended():
        assert done.code == 1, done
        assert done.err.rstrip().endswith("ValueError: a program's own error"), done


LEAVING = """
import glob, hostdev, torch
with hostdev.join() as ranks:
    network = hostdev.parallel.Network(torch.nn.Linear(8, 8), (torch.zeros(1, 8),), ranks=ranks, micro_batches=2)
    network.step(4, lambda part: (torch.ones(4, 8)[part],), lambda output, part: output.sum())
names = [open(name).read() for name in glob.glob("/proc/self/task/*/comm")]
assert len(names) > 1
assert "pt_gloo_runloop\\n" not in names, names
"""


def test_no_thread_exchanges_anything_after_leaving(processes):
    """A thread that releases tensors while Python exits would abort the process."""
    processes.start_ranks(2, "-c", LEAVING)
    for done in processes.ended():
        assert done.code == 0, done


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs(processes, small_data, rank):
    folder = processes.folder / "run"
    started = processes.start_ranks(2, *TRAIN, *flags_of(small_data, folder, *MANY))
    begun(processes, folder)
    since = time.monotonic()
    started[rank].send_signal(signal.SIGSTOP)
    other = 1 - rank
    wait_until(lambda: started[other].poll() is not None, 60)
    assert time.monotonic() - since < SOON
    started[rank].kill()
    done = processes.ended()
    assert done[other].code == 2
    assert one_line(done[other].err).startswith(f"hostdev.train: error: rank {rank} of 2: has sent no heartbeat for")
