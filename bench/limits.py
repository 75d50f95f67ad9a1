"""The machine's rates, with which benchmarks compare their results in the same run.

S: number of optimizer state columns of D values per row.
"""

import mmap
import time
from hashlib import sha256
from typing import Any

import numpy as np

from hostdev.kernels.jit import kernel, prefetch_to_read, prefetch_update
from hostdev.kernels.pool import parallel_for

_GRAIN = 1 << 22  # numbers that a thread copies at a time
_ROWS = 1 << 10  # rows that a thread visits at a time
_AHEAD = 8  # prefetch distance in rows


def mapped(n: int) -> np.ndarray:
    """Return an array float32 [n] whose memory returns to the system when it is freed."""
    pages = mmap.mmap(-1, 4 * n)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.float32)


def copy_rate() -> float:
    """Return the GB/s, read and written, of copies in host memory by all threads."""
    source, target = mapped(1 << 27), mapped(1 << 27)
    source[:] = 1

    def copy(start: int, stop: int) -> None:
        target[start:stop] = source[start:stop]

    best = 0.0
    for _ in range(4):
        start = time.perf_counter()
        parallel_for(copy, len(source), grain=_GRAIN)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def fill_rate(nbytes: int) -> float:
    """Return the GB/s at which all threads write newly allocated memory, page faults included.

    In a virtual machine the first call may be slower, because the host provides memory at its first use; call it twice.
    """
    target = mapped(nbytes // 4)

    def fill(start: int, stop: int) -> None:
        target[start:stop] = 1

    start = time.perf_counter()
    parallel_for(fill, len(target), grain=_GRAIN)
    return target.nbytes / (time.perf_counter() - start) / 1e9


def hash_rate() -> float:
    """Return the GB/s of one stream of SHA-256, the limit of the digest."""
    block = np.zeros(1 << 28, np.uint8)
    start = time.perf_counter()
    sha256(block.data).digest()
    return block.nbytes / (time.perf_counter() - start) / 1e9


@kernel
def _read(start: Any, stop: Any, ids: Any, block: Any, sums: Any) -> None:
    D = np.uint64(block.shape[2])
    total = np.float32(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        if i + np.uint64(_AHEAD) < np.uint64(stop):
            prefetch_to_read(block, ids[i + np.uint64(_AHEAD)], 4 * D)
        weights = block[np.uint64(ids[i]), 0]
        for j in range(D):
            total += weights[j]
    sums[np.uint64(start)] = total


@kernel
def _rewrite(start: Any, stop: Any, ids: Any, block: Any, one: Any) -> None:
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_update(block, ids, i, stop)
        row = block[np.uint64(ids[i])]
        for plane in range(np.uint64(row.shape[0])):
            for j in range(np.uint64(row.shape[1])):
                row[plane, j] *= one


def reach(block: np.ndarray, ids: np.ndarray) -> float:
    """Return the seconds in which all threads read the weights of rows by id, then read and write whole rows.

    This is the memory's part of a lookup and an update of the rows: nothing is computed, and no value changes.

    Args:
        block: float32 [V, 1 + S, D].
        ids: int32 or int64 [U], unique.
    """
    sums = np.empty(len(ids), np.float32)
    start = time.perf_counter()
    parallel_for(_read, len(ids), ids, block, sums, grain=_ROWS)
    parallel_for(_rewrite, len(ids), ids, block, np.float32(1), grain=_ROWS)
    return time.perf_counter() - start
