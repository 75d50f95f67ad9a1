"""Kernels that update unique rows with SGD, momentum, Adagrad or row-wise Adagrad.

`core.optimizers` has the formulas; `apply` describes the kernels' arguments.
"""

import numpy as np

from hostdev.kernels.catch_up import decay, last_step
from hostdev.kernels.jit import bare, inline, kernel, prefetch_update
from hostdev.kernels.rounding import bare_rows, load_slot, load_weights, make_scratch, prefetch_row, store_row

LANES = 16  # partial sums per row in row-wise optimizers; fixed because it determines the order of additions


@kernel
def sgd(start, stop, ids, source, grads, block, row_slots, lr, clock):
    """Update rows with SGD."""
    block, grads = bare_rows(block), bare(grads)
    scratch = make_scratch(block)
    if clock is not None:
        now, product, inverse = clock[:3]
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights = load_weights(block, row, scratch)
        if clock is not None:
            decay(weights, last_step(row_slots, row, now), product, inverse)
            row_slots[row, np.uint64(row_slots.shape[1] - 1)] = np.float32(now + 1)
        for j in range(len(grad)):
            weights[j] -= lr * grad[j]
        store_row(block, row, scratch)


@kernel
def momentum(start, stop, ids, source, grads, block, row_slots, lr, beta, nesterov, clock):
    """Update rows with momentum."""
    block, grads = bare_rows(block), bare(grads)
    scratch = make_scratch(block)
    if clock is not None:
        now, product, inverse = clock[:3]
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, buffer = load_weights(block, row, scratch), load_slot(block, row, 0, scratch)
        if clock is not None:
            decay(weights, last_step(row_slots, row, now), product, inverse)
            row_slots[row, np.uint64(row_slots.shape[1] - 1)] = np.float32(now + 1)
        for j in range(len(grad)):
            g = grad[j]
            b = beta * buffer[j] + g
            buffer[j] = b
            weights[j] -= lr * (g + beta * b if nesterov else b)
        store_row(block, row, scratch)


@kernel
def adagrad(start, stop, ids, source, grads, block, row_slots, lr, eps, clock):
    """Update rows with Adagrad."""
    block, grads = bare_rows(block), bare(grads)
    scratch = make_scratch(block)
    if clock is not None:
        now, product, inverse = clock[:3]
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, accum = load_weights(block, row, scratch), load_slot(block, row, 0, scratch)
        if clock is not None:
            decay(weights, last_step(row_slots, row, now), product, inverse)
            row_slots[row, np.uint64(row_slots.shape[1] - 1)] = np.float32(now + 1)
        for j in range(len(grad)):
            g = grad[j]
            a = accum[j] + g * g
            accum[j] = a
            weights[j] -= lr * g / (np.sqrt(a) + eps)
        store_row(block, row, scratch)


@inline
def mean_square(grad, lanes, columns):
    """Return the mean square of a row's gradient; `core.optimizers.RowWiseAdagrad` defines the order of the additions.

    `lanes`, float32 [LANES], is scratch memory; `columns` is D, the number of columns, as float32.
    """
    whole = np.uint64(len(grad) - len(grad) % LANES)
    lanes[:] = np.float32(0)
    for c in range(np.uint64(0), whole, np.uint64(LANES)):
        part = grad[c : c + np.uint64(LANES)]
        for k in range(LANES):
            lanes[k] += part[k] * part[k]
    rest = grad[whole:]
    for k in range(len(rest)):
        lanes[k] += rest[k] * rest[k]
    total = np.float32(0)
    for k in range(LANES):
        total += lanes[k]
    return total / columns


@kernel
def row_wise_adagrad(start, stop, ids, source, grads, block, row_slots, lr, eps, columns, clock):
    """Update rows with row-wise Adagrad; `columns` is D, the number of columns, as float32."""
    block, grads = bare_rows(block), bare(grads)
    lanes, scratch = np.empty(LANES, np.float32), make_scratch(block)
    if clock is not None:
        now, product, inverse = clock[:3]
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        prefetch_update(row_slots, ids, i, stop)
        row = np.uint64(ids[i])
        weights, grad = load_weights(block, row, scratch), grads[np.uint64(source[i])]
        if clock is not None:
            decay(weights, last_step(row_slots, row, now), product, inverse)
            row_slots[row, np.uint64(row_slots.shape[1] - 1)] = np.float32(now + 1)
        a = row_slots[row, 0] + mean_square(grad, lanes, columns)
        row_slots[row, 0] = a
        divisor = np.sqrt(a) + eps
        for j in range(len(grad)):
            weights[j] -= lr * grad[j] / divisor
        store_row(block, row, scratch)
