"""A failed rendezvous: each process names the problem in one line, and exits with 2."""

import re
import sys

import pytest
from torch.distributed import HashStore

from hostdev.core.errors import UserError
from hostdev.distributed.monitor import HUNG_SECONDS
from hostdev.distributed.rank_environment import ALONE
from hostdev.distributed.rendezvous import announce
from tests.distributed.conftest import flags_of
from tests.ports import free_port

TRAIN = ("-m", "hostdev.train")
CHECK = ("-m", "hostdev.launch", "--check")


def refused(processes):
    """Wait for all processes, which must fail; return their error lines. torch's store may print warnings, too."""
    lines = []
    for process in processes.ended():
        assert process.code == 2, process
        [line] = [line for line in process.err.splitlines() if ": error: " in line]
        lines.append(line.split(": error: ")[1])
    return lines


def start(processes, *arguments, port, **env):
    processes.start(sys.executable, *arguments, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **env)


def test_different_numbers_of_ranks(processes):
    port = free_port()
    for rank, ranks in enumerate((2, 4)):
        start(processes, *CHECK, RANK=rank, WORLD_SIZE=ranks, port=port)
    first, second = refused(processes)
    assert first == second
    assert re.fullmatch(
        r"rank [01] \(.* pid \d+\) was started as one of [24] ranks, another as one of [24]; start all .*", first
    )


def test_who_contradicts_does_not_count_as_here():
    """Or the first might see all here, before it sees what is wrong, and wait for one that has ended."""
    store = HashStore()
    announce(store, ALONE._replace(rank=0, ranks=2))
    with pytest.raises(UserError, match="was started as one of 4 ranks, another as one of 2"):
        announce(store, ALONE._replace(rank=1, ranks=4))
    assert store.check(["here/0"]) and store.check(["wrong"]) and not store.check(["here/1"])


@pytest.mark.slow
def test_a_rank_that_is_started_twice(processes):
    port = free_port()
    for rank in (0, 1, 1):
        start(processes, *CHECK, RANK=rank, WORLD_SIZE=3, port=port)
    lines = refused(processes)
    assert len(set(lines)) == 1
    assert lines[0].startswith("two processes were started as rank 1: ")
    assert all(f"pid {process.pid}" in lines[0] for process in processes.started[1:])


@pytest.mark.slow
def test_a_rank_that_never_comes(processes, small_data):
    port, flags = free_port(), flags_of(small_data, processes.folder / "run", "--dist-timeout", 15)
    for rank in (0, 1):
        start(processes, *TRAIN, *flags, RANK=rank, WORLD_SIZE=3, port=port)
    where = f"127.0.0.1:{port}"
    first, second = refused(processes)
    words = f"rank 2 of 3 did not reach {where} within 15 s"
    assert first == words
    assert second in (words, f"rank 1 of 3: rank 0 at {where} ended before rank 2 arrived")


@pytest.mark.slow
def test_a_network_interface_that_is_none(processes, small_data):
    """On one of two: the other hears of it."""
    port, flags = free_port(), flags_of(small_data, processes.folder / "run", "--dist-timeout", 15)
    for rank, more in enumerate(({}, {"GLOO_SOCKET_IFNAME": "none7"})):
        start(processes, *TRAIN, *flags, RANK=rank, WORLD_SIZE=2, port=port, **more)
    for line in refused(processes):
        assert line.startswith("rank 1 of 2: all ranks have joined but cannot reach each other: ")
        assert "none7" in line


@pytest.mark.slow
def test_a_rank_that_ends_when_all_have_met(processes, small_data):
    port, flags = free_port(), flags_of(small_data, processes.folder / "run")
    code = (
        "import os\n"
        "from hostdev.distributed.rank_environment import find_rank_environment\n"
        "from hostdev.distributed.process_group import _meet\n"
        "_meet(find_rank_environment(), 60); os._exit(0)"
    )
    start(processes, *TRAIN, *flags, RANK=0, WORLD_SIZE=2, port=port)
    start(processes, "-c", code, RANK=1, WORLD_SIZE=2, port=port)
    first, second = processes.ended()
    assert (first.code, second.code) == (2, 0)
    assert first.err == f"hostdev.train: error: rank 1 of 2: has sent no heartbeat for {HUNG_SECONDS:g} s; it hangs\n"
