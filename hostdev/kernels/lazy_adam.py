"""Lazy Adam on the unique rows of a batch. The recurrence is in `hostdev.optimizers.LazyAdam`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import parallel_for

M, V = 1, 2  # slot rows in the block
_GRAIN = 256


@kernel
def _lazy_adam(
    start: Any, stop: Any, ids: Any, grads: Any, block: Any,
    lr_t: Any, beta1: Any, one_minus_beta1: Any, beta2: Any, one_minus_beta2: Any, eps: Any, nesterov: Any,
) -> None:  # fmt: skip
    for i in range(start, stop):
        row = np.int64(ids[i])
        for j in range(block.shape[2]):
            g = grads[i, j]
            m = beta1 * block[row, M, j] + one_minus_beta1 * g
            v = beta2 * block[row, V, j] + one_minus_beta2 * (g * g)
            numerator = beta1 * m + one_minus_beta1 * g if nesterov else m
            block[row, M, j] = m
            block[row, V, j] = v
            block[row, 0, j] -= lr_t * numerator / (np.sqrt(v) + eps)


def lazy_adam(
    block: npt.NDArray[np.float32],
    ids: npt.NDArray[Any],
    grads: npt.NDArray[np.float32],
    lr_t: np.float32,
    beta1: np.float32,
    one_minus_beta1: np.float32,
    beta2: np.float32,
    one_minus_beta2: np.float32,
    eps: np.float32,
    nesterov: bool,
) -> None:
    """Take one Adam step on the rows `ids`, in place; the other rows, their moments included, stay as they are.

    block  float32 [V, 3, D]: weights, m, v
    ids    int32 or int64 [U], unique, each in [0, V)
    grads  float32 [U, D], the summed gradient of each row
    lr_t   the learning rate with the bias corrections of the table's step t
    """
    scalars = (lr_t, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, nesterov)
    parallel_for(_lazy_adam, len(ids), ids, grads, block, *scalars, grain=_GRAIN)
