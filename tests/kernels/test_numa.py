"""Placement of tables' pages on machines with several nodes, simulated by files and recorded calls."""

import ctypes
import errno
import mmap
import os
import sys

import numpy as np
import pytest

from hostdev import HostTable, LazyAdam
from hostdev.kernels import arrays
from hostdev.kernels.arrays import aligned_empty

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's calls")
LARGE = (1 << 23,)  # float32: 32 MiB


def lists(numbers):
    return ",".join(map(str, sorted(numbers))) + "\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make a machine: the CPUs of each node by its number, and which nodes have memory."""
    monkeypatch.setattr(arrays, "_NODES", tmp_path)
    monkeypatch.setattr(arrays, "_layout", "")
    monkeypatch.setattr(arrays.platform, "machine", lambda: "x86_64")

    def make(cpus, memory):
        (tmp_path / "has_memory").write_text(lists(memory))
        for node, some in cpus.items():
            (tmp_path / f"node{node}").mkdir()
            (tmp_path / f"node{node}" / "cpulist").write_text(some if isinstance(some, str) else lists(some))

    return make


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of mbind: address, bytes, nodes. `errors` and `policy` are the kernel's answers."""

    class Calls(list):
        errors, policy = {}, 0

    noted = Calls()

    def call(number, *args):
        if number == 239:
            args[0]._obj.value = noted.policy
        else:
            begin, size, mode, mask, bits, flags = args
            assert (number, mode, flags) == (237, 3, 2)
            words = list(mask._obj)
            assert bits == 64 * len(words) + 1
            held = {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1}
            noted.append((begin, size, held))
        return noted.errors.get(number, 0)

    monkeypatch.setattr(arrays, "_call", call)
    return noted


def mine():
    return os.sched_getaffinity(0)


def test_the_pages_of_a_large_array_go_over_all_nodes(machine, calls):
    machine({0: mine(), 1: "7000-7003," + lists(mine()), 70: mine()}, [0, 1, 70])
    array = aligned_empty(LARGE)[100:-100]
    assert arrays.interleave(array) is array
    ((begin, size, held),) = calls
    assert held == {0, 1, 70}
    assert begin % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert 0 <= begin - array.ctypes.data < mmap.PAGESIZE  # no other memory's pages
    assert 0 <= array.ctypes.data + array.nbytes - begin - size < mmap.PAGESIZE
    assert arrays.in_words() == "interleaved over 3 nodes"


@pytest.mark.parametrize(
    ("cpus", "memory"),
    [
        ({0: "all"}, [0]),
        ({0: "all", 1: "all"}, [1]),  # CPUs without memory
        ({0: "all", 1: ""}, [0, 1]),  # memory without CPUs
        ({0: "all", 1: "7000-7063"}, [0, 1]),  # this process runs on one of them
        ({0: "all", 1: "x"}, [0, 1]),
        ({}, [0, 1]),
    ],
)
def test_nothing_is_done_where_there_is_no_choice(machine, calls, cpus, memory):
    machine({node: mine() if some == "all" else some for node, some in cpus.items()}, memory)
    arrays.interleave(np.empty(LARGE, np.float32))
    assert not calls
    assert arrays.in_words() == ""


def test_small_arrays_lie_where_they_are_written(machine, calls):
    machine({0: mine(), 1: mine()}, [0, 1])
    arrays.interleave(np.empty(1000))
    assert not calls


@pytest.mark.parametrize(
    ("errors", "policy", "why"),
    [
        ({237: errno.EPERM}, 0, "Operation not permitted"),
        ({239: errno.ENOSYS}, 0, "Function not implemented"),
        ({}, 2, "this process already has a memory policy"),
    ],
)
def test_a_refusal_is_said_and_the_array_is_as_good(machine, calls, errors, policy, why):
    machine({0: mine(), 1: mine()}, [0, 1])
    calls.errors, calls.policy = errors, policy
    arrays.interleave(np.empty(LARGE, np.float32))
    assert len(calls) == (237 in errors)
    assert arrays.in_words() == f"not interleaved over 2 nodes: {why}"


def test_the_kernel_takes_the_call():
    """Bind to this machine's first node; a wrong argument is EINVAL or EFAULT."""
    array = aligned_empty((1 << 16,))
    why = arrays.bind(array, arrays.nodes()[:1] or [0])
    refusals = [os.strerror(errno.EPERM), os.strerror(errno.ENOSYS), "this process already has a memory policy"]
    assert why in ["", *refusals]
    array[:] = 1
    if not why:
        mode = ctypes.c_int()
        middle = array.ctypes.data + array.nbytes // 2
        assert arrays._call(arrays._NUMBERS[arrays.platform.machine()][1], ctypes.byref(mode), None, 0, middle, 2) == 0
        assert mode.value == 3


def test_a_tables_memory_is_interleaved(machine, calls):
    machine({0: mine(), 1: mine()}, [0, 1])
    table = HostTable(100_000, 32, LazyAdam(), name="t", seed=3)
    ((begin, size, _),) = calls
    assert table.block.ctypes.data <= begin
    assert size > table.block.nbytes - 2 * mmap.PAGESIZE
