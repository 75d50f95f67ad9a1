"""Kernels that update unique rows with Adam, lazy Adam or row-wise Adam.

`core.optimizers` has the formulas; `apply` describes the kernels' arguments.
"""

from typing import Any

import numpy as np

from hostdev.kernels.adagrad import LANES, mean_square
from hostdev.kernels.catch_up import decay, last_step, moved
from hostdev.kernels.clock import MOST_TERMS
from hostdev.kernels.jit import bare, kernel, prefetch_update
from hostdev.kernels.pool import Kernel
from hostdev.kernels.rounding import bare_rows, load_slot, load_weights, make_scratch, prefetch_row, store_row


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
    block, grads = bare_rows(block), bare(grads)
    scratch = make_scratch(block)
    if clock is not None:
        now, product, inverse, recent, frozen, powers, shift = clock
        k, terms, last_column = np.zeros(MOST_TERMS, np.float32), recent.shape[1] - 1, np.uint64(row_slots.shape[1] - 1)
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, first, second = (
            load_weights(block, row, scratch),
            load_slot(block, row, 0, scratch),
            load_slot(block, row, 1, scratch),
        )
        if clock is not None:  # the same as `catch_up`, without calls
            held = row_slots[row, last_column]
            last = np.int64(held) if held >= np.float32(0) and held < np.float32(now) else now
            row_slots[row, last_column] = np.float32(now + 1)
            factor = np.float32(product * inverse[np.uint64(last)])
            if now > last and terms > 0:
                at, known = np.uint64(now - last), now - last < powers.shape[0]
                if now - last < recent.shape[0]:
                    for p in range(np.uint64(terms)):
                        k[p] = recent[at, p]
                    e = recent[at, np.uint64(terms)]
                else:
                    for p in range(np.uint64(terms)):
                        k[p] = frozen[np.uint64(last), p]
                    e = frozen[np.uint64(last), np.uint64(terms)]
                decay1 = powers[at, 0] if known else np.float32(0)
                decay2 = powers[at, 1] if known else np.float32(0)
                c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 = k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8], k[9]
                for j in range(np.uint64(len(grad))):
                    m, v = first[j], second[j]
                    weights[j] = moved(weights[j], m, v, e, shift, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9) * factor
                    first[j] = m * decay1
                    second[j] = v * decay2
            elif factor != np.float32(1):
                for j in range(np.uint64(len(grad))):
                    weights[j] *= factor
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
    block, grads = bare_rows(block), bare(grads)
    lanes, scratch = np.empty(LANES, np.float32), make_scratch(block)
    if clock is not None:
        now, product, inverse = clock[:3]
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        prefetch_update(row_slots, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, first = load_weights(block, row, scratch), load_slot(block, row, 0, scratch)
        if clock is not None:
            decay(weights, last_step(row_slots, row, now), product, inverse)
            row_slots[row, np.uint64(row_slots.shape[1] - 1)] = np.float32(now + 1)
        v = beta2 * row_slots[row, 0] + one_minus_beta2 * mean_square(grad, lanes, columns)
        row_slots[row, 0] = v
        divisor = np.sqrt(v) + eps
        for j in range(len(grad)):
            m = beta1 * first[j] + one_minus_beta1 * grad[j]
            first[j] = m
            weights[j] -= lr_t * m / divisor
        store_row(block, row, scratch)


def row_wise_adam(*scalars: Any) -> tuple[Kernel, tuple[Any, ...]]:
    """Return the row-wise Adam kernel and its scalar arguments.

    The arguments are lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, and the number of columns as float32.
    """
    return _row_wise_adam, scalars


def lazy_adam(*scalars: Any) -> tuple[Kernel, tuple[Any, ...]]:
    """Return the Adam kernel and its scalar arguments: lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, nesterov."""
    return _lazy_adam, scalars
