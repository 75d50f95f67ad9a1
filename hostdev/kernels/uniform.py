"""Uniform initial weights; each is a pure function of (key, row, column), as in `kernels.init`."""

import numpy as np
import numpy.typing as npt
from numba import uint32, uint64

from hostdev.kernels.counter import hashed
from hostdev.kernels.init import _ROWS, _words
from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import parallel_for


@kernel
def _fill_uniform(start, stop, first_row, ids, key, low, width, block, slots):
    D, one = np.uint64(block.shape[2]), np.uint64(1)
    for i in range(np.uint64(start), np.uint64(stop)):
        row_id = np.uint64(first_row) + i if ids is None else np.uint64(ids[i])
        word = hashed(key, row_id)
        row = block[i]
        for p in range((D + one) // np.uint64(2)):
            a, b = _words(uint32(word), uint32(word >> uint64(32)), p)
            j = np.uint64(2) * p
            row[0, j] = np.float32(low + width * np.float64(a >> uint32(8)))
            if j + one < D:
                row[0, j + one] = np.float32(low + width * np.float64(b >> uint32(8)))
        for s in range(len(slots)):
            for k in range(D):
                row[1 + s, k] = slots[s]


def fill_uniform(
    block: npt.NDArray[np.float32],
    key: int,
    low: float,
    high: float,
    slots: npt.NDArray[np.float32],
    *,
    first_row: int = 0,
    ids: npt.NDArray[np.int64] | None = None,
) -> None:
    """Fill rows with constant slots and weights low + k * (high - low) / 2^24, for random integers k in [0, 2^24).

    Weights are computed in float64 and rounded to float32 once. `init.fill_normal` describes the other arguments.
    """
    width = (np.float64(high) - np.float64(low)) * 2.0**-24
    args = (np.int64(first_row), ids, np.uint64(key), np.float64(low), width, block, slots)
    parallel_for(_fill_uniform, len(block), *args, grain=_ROWS)
