"""Lazy Adam and row-wise Adam on unique rows; see `core.optimizers` for the recurrences, `apply` for the arguments."""

from typing import Any

import numpy as np

from hostdev.kernels.adagrad import LANES, mean_square
from hostdev.kernels.catch_up import catch_up, decay, last_step
from hostdev.kernels.jit import kernel, prefetch_update
from hostdev.kernels.pool import Kernel
from hostdev.kernels.rounding import load_slot, load_weights, make_scratch, prefetch_row, store_row


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
    clock,
):
    scratch = make_scratch(block)
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, first, second = (
            load_weights(block, row, scratch),
            load_slot(block, row, 0, scratch),
            load_slot(block, row, 1, scratch),
        )
        if clock is not None:
            catch_up(weights, first, second, last_step(row_slots, row, clock), clock)
            row_slots[row, np.uint64(row_slots.shape[1] - 1)] = np.float32(clock.now + 1)
        for j in range(len(grad)):
            g = grad[j]
            m = beta1 * first[j] + one_minus_beta1 * g
            v = beta2 * second[j] + one_minus_beta2 * (g * g)
            numerator = beta1 * m + one_minus_beta1 * g if nesterov else m
            first[j] = m
            second[j] = v
            weights[j] -= lr_t * numerator / (np.sqrt(v) + eps)
        store_row(block, row, scratch)


@kernel
def _row_wise_adam(
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
    columns,
    clock,
):
    lanes, scratch = np.empty(LANES, np.float32), make_scratch(block)
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        prefetch_update(row_slots, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, first = load_weights(block, row, scratch), load_slot(block, row, 0, scratch)
        if clock is not None:
            decay(weights, last_step(row_slots, row, clock), clock)
            row_slots[row, np.uint64(row_slots.shape[1] - 1)] = np.float32(clock.now + 1)
        v = beta2 * row_slots[row, 0] + one_minus_beta2 * mean_square(grad, lanes, columns)
        row_slots[row, 0] = v
        divisor = np.sqrt(v) + eps
        for j in range(len(grad)):
            m = beta1 * first[j] + one_minus_beta1 * grad[j]
            first[j] = m
            weights[j] -= lr_t * m / divisor
        store_row(block, row, scratch)


def row_wise_adam(*scalars: Any) -> tuple[Kernel, tuple[Any, ...]]:
    """Return the kernel and its scalars: lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, and D in float32."""
    return _row_wise_adam, scalars


def lazy_adam(*scalars: Any) -> tuple[Kernel, tuple[Any, ...]]:
    """Return the kernel and its scalars: lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, nesterov."""
    return _lazy_adam, scalars
