"""Lazy Adam on unique rows; recurrence in `core.optimizers.LazyAdam`, arguments in `apply`."""

from typing import Any

import numpy as np

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import Kernel
from hostdev.kernels.rounding import keep_weights, prefetch_row, scratch_of, slot_at, weights_at


@kernel
def _lazy_adam(
    start,
    stop,
    ids,
    source,
    grads,
    block,
    row_slots,
    lr_t,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    nesterov,
):
    scratch = scratch_of(block)
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, first, second = weights_at(block, row, scratch), slot_at(block, row, 0), slot_at(block, row, 1)
        for j in range(len(grad)):
            g = grad[j]
            m = beta1 * first[j] + one_minus_beta1 * g
            v = beta2 * second[j] + one_minus_beta2 * (g * g)
            numerator = beta1 * m + one_minus_beta1 * g if nesterov else m
            first[j] = m
            second[j] = v
            weights[j] -= lr_t * numerator / (np.sqrt(v) + eps)
        keep_weights(block, row, scratch)


def lazy_adam(*scalars: Any) -> tuple[Kernel, tuple[Any, ...]]:
    """Return the kernel and its scalars: lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, nesterov."""
    return _lazy_adam, scalars
