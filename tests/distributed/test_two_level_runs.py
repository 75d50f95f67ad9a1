"""Whole trainings whose ranks exchange in two levels: bits, bytes, failures, and options."""

import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.distributed.conftest import Trained, flags_of
from tests.distributed.processes import start_on, wait_until
from tests.distributed.test_faults import MANY, SOON, TRAIN

SMALL = ("--emb-dim", 4)
CACHED = ("--cache-rows", "10%")
SERIAL = ("--pipeline-depth", 0)
TWO_BY_TWO = [0, 0, 1, 1]


def trained(processes, places, data, *more, M=4, name="run"):
    """Train on ranks of these hosts; return what rank 0 has, and what its summary says of the ranks."""
    folder, before = processes.folder / name, len(processes.started)
    start_on(processes, places, *TRAIN, *flags_of(data, folder, *more, M=M))
    for process in processes.ended()[before:]:
        assert process.code == 0, process
        assert "Warning" not in process.err, process
    return Trained(folder), json.loads((folder / "summary.json").read_text())["ranks"]


def test_two_hosts_of_two_ranks(alone, processes, small_data):
    found, ranks = trained(processes, TWO_BY_TWO, small_data, *SMALL)
    assert found == alone(small_data, *SMALL, M=4)
    assert (ranks["hosts"], ranks["exchange_levels"]) == (2, 2)
    assert 0 < ranks["sent_bytes"]["network"] < ranks["sent_bytes"]["rows"] + ranks["sent_bytes"]["dense"]
    assert re.search(r"; a step exchanges .*; .* of this between hosts\n", processes.ended()[0].out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "M", "more"),
    [
        (TWO_BY_TWO, 8, CACHED),
        (TWO_BY_TWO, 12, SERIAL),
        ([0, 1, 0, 1], 4, CACHED + SERIAL),
        ([0, 1, 1, 1], 4, ()),
        ([0, 1, 1, 1], 8, CACHED),
        ([0, 0, 1], 6, ("--pipeline-depth", 4)),
        (TWO_BY_TWO, 4, ("--table-dtype", "bf16")),
        (TWO_BY_TWO, 4, ("--model", "dlrm")),
        (TWO_BY_TWO, 4, ("--checkpoint-every", 3)),
    ],
)
def test_bits_are_those_of_one_level_and_of_one_process(alone, processes, small_data, places, M, more):
    own = [flag for flag in more if more not in (CACHED, SERIAL, CACHED + SERIAL)]
    found, two = trained(processes, places, small_data, *SMALL, *more, M=M)
    assert found == alone(small_data, *SMALL, *own, M=M)
    one_level, one = trained(processes, places, small_data, *SMALL, *more, "--exchange-levels", 1, M=M, name="one")
    assert one_level == found
    assert (two["exchange_levels"], one["exchange_levels"]) == (2, 1)
    assert two["sent_bytes"]["rows"] == one["sent_bytes"]["rows"]
    assert two["sent_bytes"]["network"] <= one["sent_bytes"]["network"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,pipe=2", "data=2,model=2", "pipe=4"])
@pytest.mark.parametrize("places", [TWO_BY_TWO, [0, 1, 0, 1]], ids=["in order", "in turn"])
def test_networks_in_parts(processes, small_data, mesh, places):
    more = (*SMALL, "--mesh", mesh, *(("--plan", "deep.0=colwise,deep.2=rowwise") if "model" in mesh else ()))
    found, two = trained(processes, places, small_data, *more, M=8)
    one_level, _ = trained(processes, places, small_data, *more, "--exchange-levels", 1, M=8, name="one")
    assert one_level == found
    assert two["exchange_levels"] == 2


def left_files():
    """Return what processes could leave in shared memory or the folder for temporary files."""
    return {path for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("*hostdev*")}


@pytest.mark.parametrize(
    ("gone", "how"),
    [
        (2, signal.SIGKILL),  # leads the second host
        pytest.param(3, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(3, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone(processes, small_data, gone, how):
    before = left_files()
    folder = processes.folder / "run"
    started = start_on(processes, TWO_BY_TWO, *TRAIN, *flags_of(small_data, folder, *MANY, M=4))
    wait_until(lambda: (folder / "loss.log").is_file() and (folder / "loss.log").stat().st_size > 0)
    since = time.monotonic()
    os.kill(started[gone].pid, how)
    others = [process for rank, process in enumerate(started) if rank != gone]
    wait_until(lambda: all(process.poll() is not None for process in others), 60)
    assert time.monotonic() - since < SOON
    started[gone].kill()
    ended = processes.ended()
    assert [one.code for rank, one in enumerate(ended) if rank != gone] == [2, 2, 2]
    lines = [line for one in ended for line in one.err.splitlines() if "of 4: " in line]
    why = "stopped answering; was it killed?" if how == signal.SIGKILL else "has sent no heartbeat for 24 s; it hangs"
    assert lines == [f"hostdev.train: error: rank {gone} of 4: {why}"]
    assert not any("Traceback" in one.err for one in ended)
    assert left_files() == before


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_an_interrupt(processes, small_data, rank):
    """All end after the same step."""
    folder = processes.folder / "run"
    started = start_on(processes, TWO_BY_TWO, *TRAIN, *flags_of(small_data, folder, *MANY, M=4))
    wait_until(lambda: (folder / "loss.log").is_file() and (folder / "loss.log").stat().st_size > 0)
    started[rank].send_signal(signal.SIGINT)
    ended = processes.ended(seconds=60)
    assert [one.code for one in ended] == [130] * 4, ended
    logs = [(path / "loss.log").read_bytes() for path in (folder, *(folder / f"rank{n}" for n in (1, 2, 3)))]
    assert len(set(logs)) == 1


OTHER_CALLS = """
import sys, hostdev
with hostdev.join(timeout=60) as ranks:
    if ranks.rank == 3:
        ranks.agree("save", "runtime.save()")
    else:
        ranks.begin("step", "step 1")
        ranks.channel()
        ranks.control.barrier()
"""


def test_a_rank_in_another_call(processes):
    start_on(processes, TWO_BY_TWO, "-c", OTHER_CALLS)
    ended = processes.ended(seconds=60)
    assert all(one.code for one in ended)
    told = [line for one in ended for line in one.err.splitlines() if "all ranks must make the same calls" in line]
    assert told
    assert "runtime.save()" in told[0]


def test_two_levels_on_one_host_are_refused(processes, small_data):
    flags = flags_of(small_data, processes.folder / "run", *SMALL, "--exchange-levels", 2, M=4)
    start_on(processes, [0, 0], *TRAIN, *flags)
    for one in processes.ended():
        assert one.code == 2
        assert "--exchange-levels 2 has no effect, because all ranks are on one host; leave out" in one.err
        assert "Traceback" not in one.err
