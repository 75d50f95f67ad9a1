"""Masks for dropout layers on the CPU, where torch draws one number after the other on a single thread.

Each value of a mask is a pure function of a key and its position.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint32, uint64

from hostdev.kernels.bfloat16 import WEYL
from hostdev.kernels.counter import hashed, mix32
from hostdev.kernels.jit import bare, kernel
from hostdev.kernels.pool import parallel_for

_ROW = 1024  # values that share one 64-bit hash
_GRAIN = 32  # a range of rows begins at a multiple of this


@kernel
def _fill(start: Any, stop: Any, key: Any, limit: Any, scale: Any, mask: Any) -> None:
    mask, zero = bare(mask), np.float32(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        word = hashed(key, i)
        low, high = uint32(word), uint32(word >> uint64(32))
        begin = i * np.uint64(_ROW)
        for j in range(min(np.uint64(_ROW), np.uint64(len(mask)) - begin)):
            drawn = uint32(mix32(uint32(low ^ uint32(uint32(j) * uint32(WEYL)))) ^ high)
            mask[begin + j] = scale if drawn < limit else zero


def fill_mask(key: int, rate: float, mask: npt.NDArray[np.float32]) -> None:
    """Fill a mask: each value is 0 with probability `rate`, otherwise 1 / (1 - rate).

    The probability is rounded to a multiple of 2^-32.

    Args:
        key: 64 bits; equal keys give equal masks.
        rate: At least 0 and below 1.
        mask: float32 [N], written.
    """
    limit = np.uint32(min(round((1 - rate) * 2**32), 2**32 - 1))
    args = np.uint64(key), limit, np.float32(1 / (1 - rate)), mask
    parallel_for(_fill, -(-len(mask) // _ROW), *args, grain=_GRAIN)


def make_mask(shape: tuple[int, ...], rate: float, key: int) -> npt.NDArray[np.float32]:
    """Return an array of a shape whose values are 0 with probability `rate`, otherwise 1 / (1 - rate).

    The values depend only on the arguments; `key` has 64 bits.
    """
    mask = np.empty(math.prod(shape), np.float32)
    fill_mask(key, rate, mask)
    return mask.reshape(shape)
