"""Norms of tables, of rows' gradients, and of arrays.

The sum of squares of a table's weights is added in an order that both threads and an accelerator can reproduce.
Everything is computed in float64, in which the square of a float32 is exact. The rows are split into P parts of 4096;
the last part is padded with zeros. Within a part, each column is folded in halves, x[i] + x[i + half] for half = 2048,
1024, ..., 1, which leaves one sum per part and column. The total is numpy's sum of this array [P, D] in C order.

S: number of optimizer state columns of D values per row.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint32

from hostdev.kernels.adagrad import LANES, mean_square
from hostdev.kernels.arrays import Rows, identity
from hostdev.kernels.bfloat16 import to_float32
from hostdev.kernels.jit import inline, kernel
from hostdev.kernels.pool import KernelTask, count_ranges, get_grain, parallel_for, run_tasks

PART = 4096  # rows; a power of two, fixed because it determines the order of additions
_EIGHTH = PART // 8
_GRAIN = 1 << 15  # float32 values per range, 128 KiB
_INFINITE = np.uint32(0x7F800000)


@inline
def _square(block, row, j):
    w = np.float64(to_float32(block[row, 0, j]))
    return w * w


@inline
def _fold(block, first, x, out):
    """Write each column's sum of squares over the rows first .. first + 4095 to out [D]; x [512, D] is scratch."""
    D = block.shape[2]
    first, eighth = np.uint64(first), np.uint64(_EIGHTH)
    for i in range(eighth):  # three folds at once
        r = first + np.uint64(i)
        for j in range(D):
            even = (_square(block, r, j) + _square(block, r + np.uint64(4) * eighth, j)) + (
                _square(block, r + np.uint64(2) * eighth, j) + _square(block, r + np.uint64(6) * eighth, j)
            )
            odd = (_square(block, r + eighth, j) + _square(block, r + np.uint64(5) * eighth, j)) + (
                _square(block, r + np.uint64(3) * eighth, j) + _square(block, r + np.uint64(7) * eighth, j)
            )
            x[i, j] = even + odd
    half = _EIGHTH // 2
    while half > 0:
        for i in range(half):
            low, high = x[i], x[i + half]
            for j in range(D):
                low[j] += high[j]
        half //= 2
    out[:] = x[0]


@kernel
def _partial_squares(start, stop, block, sums):
    x = np.empty((_EIGHTH, block.shape[2]))
    for part in range(start, stop):
        _fold(block, part * PART, x, sums[part])


def partial_squares(block: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the sum of squares of a block's weights for each part and column, float64 [P, D].

    Args:
        block: float32 [V, 1 + S, D], or bfloat16 as uint16 [V, 1, D].
    """
    rows, _, D = block.shape
    sums = np.empty((-(-rows // PART), D))
    whole = rows // PART
    parallel_for(_partial_squares, whole, block, sums)
    if whole < len(sums):
        last = np.zeros((PART, 1, D), block.dtype)
        last[: rows - whole * PART] = block[whole * PART :, :1]
        parallel_for(_partial_squares, 1, last, sums[whole:])
    return sums


def total(sums: npt.NDArray[np.float64]) -> float:
    """Return the total of the sums [P, D] from `partial_squares`, added as numpy sums a C-contiguous array."""
    return float(np.ascontiguousarray(sums).sum())


def sum_of_squares(block: npt.NDArray[np.float32]) -> float:
    """Return the sum of squares of a block's weights; `block` is float32 [V, 1 + S, D]."""
    return total(partial_squares(block))


@kernel
def clip_rows(start, stop, source, grads, limit, out):
    """Write clipped gradients: a gradient with a mean square q above `limit` is multiplied by sqrt(limit / q).

    Args:
        source: int32 [U]: out[i] is the clipped grads[source[i]].
        grads: float32 [any, D].
        limit: float32, the largest mean square of a gradient that is not scaled.
        out: float32 [U, D], written; may be `grads` itself if source[i] = i for each i.
    """
    lanes, columns = np.empty(LANES, np.float32), np.float32(grads.shape[1])
    for i in range(np.uint64(start), np.uint64(stop)):
        grad, to = grads[np.uint64(source[i])], out[i]
        mean, factor = mean_square(grad, lanes, columns), np.float32(1)
        if mean > limit:
            factor = np.sqrt(limit / mean)
        for j in range(len(grad)):
            to[j] = grad[j] * factor


def clipped(grads: Rows, limit: np.float32) -> Rows:
    """Return gradients [U, D] with each row clipped to a mean square of at most `limit`, using all threads."""
    out = np.empty_like(grads)
    parallel_for(clip_rows, len(grads), identity(len(grads)), grads, limit, out, grain=get_grain(grads.strides[0]))
    return out


@kernel
def _largest(start, stop, bits, found, piece):
    """Write the largest bit pattern of the absolute values: that of the largest absolute value, or of a NaN."""
    largest = uint32(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        largest = max(largest, bits[i] & uint32(0x7FFFFFFF))
    found[np.uint64(piece)] = largest


def largest(values: npt.NDArray[np.float32]) -> float:
    """Return the largest absolute value in a C-contiguous float32 array: inf if it has a NaN, 0 if it is empty."""
    return largest_of_each([values])[0]


def largest_of_each(arrays: Sequence[npt.NDArray[np.float32]]) -> list[float]:
    """Return `largest` for each of several arrays; all host threads share the work."""
    if not arrays:
        return []
    pieces = [count_ranges(values.size, _GRAIN) for values in arrays]
    starts = [*accumulate(pieces, initial=0)]
    found, tasks = np.zeros(starts[-1], np.uint32), []
    for values, first, count in zip(arrays, starts, pieces, strict=False):
        bits = values.reshape(-1).view(np.uint32)
        tasks.append(KernelTask(_largest, len(bits), _GRAIN, count, (bits, found[first : first + count])))
    run_tasks(tasks, alone=max(pieces) == 1)
    return [*map(float, np.minimum(np.maximum.reduceat(found, starts[:-1]), _INFINITE).view(np.float32))]
