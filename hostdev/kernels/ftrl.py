"""Sparse FTRL-Proximal on the unique rows of a batch. The recurrence is in `hostdev.optimizers.FTRL`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import parallel_for

ACCUM, LINEAR = 1, 2  # slot rows in the block
_GRAIN = 256


@kernel
def _ftrl_sqrt(start: Any, stop: Any, ids: Any, grads: Any, block: Any, lr: Any, l1: Any, two_l2: Any) -> None:
    """The usual lr_power = -0.5: n^-p is a square root, correctly rounded."""
    zero = np.float32(0)
    for i in range(start, stop):
        row = np.int64(ids[i])
        for j in range(block.shape[2]):
            g = grads[i, j]
            n = block[row, ACCUM, j]
            n1 = n + g * g
            root = np.sqrt(n1)
            sigma = (root - np.sqrt(n)) / lr
            z = block[row, LINEAR, j] + (g - sigma * block[row, 0, j])
            sign_l1 = l1 if z > zero else -l1
            w = (sign_l1 - z) / (root / lr + two_l2)
            block[row, 0, j] = zero if abs(z) <= l1 else w  # NaN stays visible
            block[row, ACCUM, j] = n1
            block[row, LINEAR, j] = z


@kernel
def _ftrl_power(
    start: Any, stop: Any, ids: Any, grads: Any, block: Any, lr: Any, l1: Any, two_l2: Any, exponent: Any
) -> None:
    """Any lr_power: the power is taken in float64 and rounded once, as math libraries differ in float32's last bit."""
    zero = np.float32(0)
    for i in range(start, stop):
        row = np.int64(ids[i])
        for j in range(block.shape[2]):
            g = grads[i, j]
            n = block[row, ACCUM, j]
            n1 = n + g * g
            root = np.float32(np.float64(n1) ** exponent)
            sigma = (root - np.float32(np.float64(n) ** exponent)) / lr
            z = block[row, LINEAR, j] + (g - sigma * block[row, 0, j])
            sign_l1 = l1 if z > zero else -l1
            w = (sign_l1 - z) / (root / lr + two_l2)
            block[row, 0, j] = zero if abs(z) <= l1 else w  # NaN stays visible
            block[row, ACCUM, j] = n1
            block[row, LINEAR, j] = z


def ftrl(
    block: npt.NDArray[np.float32],
    ids: npt.NDArray[Any],
    grads: npt.NDArray[np.float32],
    lr: np.float32,
    l1: np.float32,
    two_l2: np.float32,
    exponent: float,
) -> None:
    """Take one FTRL step on the rows `ids`, in place.

    block     float32 [V, 3, D]: weights, accum, linear
    ids       int32 or int64 [U], unique, each in [0, V)
    grads     float32 [U, D], the summed gradient of each row
    two_l2    2 * l2
    exponent  -lr_power, so that accum^exponent is the inverse of the step size's shrinkage
    """
    if exponent == 0.5:
        parallel_for(_ftrl_sqrt, len(ids), ids, grads, block, lr, l1, two_l2, grain=_GRAIN)
    else:
        parallel_for(_ftrl_power, len(ids), ids, grads, block, lr, l1, two_l2, exponent, grain=_GRAIN)
