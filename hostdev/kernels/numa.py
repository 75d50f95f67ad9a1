"""Interleaving of a large table's pages over the memory nodes of a NUMA machine.

By default, a page lies on the node of the thread that writes it first. All threads read and update random rows, so all
nodes should share the load. This module calls Linux's mbind by its system-call number, without a library. It does
nothing if this process's CPUs belong to one node, if a policy is already set (numactl), on other systems, or if the
call is not permitted, as in some containers.

The benefit has not been measured: no machine with several nodes was available.
"""

import ctypes
import mmap
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy.typing as npt

_NODES = Path("/sys/devices/system/node")
_LEAST_BYTES = 16 << 20
_NUMBERS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # system calls: mbind, get_mempolicy
_DEFAULT, _INTERLEAVE, _MOVE = 0, 3, 2  # linux/mempolicy.h
_WORD = 64
_layout = ""


def interleave(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Interleave the pages of an array over all nodes if it has 16 MiB or more; return the array.

    Call this before the array is first written.
    """
    global _layout
    found = nodes()
    if len(found) < 2 or array.nbytes < _LEAST_BYTES:
        return array
    error = bind(array, found)
    _layout = f"not interleaved over {len(found)} nodes: {error}" if error else f"interleaved over {len(found)} nodes"
    return array


def in_words() -> str:
    """Describe how large tables are placed on nodes; return "" if no table is large or there is only one node."""
    return _layout


def nodes() -> list[int]:
    """Return the NUMA nodes that have memory and CPUs that this process may use."""
    if not sys.platform.startswith("linux"):
        return []
    mine = os.sched_getaffinity(0)
    try:
        with_memory = _numbers(_NODES / "has_memory")
        return [node for node in sorted(with_memory) if mine & _numbers(_NODES / f"node{node}" / "cpulist")]
    except (OSError, ValueError):
        return []


def bind(array: npt.NDArray[Any], found: list[int]) -> str:
    """Interleave the pages that lie wholly in an array over the nodes `found`; return why that failed, or ""."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return f"mbind's system-call number is not known on {platform.machine()}"
    mbind, get_mempolicy = numbers
    mode = ctypes.c_int()
    error = _call(get_mempolicy, ctypes.byref(mode), None, 0, None, 0)
    if error:
        return os.strerror(error)
    if mode.value != _DEFAULT:
        return "this process already has a memory policy"
    words = max(found) // _WORD + 1
    mask = (ctypes.c_uint64 * words)()
    for node in found:
        mask[node // _WORD] |= 1 << node % _WORD
    page = mmap.PAGESIZE
    begin, end = -(-array.ctypes.data // page) * page, (array.ctypes.data + array.nbytes) // page * page
    error = _call(mbind, begin, end - begin, _INTERLEAVE, ctypes.byref(mask), words * _WORD + 1, _MOVE)
    return os.strerror(error) if error else ""


def _call(number: int, *args: Any) -> int:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    given = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return ctypes.get_errno() if syscall(ctypes.c_long(number), *given) else 0


def _numbers(path: Path) -> set[int]:
    """Return the numbers that a file lists in a form such as 0-3,8."""
    found: set[int] = set()
    for part in path.read_text().strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
