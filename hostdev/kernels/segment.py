"""The gradient of a unique row: the sum over its uses in a batch, in order of occurrence, whatever the threads.

Two ways, the same additions. A few threads: one of them streams through the gradients in order and adds to the rows'
sums, as a core reads a stream at nearly the bandwidth of the machine, and two that share it slow each other down. More
threads: the uses are sorted by row, and threads share the rows.

N uses, U unique rows, D columns.
"""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.buffers import scratch
from hostdev.kernels.jit import kernel, prefetch_to_read, prefetch_to_read_once, prefetch_to_write
from hostdev.kernels.pool import host_threads, run_tasks

_SORT_FROM_THREADS = 4
_SUMS_AHEAD, _GRADS_AHEAD = 12, 24  # uses
_PIECES_PER_THREAD = 4
NEVER = np.uint64(1 << 63)  # for `seen`: no row is at its first use


@kernel
def sum_part(start: Any, stop: Any, seen: Any, grads: Any, inverse: Any, out: Any) -> Any:
    """Add the uses [start, stop) to their rows' sums; the uses before have been added.

    seen     how many rows the uses before have; rows are numbered in order of first occurrence
    returns  how many rows there are up to `stop`
    """
    D = grads.shape[1]
    uses, seen, one = np.uint64(stop), np.uint64(seen), np.uint64(1)
    for i in range(np.uint64(start), uses):
        prefetch_to_read_once(grads, i + np.uint64(_GRADS_AHEAD), D * 4)
        if i + np.uint64(_SUMS_AHEAD) < uses:
            prefetch_to_write(out, inverse[i + np.uint64(_SUMS_AHEAD)], D * 4)
        row = np.uint64(inverse[i])
        total, grad = out[row], grads[i]
        if row == seen:  # its first use
            seen += one
            for j in range(D):
                total[j] = grad[j]
        else:
            for j in range(D):
                total[j] += grad[j]
    return seen


@kernel
def sum_part_of_scalars(start: Any, stop: Any, seen: Any, grads: Any, inverse: Any, out: Any) -> Any:
    """`sum_part` for D = 1."""
    seen, one, column = np.uint64(seen), np.uint64(1), np.uint64(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(inverse[i])
        if row == seen:
            seen += one
            out[row, column] = grads[i, column]
        else:
            out[row, column] += grads[i, column]
    return seen


def streams() -> bool:
    """Tell whether the threads are so few that one of them should add up all gradients."""
    return host_threads() < _SORT_FROM_THREADS


@kernel
def _sort_uses(inverse: Any, ends: Any, order: Any) -> None:
    """Counting sort, stable: the uses of row u become order[ends[u] : ends[u + 1]]."""
    ends[:] = 0
    for i in range(len(inverse)):
        ends[np.uint64(inverse[i]) + np.uint64(2)] += 1
    for u in range(2, len(ends)):
        ends[u] += ends[u - 1]
    for i in range(len(inverse)):
        slot = np.uint64(inverse[i]) + np.uint64(1)
        order[np.uint64(ends[slot])] = i
        ends[slot] += 1


@kernel
def sum_sorted(start: Any, stop: Any, grads: Any, order: Any, ends: Any, out: Any) -> None:
    """Sum the unique rows [start, stop)."""
    D = grads.shape[1]
    last = np.uint64(ends[np.uint64(stop)])
    for u in range(np.uint64(start), np.uint64(stop)):
        total = out[u]
        begin, end = np.uint64(ends[u]), np.uint64(ends[u + np.uint64(1)])
        for k in range(begin, end):
            if k + np.uint64(_SUMS_AHEAD) < last:
                prefetch_to_read(grads, order[k + np.uint64(_SUMS_AHEAD)], D * 4)
            grad = grads[np.uint64(order[k])]
            if k == begin:
                for j in range(D):
                    total[j] = grad[j]
            else:
                for j in range(D):
                    total[j] += grad[j]


def sort_uses(inverse: npt.NDArray[np.int32], rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return the uses [N] sorted by row, stable, and where each row's begin [rows + 1]; in scratch memory."""
    order = scratch("uses by row", (len(inverse),), np.int32)
    ends = scratch("ends of rows", (rows + 2,), np.int64)
    _sort_uses(inverse, ends, order)
    return order, ends[: rows + 1]


def row_ranges(ends: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ranges of rows with about as many uses each, several per thread."""
    pieces = host_threads() * _PIECES_PER_THREAD
    edges = np.searchsorted(ends, np.arange(1, pieces) * (ends[-1] // pieces))
    edges = np.concatenate([[0], edges, [len(ends) - 1]])
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if a < b]


def first_seen(out: npt.NDArray[np.float32], in_order: bool) -> np.uint64:
    """Prepare sums [U, D] of rows in any order, or in order of first occurrence; return `seen` for the first use."""
    if in_order:
        return np.uint64(0)
    out.fill(-0.0)  # what -0 is added to stays as it is, 0 too
    return NEVER


def segment_sum(
    grads: npt.NDArray[np.float32],
    inverse: npt.NDArray[np.int32],
    out: npt.NDArray[np.float32],
    *,
    in_order: bool = True,
) -> None:
    """Sum the gradients of each unique row: out[u] = ((g_a + g_b) + g_c) + ... over its uses a < b < c < ...

    grads     float32 [N, D], one row per use
    inverse   int32 [N], the unique row of each use; every row has one
    out       float32 [U, D], overwritten
    in_order  the rows are numbered in order of first occurrence (see `unique`), which saves a touch of `out`
    """
    if streams() or not len(out):
        part = sum_part_of_scalars if out.shape[1] == 1 else sum_part
        part(0, len(inverse), first_seen(out, in_order), grads, inverse, out)
        return
    order, ends = sort_uses(inverse, len(out))
    run_tasks([(sum_sorted, start, stop, (grads, order, ends, out)) for start, stop in row_ranges(ends)])
