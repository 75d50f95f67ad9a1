"""Sums of each row's gradients, always added in order of occurrence, with any number of threads.

An occurrence is one use of a row, which yields one gradient. There are two ways to sum, with the same additions. With
few threads, one thread streams through the gradients in order and adds each to its row's sum: one core reads a stream
at nearly the machine's memory bandwidth, and two would slow each other down. With more threads, the occurrences are
sorted by row, and the threads share the rows.

Shapes: N occurrences, U unique rows, D columns.
"""

import itertools

import numpy as np
import numpy.typing as npt

from hostdev.kernels.bfloat16 import to_float32
from hostdev.kernels.jit import kernel, prefetch_to_read, prefetch_to_read_once, prefetch_to_write
from hostdev.kernels.pool import host_threads

_SORT_FROM_THREADS = 4
_SUMS_AHEAD, _GRADS_AHEAD = 12, 24  # prefetch distances in occurrences
_PIECES_PER_THREAD = 4
_NEVER = 1 << 62  # a value of `seen` for which no occurrence is a row's first


@kernel
def sum_part(start, stop, seen, grads, first, step, inverse, out):
    """Add the gradients of the occurrences [start, stop) to the sums of their rows.

    The sums must already include all earlier gradients. The gradient of occurrence i is grads[first + i * step]. Rows
    are numbered in order of first occurrence.

    Args:
        seen: Number of rows that occur before `start`.
        inverse: int32 [N], the row of each occurrence.
        out: float32 [U, D], updated: the sums; a row's sum begins with its first gradient.

    Returns:
        The number of rows that occur before `stop`.
    """
    first, step = np.uint64(first), np.uint64(step)
    D = grads.shape[1]
    uses, seen, one = np.uint64(stop), np.uint64(seen), np.uint64(1)
    for i in range(np.uint64(start), uses):
        prefetch_to_read_once(grads, first + (i + np.uint64(_GRADS_AHEAD)) * step, D * 4)
        if i + np.uint64(_SUMS_AHEAD) < uses:
            prefetch_to_write(out, inverse[i + np.uint64(_SUMS_AHEAD)], D * 4)
        row = np.uint64(inverse[i])
        total, grad = out[row], grads[first + i * step]
        if row == seen:  # its first occurrence
            seen += one
            for j in range(D):
                total[j] = grad[j]
        else:
            for j in range(D):
                total[j] += grad[j]
    return seen


@kernel
def sum_scalar_part(start, stop, seen, grads, first, step, inverse, out):
    """Do the same as `sum_part`, for D = 1."""
    first, step = np.uint64(first), np.uint64(step)
    seen, one, column = np.uint64(seen), np.uint64(1), np.uint64(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(inverse[i])
        if row == seen:
            seen += one
            out[row, column] = grads[first + i * step, column]
        else:
            out[row, column] += grads[first + i * step, column]
    return seen


@kernel
def sum_scaled_part(start, stop, seen, grads, first, step, inverse, weights, out):
    """Add float32 or bfloat16 gradients as `sum_part` does, each times the weight of its occurrence.

    `weights` is float32 [N], or None if all weights are 1.
    """
    first, step = np.uint64(first), np.uint64(step)
    D = grads.shape[1]
    uses, seen, one = np.uint64(stop), np.uint64(seen), np.uint64(1)
    for i in range(np.uint64(start), uses):
        prefetch_to_read_once(grads, first + (i + np.uint64(_GRADS_AHEAD)) * step, grads.strides[0])
        if i + np.uint64(_SUMS_AHEAD) < uses:
            prefetch_to_write(out, inverse[i + np.uint64(_SUMS_AHEAD)], D * 4)
        row = np.uint64(inverse[i])
        weight = np.float32(1) if weights is None else weights[i]
        total, grad = out[row], grads[first + i * step]
        if row == seen:
            seen += one
            for j in range(D):
                total[j] = to_float32(grad[j]) * weight
        else:
            for j in range(D):
                total[j] += to_float32(grad[j]) * weight
    return seen


def streams() -> bool:
    """Return whether one thread should add all gradients, since there are only a few threads."""
    return host_threads() < _SORT_FROM_THREADS


def prepare_sums(out: npt.NDArray[np.float32], in_order: bool) -> int:
    """Prepare `out` [U, D] for sums, and return the argument `seen` for the first call of `sum_part`.

    `in_order` says whether rows are numbered by first occurrence. If not, all sums begin as -0.
    """
    if in_order:
        return 0
    out.fill(-0.0)  # x + -0 is x, even if x is 0
    return _NEVER


@kernel
def sort_uses(inverse, ends, order):
    """Sort the occurrences stably by row (counting sort): row u has the occurrences order[ends[u] : ends[u + 1]].

    Args:
        inverse: int32 [N], the row of each occurrence.
        ends: int64 [U + 2], written; the last item is for this function's own use.
        order: int32 [N], written.
    """
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
def sum_sorted(start, stop, grads, first, step, order, ends, source, weights, fresh, out):
    """Sum the gradients of the rows [start, stop) over their occurrences.

    Args:
        grads: float32 [any, D], or bfloat16 as uint16.
        first: The row of `grads` that has gradient 0; row first + i * step has gradient i.
        step: The distance between successive gradients, in rows.
        order: int32 [N], from `sort_uses`.
        ends: int64 [U + 1 or more], from `sort_uses`.
        source: int32 [N], the number of each occurrence's gradient, or None if occurrence i has gradient i.
        weights: float32 [N], the weight of each occurrence, or None if all weights are 1.
        fresh: Whether to begin new sums, which are -0 for rows that do not occur; if not, add to the sums in `out`.
        out: float32 [U, D], written: the sums.
    """
    first, step = np.uint64(first), np.uint64(step)
    D = grads.shape[1]
    last = np.uint64(ends[np.uint64(stop)])
    for u in range(np.uint64(start), np.uint64(stop)):
        total = out[u]
        begin, end = np.uint64(ends[u]), np.uint64(ends[u + np.uint64(1)])
        if fresh and begin == end:
            total[:] = np.float32(-0.0)
        for k in range(begin, end):
            if k + np.uint64(_SUMS_AHEAD) < last:
                ahead = np.uint64(order[k + np.uint64(_SUMS_AHEAD)])
                at = ahead if source is None else np.uint64(source[ahead])
                prefetch_to_read(grads, first + at * step, grads.strides[0])
            use = np.uint64(order[k])
            grad = grads[first + (use if source is None else np.uint64(source[use])) * step]
            weight = np.float32(1) if weights is None else weights[use]
            if fresh and k == begin:
                for j in range(D):
                    total[j] = to_float32(grad[j]) * weight
            else:
                for j in range(D):
                    total[j] += to_float32(grad[j]) * weight


def row_ranges(ends: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Split the rows into ranges (start, stop), several per thread, with about the same number of occurrences each.

    `ends`, int64 [U + 1], is as in `sort_uses`.
    """
    pieces = host_threads() * _PIECES_PER_THREAD
    edges = np.searchsorted(ends, np.arange(1, pieces) * (ends[-1] // pieces))
    edges = np.concatenate([[0], edges, [len(ends) - 1]])
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if a < b]
