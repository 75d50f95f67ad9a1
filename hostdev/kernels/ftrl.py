"""Kernels that update unique rows with FTRL-Proximal.

`core.optimizers.FTRL` has the formula; `apply` describes the kernels' arguments.
"""

from typing import Any

import numpy as np

from hostdev.kernels.jit import bare, kernel
from hostdev.kernels.pool import Kernel
from hostdev.kernels.rounding import bare_rows, load_slot, load_weights, make_scratch, prefetch_row, store_row


@kernel
def _ftrl_sqrt(start, stop, ids, source, grads, block, row_slots, lr, l1, two_l2, clock):
    """Update rows with lr_power = -0.5, the usual value: the power is a square root, which is rounded correctly."""
    block, grads = bare_rows(block), bare(grads)
    zero, scratch = np.float32(0), make_scratch(block)
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, accum, linear = (
            load_weights(block, row, scratch),
            load_slot(block, row, 0, scratch),
            load_slot(block, row, 1, scratch),
        )
        for j in range(len(grad)):
            g, n = grad[j], accum[j]
            n1 = n + g * g
            root = np.sqrt(n1)
            sigma = (root - np.sqrt(n)) / lr
            z = linear[j] + (g - sigma * weights[j])
            sign_l1 = l1 if z > zero else -l1
            w = (sign_l1 - z) / (root / lr + two_l2)
            weights[j] = zero if abs(z) <= l1 else w  # if z is NaN, so is the weight
            accum[j] = n1
            linear[j] = z
        store_row(block, row, scratch)


@kernel
def _ftrl_power(start, stop, ids, source, grads, block, row_slots, lr, l1, two_l2, exponent, clock):
    """Update rows with any lr_power.

    Powers are computed in float64 and rounded to float32 once, since float32 powers differ between math libraries.
    """
    block, grads = bare_rows(block), bare(grads)
    zero, scratch = np.float32(0), make_scratch(block)
    for i in range(np.uint64(start), np.uint64(stop)):
        row, grad = np.uint64(ids[i]), grads[np.uint64(source[i])]
        weights, accum, linear = (
            load_weights(block, row, scratch),
            load_slot(block, row, 0, scratch),
            load_slot(block, row, 1, scratch),
        )
        for j in range(len(grad)):
            g, n = grad[j], accum[j]
            n1 = n + g * g
            root = np.float32(np.float64(n1) ** exponent)
            sigma = (root - np.float32(np.float64(n) ** exponent)) / lr
            z = linear[j] + (g - sigma * weights[j])
            sign_l1 = l1 if z > zero else -l1
            w = (sign_l1 - z) / (root / lr + two_l2)
            weights[j] = zero if abs(z) <= l1 else w
            accum[j] = n1
            linear[j] = z
        store_row(block, row, scratch)


def ftrl(lr: np.float32, l1: np.float32, two_l2: np.float32, exponent: float) -> tuple[Kernel, tuple[Any, ...]]:
    """Return the kernel for these scalars, and its scalar arguments; two_l2 is 2 * l2, and exponent is -lr_power."""
    if exponent == 0.5:
        return _ftrl_sqrt, (lr, l1, two_l2)
    return _ftrl_power, (lr, l1, two_l2, exponent)
