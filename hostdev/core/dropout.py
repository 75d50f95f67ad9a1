"""Masks for dropout layers on the CPU, where torch draws one number after the other on a single thread."""

import math

import numpy as np
import numpy.typing as npt

from hostdev.kernels.dropout import fill_mask


def make_mask(shape: tuple[int, ...], rate: float, key: int) -> npt.NDArray[np.float32]:
    """Return an array of a shape whose values are 0 with probability `rate`, otherwise 1 / (1 - rate).

    The values depend only on the arguments; `key` has 64 bits.
    """
    mask = np.empty(math.prod(shape), np.float32)
    fill_mask(key, rate, mask)
    return mask.reshape(shape)
