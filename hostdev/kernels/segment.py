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
from hostdev.kernels.pool import Task, host_threads, run_tasks

_SORT_FROM_THREADS = 4
_SUMS_AHEAD, _GRADS_AHEAD = 12, 24  # uses
_PIECES_PER_THREAD = 4


@kernel
def _sum_stream(start: Any, stop: Any, grads: Any, inverse: Any, out: Any) -> None:
    """Add every use to its row; `start` and `stop` say nothing, as the stream is not split."""
    D = grads.shape[1]
    uses, seen, one = np.uint64(len(inverse)), np.uint64(0), np.uint64(1)
    for i in range(np.uint64(0), uses):
        prefetch_to_read_once(grads, i + np.uint64(_GRADS_AHEAD), D * 4)
        if i + np.uint64(_SUMS_AHEAD) < uses:
            prefetch_to_write(out, inverse[i + np.uint64(_SUMS_AHEAD)], D * 4)
        row = np.uint64(inverse[i])
        total, grad = out[row], grads[i]
        if row == seen:  # the first use: rows are numbered in order of first occurrence
            seen += one
            for j in range(D):
                total[j] = grad[j]
        else:
            for j in range(D):
                total[j] += grad[j]


@kernel
def _sum_scalars(start: Any, stop: Any, grads: Any, inverse: Any, out: Any) -> None:
    """`_sum_stream` for D = 1."""
    seen, one, column = np.uint64(0), np.uint64(1), np.uint64(0)
    for i in range(np.uint64(0), np.uint64(len(inverse))):
        row = np.uint64(inverse[i])
        if row == seen:
            seen += one
            out[row, column] = grads[i, column]
        else:
            out[row, column] += grads[i, column]


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
def _sum_sorted(start: Any, stop: Any, grads: Any, order: Any, ends: Any, out: Any) -> None:
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


def sum_tasks(
    grads: npt.NDArray[np.float32], inverse: npt.NDArray[np.int32], out: npt.NDArray[np.float32]
) -> list[Task]:
    """Return tasks for `pool.run_tasks` that together do `segment_sum`; they use the caller's scratch memory."""
    if host_threads() < _SORT_FROM_THREADS:
        return [(_sum_scalars if out.shape[1] == 1 else _sum_stream, 0, 1, (grads, inverse, out))]
    order = scratch("uses by row", (len(inverse),), np.int32)
    ends = scratch("ends of rows", (len(out) + 2,), np.int64)
    _sort_uses(inverse, ends, order)
    pieces = host_threads() * _PIECES_PER_THREAD
    edges = np.searchsorted(ends[: len(out) + 1], np.arange(1, pieces) * (len(inverse) // pieces))
    edges = np.concatenate([[0], edges, [len(out)]])
    return [(_sum_sorted, int(a), int(b), (grads, order, ends, out)) for a, b in itertools.pairwise(edges) if a < b]


def segment_sum(grads: npt.NDArray[np.float32], inverse: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
    """Sum the gradients of each unique row: out[u] = ((g_a + g_b) + g_c) + ... over its uses a < b < c < ...

    grads    float32 [N, D], one row per use
    inverse  int32 [N], the unique row of each use, numbered in order of first occurrence (see `unique`)
    out      float32 [U, D], overwritten
    """
    if len(out):
        run_tasks(sum_tasks(grads, inverse, out))
