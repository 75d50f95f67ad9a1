"""The sum of squares of a table's weights, the same bits for any number of threads."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import parallel_for

_ROWS = 4096  # of a partial sum; fixed, as the order of additions depends on it


@kernel
def _partial_sums(start: Any, stop: Any, block: Any, sums: Any) -> None:
    rows, _, D = block.shape
    for part in range(start, stop):
        for row in range(part * _ROWS, min(rows, (part + 1) * _ROWS)):
            for j in range(D):  # a sum per column: independent additions, which vectorise
                w = np.float64(block[row, 0, j])
                sums[part, j] += w * w


def sum_of_squares(block: npt.NDArray[np.float32]) -> float:
    """Return the sum of squares of the weights of a block float32 [V, 1 + S, D], added in float64."""
    rows, _, D = block.shape
    sums = np.zeros((-(-rows // _ROWS), D))
    parallel_for(_partial_sums, len(sums), block, sums)
    return float(sums.sum())
