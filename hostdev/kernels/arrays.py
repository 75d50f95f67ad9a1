"""Types for arrays, for equally spaced rows, and for the scalars of optimizers. N: elements; D: columns."""

import contextlib
import math
import mmap
import sys
import threading
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Ids: TypeAlias = npt.NDArray[np.int32 | np.int64]  # [N]
AnyIds: TypeAlias = npt.NDArray[Any]  # [N], int32 or int64, where the type does not say which
LongIds: TypeAlias = npt.NDArray[np.int64]  # [N]
Keys: TypeAlias = npt.NDArray[np.int64]  # [N]
RowNumbers: TypeAlias = npt.NDArray[np.int32]  # [N]
Positions: TypeAlias = npt.NDArray[np.int32]  # [N], indices of another array
Counts: TypeAlias = npt.NDArray[np.int64]  # [N]
Lengths: TypeAlias = npt.NDArray[np.int32]  # [N], numbers of values of each row
Rows: TypeAlias = npt.NDArray[np.float32]  # [N, D]
Values: TypeAlias = npt.NDArray[np.float32]  # [N], or [N, values of each]
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


LINE = 64  # bytes; a vector store that crosses a line takes as long as two
HUGE_PAGE = 1 << 21
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # Python 3.11 lacks the name
_scratch = threading.local()


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
    """Return the memory of `reserved`, and an array of its bytes, uint8 [size], at the beginning of a huge page."""
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
    """Give the memory of whole pages in C-contiguous values, part of a `reserved` array, back to the system.

    The values are undefined afterwards. This has no effect on other arrays.
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
    """Return a copy whose memory the system gets back as soon as it is freed; the allocator would keep it."""
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
