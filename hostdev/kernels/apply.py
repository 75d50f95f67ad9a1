"""An optimizer step on the rows of a table, for host tables and for device tables on the CPU.

An optimizer's kernel is called as `kernel(start, stop, ids, source, grads, block, row_slots, *scalars, clock)` and
updates the rows ids[start:stop] in place:

    ids: int32 or int64 [U], unique, each in [0, V), where V is the number of rows of the table.
    source: int32 [U]: the summed gradient of ids[i] is grads[source[i]].
    grads: float32 [any, D].
    block: float32 [V, 1 + S, D], or `rounding.SplitRows`: each row's weights, followed by its S optimizer slots of D
        values each.
    row_slots: float32 [V, R], the R optimizer slots that have one value per row.
    scalars: The optimizer's scalar arguments at this step, such as the learning rate.
    clock: The step history, from which each row's missed steps are applied before its update (see `catch_up`); None if
        a step changes only the rows that it updates.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.adagrad import LANES, adagrad, mean_square, momentum, row_wise_adagrad, sgd
from hostdev.kernels.arrays import Rows, Strided, identity, scratch
from hostdev.kernels.catch_up import decay, last_step, moved
from hostdev.kernels.clock import MOST_TERMS, Clock
from hostdev.kernels.jit import bare, kernel, prefetch_update
from hostdev.kernels.loops import run_alone
from hostdev.kernels.norm import clip_rows
from hostdev.kernels.pool import Kernel, Task, get_grain, run_tasks, tasks_over
from hostdev.kernels.rounding import (
    SplitRows,
    bare_rows,
    load_slot,
    load_weights,
    make_scratch,
    prefetch_row,
    store_row,
)
from hostdev.kernels.segment import apply_stream, row_ranges, sort_uses, streams, sum_sorted
from hostdev.kernels.unique import unique_into

_CLIPPED_BYTES = 1 << 18  # bytes of the rows that a thread clips and updates at a time


@kernel
def _ftrl(start, stop, ids, source, grads, block, row_slots, lr, l1, two_l2, exponent, clock):
    """Update rows with FTRL; `exponent` is -lr_power, or None for 0.5, whose power is a correctly rounded square root.

    Other powers are computed in float64 and rounded to float32 once, since float32 powers differ between math
    libraries.
    """
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
            root = np.sqrt(n1) if exponent is None else np.float32(np.float64(n1) ** exponent)
            former = np.sqrt(n) if exponent is None else np.float32(np.float64(n) ** exponent)
            sigma = (root - former) / lr
            z = linear[j] + (g - sigma * weights[j])
            sign_l1 = l1 if z > zero else -l1
            w = (sign_l1 - z) / (root / lr + two_l2)
            weights[j] = zero if abs(z) <= l1 else w  # if z is NaN, so is the weight
            accum[j] = n1
            linear[j] = z
        store_row(block, row, scratch)


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
        if clock is not None:  # what `catch_up.catch_up` does, written out because calls are slow here
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


_KERNELS: dict[str, Kernel] = {
    "FusedSparseAdagrad": adagrad,
    "FusedSparseAdam": _lazy_adam,
    "FusedSparseFtrl": _ftrl,
    "FusedSparseLazyAdam": _lazy_adam,
    "FusedSparseMomentum": momentum,
    "FusedSparseRowWiseAdagrad": row_wise_adagrad,
    "FusedSparseRowWiseAdam": _row_wise_adam,
    "FusedSparseSGD": sgd,
}


def _find_kernel(primitive: str, scalars: tuple[Any, ...], clock: Clock | None) -> tuple[Kernel, tuple[Any, ...]]:
    """Return an optimizer's kernel, and the kernel's arguments from the scalars on."""
    if primitive == "FusedSparseFtrl" and scalars[-1] == 0.5:
        scalars = (*scalars[:-1], None)
    return _KERNELS[primitive], (*scalars, clock)


def apply_tasks(
    primitive: str,
    block: Rows | SplitRows,
    row_slots: Rows,
    ids: npt.NDArray[Any],
    grads: Rows,
    scalars: tuple[Any, ...],
    positions: npt.NDArray[np.int32] | None = None,
    clip: np.float32 | None = None,
    clock: Clock | None = None,
) -> list[Task]:
    """Return the work of `apply_rows` as tasks, so that one `run_tasks` can run it together with other tasks."""
    update, scalars = _find_kernel(primitive, scalars, clock)
    if positions is None:
        positions = identity(len(ids))
    row = block.strides[0] if isinstance(block, np.ndarray) else block.row_bytes
    if clip is None:
        arguments = (ids, positions, grads, block, row_slots, *scalars)
        return tasks_over(update, len(ids), *arguments, grain=get_grain(row))

    def clip_and_update(start: int, stop: int) -> None:
        n = stop - start
        clipped = scratch("clipped gradients", (n, grads.shape[1]))
        run_alone(clip_rows, n, positions[start:stop], grads, clip, clipped)
        run_alone(update, n, ids[start:stop], identity(n), clipped, block, row_slots, *scalars)

    edges = [*range(0, len(ids), max(1, _CLIPPED_BYTES // row)), len(ids)]
    return [(clip_and_update, start, stop, ()) for start, stop in pairwise(edges)]


def apply_rows(
    primitive: str,
    block: Rows | SplitRows,
    row_slots: Rows,
    ids: npt.NDArray[Any],
    grads: Rows,
    scalars: tuple[Any, ...],
    positions: npt.NDArray[np.int32] | None = None,
    clip: np.float32 | None = None,
    clock: Clock | None = None,
) -> None:
    """Take one optimizer step on unique rows, in place.

    The module's docstring describes `block`, `row_slots`, `ids`, `scalars` and `clock`.

    Args:
        primitive: The name of the optimizer's operation, such as "FusedSparseFtrl".
        grads: float32 [U, D], the summed gradient of each id; with `positions`, [any, D].
        positions: int32 [U]: the gradient of ids[i] is grads[positions[i]]; None if it is grads[i].
        clip: The mean square above which a row's gradient is clipped, or None to never clip.
    """
    run_tasks(apply_tasks(primitive, block, row_slots, ids, grads, scalars, positions, clip, clock))


def apply_occurrences(
    primitive: str,
    block: Rows | SplitRows,
    row_slots: Rows,
    ids: npt.NDArray[Any],
    grads: Rows,
    scalars: tuple[Any, ...],
    clip: np.float32 | None = None,
    clock: Clock | None = None,
) -> None:
    """Sum the gradients of each id in order of occurrence, and update its row as `apply_rows` does.

    The other arguments are those of `apply_rows`.

    Args:
        ids: int32 or int64 [N], each in [0, V), possibly repeated.
        grads: float32 [N, D]: grads[i] is a gradient of the row ids[i].
    """
    if len(ids) == 0:
        return
    update, scalars = _find_kernel(primitive, scalars, clock)
    table = (block, row_slots, *scalars)
    if clip is None and streams():
        apply_stream(update, table, ids, grads)
        return
    inverse = scratch("inverse", (len(ids),), np.int32)
    rows = unique_into(ids, inverse)
    sums = scratch("sums", (len(rows), grads.shape[1]))
    order, ends = scratch("uses by row", inverse.shape, np.int32), scratch("ends of rows", (len(rows) + 2,), np.int64)
    sort_uses(inverse, ends, order)

    def sum_and_update(start: int, stop: int) -> None:
        sum_sorted(start, stop, *Strided(grads), order, ends, None, None, True, sums)
        n, mine = stop - start, sums[start:stop]
        if clip is not None:
            run_alone(clip_rows, n, identity(n), mine, clip, mine)
        run_alone(update, n, rows[start:stop], identity(n), mine, *table)

    run_tasks([(sum_and_update, start, stop, ()) for start, stop in row_ranges(ends[:-1])])
