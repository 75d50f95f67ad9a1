"""Types for arrays and the scalars of optimizers, and memory for arrays: aligned, reserved, reused or interleaved.

N: elements; D: columns.

A large table's pages are interleaved over the memory nodes of a NUMA machine. By default, a page lies on the node of
the thread that writes it first. All threads read and update random rows, so all nodes should share the load.
`interleave` calls Linux's mbind by its system-call number, without a library. It does nothing if this process's CPUs
belong to one node, if a policy is already set (numactl), on other systems, or if the call is not permitted, as in some
containers. The benefit has not been measured: no machine with several nodes was available.
"""

import contextlib
import ctypes
import math
import mmap
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

LINE = 64  # bytes; a vector store that crosses a line takes as long as two
HUGE_PAGE = 1 << 21
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # Python 3.11 lacks the name
_scratch = threading.local()
_NODES = Path("/sys/devices/system/node")
_LEAST_BYTES = 16 << 20
_NUMBERS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # system calls: mbind, get_mempolicy
_DEFAULT, _INTERLEAVE, _MOVE = 0, 3, 2  # linux/mempolicy.h
_WORD = 64
_layout = ""

Array: TypeAlias = npt.NDArray[Any]
Ids: TypeAlias = npt.NDArray[np.int32 | np.int64]  # [N]
AnyIds: TypeAlias = npt.NDArray[Any]  # [N], int32 or int64; the type does not check this
LongIds: TypeAlias = npt.NDArray[np.int64]  # [N]
Keys: TypeAlias = npt.NDArray[np.int64]  # [N]
RowNumbers: TypeAlias = npt.NDArray[np.int32]  # [N]
Positions: TypeAlias = npt.NDArray[np.int32]  # [N], indices of another array
Counts: TypeAlias = npt.NDArray[np.int64]  # [N]
Lengths: TypeAlias = npt.NDArray[np.int32]  # [N], the number of values of each row
Rows: TypeAlias = npt.NDArray[np.float32]  # [N, D]
Values: TypeAlias = npt.NDArray[np.float32]  # [N], or [N, values per item]
Numbers: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Scalars: TypeAlias = tuple[np.float32 | float, ...]


class Strided(NamedTuple):
    """Equally spaced rows of a C-contiguous array: row i is values[first + i * step].

    Kernels take the three attributes as arguments, because numba does not vectorize loops over strided arrays.
    """

    values: npt.NDArray[Any]
    first: int = 0
    step: int = 1


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Any:
    """Return an uninitialized C-contiguous array that begins on a cache line.

    An array of 16 MiB or more begins at a multiple of 2 MiB, so that it fits huge pages, which numpy requests (madvise)
    when it allocates memory. At most 2 MiB of extra memory are reserved, and less than a page of this is touched.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    alignment = HUGE_PAGE if size >= 8 * HUGE_PAGE else LINE
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def reserved(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
    """Return a C-contiguous array of zeros whose memory is taken page by page, when it is first written.

    Only address space is reserved, so the array may be larger than the memory. An array of 16 MiB or more lies in huge
    pages, as with `aligned_empty`. Raises MemoryError if the system refuses even the address space.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.zeros(shape, dtype)
    return reserve(size, huge=size >= 8 * HUGE_PAGE)[1].view(dtype).reshape(shape)


def reserve(size: int, *, huge: bool) -> tuple[mmap.mmap, Any]:
    """Return memory as `reserved` takes it, and its bytes, uint8 [size], from a multiple of 2 MiB on if `huge`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    alignment = HUGE_PAGE if huge else 0
    try:
        memory = mmap.mmap(-1, size + alignment, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot reserve {size:,} bytes of address space ({error})") from None
    if alignment and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel lacks huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % alignment if alignment else 0
    return memory, raw[start : start + size]


def give_back(values: Any) -> None:
    """Give the whole pages within C-contiguous values, part of a `reserved` array, back to the system.

    The values are undefined afterwards. Arrays in other memory are left unchanged.
    """
    base = values
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    memory = base.obj if isinstance(base, memoryview) else base
    if not isinstance(memory, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = values.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + values.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def copied(values: npt.NDArray[Any]) -> Any:
    """Return a copy in memory that the system gets back once the copy is freed; numpy's allocator could keep it."""
    found = reserved(values.shape, values.dtype)
    found[...] = values
    return found


def scratch(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Return an uninitialized array in this thread's scratch memory, beginning on a cache line.

    The array is valid until this thread's next call with the same name, which reuses the memory. Fresh memory would
    cost a page fault per 4 KiB.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    held: dict[str, npt.NDArray[np.uint8]] = _scratch.__dict__
    if name not in held or len(held[name]) < size:
        held[name] = aligned_empty((size + size // 4 + LINE,), np.uint8)
    return held[name][:size].view(dtype).reshape(shape)


_identity = np.arange(1 << 16, dtype=np.int32)


def identity(n: int) -> npt.NDArray[np.int32]:
    """Return the numbers 0, 1, ..., n - 1, int32 [n], in an array that all callers share and must not change.

    The array is not flagged read-only, since numba would compile each kernel again for read-only arrays.
    """
    global _identity
    held = _identity
    if len(held) < n:
        held = _identity = np.arange(2 * n, dtype=np.int32)
    return held[:n]


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
    """Interleave over the nodes `found` the pages that lie wholly in an array; return why that failed, or ""."""
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
