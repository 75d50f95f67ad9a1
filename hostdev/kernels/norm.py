"""The sum of squares of a table's weights, added in an order that both threads and an accelerator can reproduce.

Everything is computed in float64, in which the square of a float32 is exact. The rows are split into P parts of 4096;
the last part is padded with zeros. Within a part, each column is folded in halves, x[i] + x[i + half] for half = 2048,
1024, ..., 1, which leaves one sum per part and column. The total is numpy's sum of this array [P, D] in C order.

S: number of optimizer state columns of D values per row.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.bfloat16 import to_float32
from hostdev.kernels.jit import inline, kernel
from hostdev.kernels.pool import parallel_for

PART = 4096  # rows; a power of two, fixed because it determines the order of additions
_EIGHTH = PART // 8


@inline
def _square(block, row, j):
    w = np.float64(to_float32(block[row, 0, j]))
    return w * w


@kernel
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
