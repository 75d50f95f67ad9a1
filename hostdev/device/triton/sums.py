"""The sum of each unique row's uses, in a stated order that lets a hot row's uses be summed in parallel.

A row's uses in order of occurrence are cut into segments of 64, each is summed from its first use to its last, and the
segments' sums are added in order. Windows of 64 sorted uses, aligned, find the segments without a list of them: in
window q at most one segment that is not its row's first begins, and it is one of the row of the window's first use.
(That row's next one begins 64 later, in another window; so does the second segment of a row that begins inside.)
Conversely a row whose k-th segment (k > 0) begins in the window began before the window.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hostdev.device.triton.launch import launch, shape, tile, tiles
from hostdev.device.triton.ops import SEGMENT

_ELEMENTS = 256  # of a tile: fewer than for copies, as its rows wait for the one with most uses


@triton.jit
def _value(values, order, weights, place, inside, column, D: tl.constexpr):
    """Return the value at a place: row order[place] of `values` times its weight, or row `place` without an order."""
    if order is not None:
        place = tl.load(order + place, mask=inside, other=0)
    value = tl.load(values + place.to(tl.int64) * D + column, mask=inside, other=0.0).to(tl.float32)
    if weights is not None:
        value = value * tl.load(weights + place, mask=inside, other=0.0)
    return value


@triton.jit
def _add_in_order(total, values, order, weights, first, count, column, D: tl.constexpr):
    """Return ((total + v0) + v1) + ... of the `count` values from place `first` on."""
    for k in range(0, tl.max(count), 4):  # four loads under way at a time
        a = _value(values, order, weights, first + k, k < count, column, D)
        b = _value(values, order, weights, first + k + 1, k + 1 < count, column, D)
        c = _value(values, order, weights, first + k + 2, k + 2 < count, column, D)
        d = _value(values, order, weights, first + k + 3, k + 3 < count, column, D)
        total = tl.where(k < count, total + a, total)
        total = tl.where(k + 1 < count, total + b, total)
        total = tl.where(k + 2 < count, total + c, total)
        total = tl.where(k + 3 < count, total + d, total)
    return total


@triton.jit(do_not_specialize=["N", "U", "FIRST"])
def _sum_segments(
    grads, order, keys, starts, weights, out, partial, N, U, FIRST,
    SEGMENT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs below FIRST: the first segment of each row, to `out`; the others: a segment a window, to `partial`."""
    program = tl.program_id(0)
    if program < FIRST:
        target, column, inside = tile(D, ROWS, BLOCK, program)
        inside = inside & (target < U)
        begin = tl.load(starts + target, mask=inside, other=0)
        end = tl.load(starts + target + 1, mask=inside, other=0)
        to = out
    else:
        target, column, inside = tile(D, ROWS, BLOCK, program - FIRST)
        window = target * SEGMENT
        inside = inside & (window < N)
        row = tl.load(keys + window, mask=inside, other=0)
        start = tl.load(starts + row, mask=inside, other=0)
        end = tl.load(starts + row + 1, mask=inside, other=0)
        k = (window - start + SEGMENT - 1) // SEGMENT
        begin = start + k * SEGMENT
        inside = inside & (k > 0) & (begin < end)
        to = partial
    count = tl.where(inside, tl.minimum(end - begin, SEGMENT), 0)
    total = _value(grads, order, weights, begin, count > 0, column, D)
    total = _add_in_order(total, grads, order, weights, begin + 1, count - 1, column, D)
    tl.store(to + target.to(tl.int64) * D + column, total, mask=inside)


@triton.jit(do_not_specialize=["U"])
def _add_segments(
    starts, partial, out, U,
    SEGMENT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sums of a row's other segments to that of its first."""
    row, column, inside = tile(D, ROWS, BLOCK, tl.program_id(0))
    inside = inside & (row < U)
    begin = tl.load(starts + row, mask=inside, other=0)
    uses = tl.load(starts + row + 1, mask=inside, other=0) - begin
    count = tl.maximum((uses + SEGMENT - 1) // SEGMENT - 1, 0)
    inside = inside & (count > 0)
    at = out + row.to(tl.int64) * D + column
    total = tl.load(at, mask=inside, other=0.0)
    total = _add_in_order(total, partial, None, None, begin // SEGMENT + 1, count, column, D)
    tl.debug_barrier()  # see `launch`
    tl.store(at, total, mask=inside)


def sum_uses(grads: Tensor, order: Tensor, keys: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    """Launch `ops.sum_uses`."""
    (N, D), U = grads.shape, len(starts) - 1
    assert len(order) == len(keys) == N
    assert weights is None or len(weights) == N
    out = grads.new_empty((U, D), dtype=torch.float32)
    windows = -(-N // SEGMENT) if N > SEGMENT else 0  # up to one segment's uses there is no second one
    partial = out.new_empty((windows, D))
    constants = {"SEGMENT": SEGMENT, **shape(D, _ELEMENTS)}
    first = tiles(U, constants)
    programs = first + tiles(windows, constants)
    launch(_sum_segments, programs, grads, order, keys, starts, weights, out, partial, N, U, first, **constants)
    if windows:
        launch(_add_segments, first, starts, partial, out, U, **constants)
    return out
