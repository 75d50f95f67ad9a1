"""Ranks that share hosts exchange in two levels: the results are those of one level and of one process, to the bit."""

import pickle
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.errors import TransientError, UserError
from hostdev.distributed import host_memory
from hostdev.distributed.host_memory import (
    HOST_VARIABLE,
    HostExchange,
    HostMemory,
    Layouts,
    Slices,
    get_identity,
    group_by_host,
    have_levels,
    require_two_levels,
)
from tests.distributed import own_loop
from tests.distributed.processes import start_on
from tests.distributed.same import assert_same
from tests.ports import free_port

PLACES = {"2 x 2": [0, 0, 1, 1], "2 + 1": [0, 0, 1], "1 + 3": [0, 1, 1, 1], "in turn": [0, 1, 0, 1]}


def results(processes, count):
    for process in processes.ended():
        assert process.code == 0, process
    return [pickle.loads((processes.folder / f"rank{rank}.pickle").read_bytes()) for rank in range(count)]


@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_collectives_give_the_same_bytes(processes, count):
    """The processes meet once for each way to place them on hosts."""
    ways = [places for places in PLACES.values() if len(places) == count]
    meetings = [f"{''.join(map(str, places))}@{free_port()}" for places in ways]
    start_on(processes, ways[0], "-m", "tests.distributed.levels_loop", processes.folder, *meetings)
    of_ranks = results(processes, count)
    for number, places in enumerate(ways):
        found = [each[number] for each in of_ranks]
        for each in found:
            assert (each[2]["name"], each[1]["name"]) == ("TwoLevelChannel", "Channel")
            assert each[2]["results"] == each[1]["results"]
            assert each[2]["hosts"] == group_by_host(range(count), places)
        network = {levels: sum(each[levels]["network"] for each in found) for levels in (1, 2)}
        assert 0 < network[2] <= network[1]


@pytest.mark.parametrize(
    "places", [PLACES["2 + 1"], pytest.param([0, 1, 1], marks=pytest.mark.slow)], ids=["2 + 1", "1 + 2"]
)
def test_a_loop_of_ones_own(processes, places):
    """One process has the same bits with each choice: test_runtime.py."""
    alone = own_loop.train(None, own_loop.CHOICES["serial"])
    start_on(processes, places, "-m", "tests.distributed.own_loop", processes.folder, "few")
    parts = results(processes, len(places))
    for name in (*own_loop.CHOICES, "with another", "beside"):
        assert_same([part[name] for part in parts], alone)


class Hosts:
    """The layouts of some hosts, whose memory is arrays."""

    def __init__(self, hosts, gives):
        """Lay out what each rank sends each other rank, [W, W] bytes."""
        self.hosts = hosts
        self.layouts = []
        for here, ranks in enumerate(hosts):
            mine, theirs = gives[ranks].copy(), gives[:, ranks].T.copy()
            mine[range(len(ranks)), ranks] = theirs[range(len(ranks)), ranks] = 0
            self.layouts.append(Layouts(hosts, here).make(mine, theirs))
        self.memory = [np.zeros(layout.size, np.int64) for layout in self.layouts]  # a number for each byte


@settings(deadline=None)
@given(st.data())
def test_layouts(data):
    """Every byte has a place of its own, and arrives where its receiver reads it."""
    count = data.draw(st.integers(2, 7))
    places = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=count**2, max_size=count**2))
    gives, hosts = np.array(sizes, np.int64).reshape(count, count), group_by_host(range(count), places)
    made = Hosts(hosts, gives)

    def named(sender, receiver):
        return 10_000 + 1000 * sender + 100 * receiver + np.arange(gives[sender, receiver])

    for ranks, layout, memory in zip(hosts, made.layouts, made.memory, strict=True):
        for index, sender in enumerate(ranks):
            for receiver in set(range(count)) - {sender}:
                place = layout.sends[index, receiver]
                assert not memory[place : place + gives[sender, receiver]].any()
                memory[place : place + gives[sender, receiver]] = named(sender, receiver)
        assert memory[: layout.start].all()
    for here, (layout, memory) in enumerate(zip(made.layouts, made.memory, strict=True)):
        at = layout.start
        for there, (other, their) in enumerate(zip(made.layouts, made.memory, strict=True)):
            begin = sum(other.give[:here])
            assert layout.take[there] == other.give[here]
            memory[at : at + layout.take[there]] = their[begin : begin + layout.take[there]]
            at += layout.take[there]
        assert at == layout.size
    for ranks, layout, memory in zip(hosts, made.layouts, made.memory, strict=True):
        for index, receiver in enumerate(ranks):
            for sender in set(range(count)) - {receiver}:
                place = layout.reads[index, sender]
                np.testing.assert_array_equal(memory[place:][: gives[sender, receiver]], named(sender, receiver))


def part(sizes):
    sizes = np.array(sizes, np.int64)
    return Slices(np.zeros(sizes.sum(), np.uint8), np.cumsum(sizes) - sizes, sizes)


def both(first, second, seconds=5.0):
    """Let two ranks of one host call these functions of a `HostExchange`; the errors that they raise, or None."""
    links = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = [None, None]

    def run(mine, work):
        links[mine].settimeout(seconds)
        try:
            work(HostExchange([[0, 1]], 0, mine, [links[mine]]))
        except Exception as error:
            errors[mine] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in links:
        link.close()
    return errors


@pytest.mark.parametrize("size", [10, 100_000])
def test_sizes_that_differ(size):
    first, second = both(
        lambda one: one.run(part([0, size]), part([0, 0]), None),
        lambda one: one.run(part([0, 0]), part([size + 1, 0]), None),
    )
    assert str(first) == f"rank 0 sends {size} bytes to rank 1, which expects {size + 1}"
    assert str(second) == "rank 0 of this host has closed its connection"


def test_a_rank_that_is_one_call_behind():
    def twice(one):
        one.run(part([0, 0]), part([0, 0]), None)
        one.run(part([0, 0]), part([0, 0]), None)

    def ahead(one):
        one._number += 1
        one.run(part([0, 0]), part([0, 0]), None)

    first, second = both(twice, ahead)
    assert str(first) == "rank 1 of this host is in a different call"
    assert "rank 0 of this host" in str(second)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_does_not_answer(late):
    end = threading.Event()

    def wait(one):
        end.wait(20)

    def run(one):
        try:
            one.run(part([0, 0]), part([0, 0]), None)
        finally:
            end.set()

    errors = both(*((wait, run) if late == 0 else (run, wait)), seconds=0.2)
    assert str(errors[1 - late]) == f"rank {late} of this host has not answered within 0.2 s"


def test_memory_that_cannot_be_allocated(monkeypatch):
    def full(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_memory.os, "posix_fallocate", full)
    with pytest.raises(TransientError, match=r"2 MiB of memory.*No space left on device.*--exchange-levels 1"):
        HostMemory().grow(1_500_000)


def test_memory_grows_by_more_than_it_must():
    memory = HostMemory()
    assert memory.grow(0) is None
    host_memory.os.close(memory.grow(1))
    assert len(memory.array) == 1 << 20
    assert memory.grow(1 << 20) is None
    host_memory.os.close(memory.grow((1 << 20) + 1))
    assert len(memory.array) == 2 << 20


def test_identities(monkeypatch):
    assert get_identity(0) == get_identity(1)
    first = get_identity(0)
    monkeypatch.setenv(HOST_VARIABLE, "another")
    assert get_identity(0) != first
    monkeypatch.setattr("hostdev.distributed.host_memory._BOOT", Path("/not/there"))
    assert get_identity(0) != get_identity(1)


def test_hosts_of_groups():
    identities = ["b", "a", "b", "c"]
    assert group_by_host([0, 1, 2, 3], identities) == [[0, 2], [1], [3]]
    assert group_by_host([1, 3], identities) == [[0], [1]]
    assert [have_levels(hosts) for hosts in ([[0, 2], [1]], [[0], [1]], [[0, 1]])] == [True, False, False]
    with pytest.raises(UserError, match="each rank is on a different host"):
        require_two_levels([[0], [1]])
    with pytest.raises(UserError, match="all ranks are on one host"):
        require_two_levels([[0, 1]])
