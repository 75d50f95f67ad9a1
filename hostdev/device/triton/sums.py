"""Sums over occurrences: of rows into bags, in order, and of gradients into rows, in parallel for hot rows.

A row's occurrences, in order, are cut into segments of 64. Each segment is summed from first to last, and the segments'
sums are added in order. Aligned windows of 64 sorted occurrences find the segments without a list. Besides the first
segments of rows, at most one segment begins in each window, and it belongs to the row of the window's first occurrence.
(The next segment of that row begins 64 places later, in another window; so does the second segment of a row that begins
inside the window.) Conversely, a row whose segment k (k > 0, counted from 0) begins in the window began before the
window.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hostdev.device.triton.ops import SEGMENT
from hostdev.device.triton.rows import launch, shape, tile, tiles, to_bfloat16

_ELEMENTS = 256  # per tile: fewer than for copies, since a tile waits for its row with the most occurrences


@triton.jit
def _value(values, order, source, weights, place, inside, column, D: tl.constexpr):
    """Return the weighted row source[order[place]] of `values`; for `order` and `source`, None means the identity."""
    if order is not None:
        place = tl.load(order + place, mask=inside, other=0)
    row = place
    if source is not None:
        row = tl.load(source + place, mask=inside, other=0)
    value = tl.load(values + row.to(tl.int64) * D + column, mask=inside, other=0.0).to(tl.float32)
    if weights is not None:
        value = value * tl.load(weights + place, mask=inside, other=0.0)
    return value


@triton.jit
def _add_in_order(total, values, order, source, weights, first, count, column, D: tl.constexpr):
    """Return ((total + v0) + v1) + ... over the `count` values from place `first` on."""
    for k in range(0, tl.max(count), 4):  # four loads in flight
        a = _value(values, order, source, weights, first + k, k < count, column, D)
        b = _value(values, order, source, weights, first + k + 1, k + 1 < count, column, D)
        c = _value(values, order, source, weights, first + k + 2, k + 2 < count, column, D)
        d = _value(values, order, source, weights, first + k + 3, k + 3 < count, column, D)
        total = tl.where(k < count, total + a, total)
        total = tl.where(k + 1 < count, total + b, total)
        total = tl.where(k + 2 < count, total + c, total)
        total = tl.where(k + 3 < count, total + d, total)
    return total


@triton.jit(do_not_specialize=["N", "U", "FIRST"])
def _sum_segments(
    grads,
    order,
    keys,
    starts,
    source,
    weights,
    out,
    partial,
    N,
    U,
    FIRST,
    SEGMENT: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum each row's first segment into `out`, and the other segments, at most one per window, into `partial`.

    Programs below FIRST sum the first segments.
    """
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
    total = _value(grads, order, source, weights, begin, count > 0, column, D)
    nothing = tl.full([BLOCK], 0x80000000, tl.uint32).to(tl.float32, bitcast=True)  # -0; Triton makes -0.0 a 0
    total = tl.where(count > 0, total, nothing)
    total = _add_in_order(total, grads, order, source, weights, begin + 1, count - 1, column, D)
    tl.store(to + target.to(tl.int64) * D + column, total, mask=inside)


@triton.jit(do_not_specialize=["U"])
def _add_segments(
    starts, partial, out, U, SEGMENT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the sums of a row's other segments to the sum of its first segment."""
    row, column, inside = tile(D, ROWS, BLOCK, tl.program_id(0))
    inside = inside & (row < U)
    begin = tl.load(starts + row, mask=inside, other=0)
    uses = tl.load(starts + row + 1, mask=inside, other=0) - begin
    count = tl.maximum((uses + SEGMENT - 1) // SEGMENT - 1, 0)
    inside = inside & (count > 0)
    at = out + row.to(tl.int64) * D + column
    total = tl.load(at, mask=inside, other=0.0)
    total = _add_in_order(total, partial, None, None, None, begin // SEGMENT + 1, count, column, D)
    tl.debug_barrier()  # see the module `rows`
    tl.store(at, total, mask=inside)


@triton.jit(do_not_specialize=["B"])
def _pool(
    rows,
    inverse,
    offsets,
    weights,
    out,
    B,
    MEAN: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    bag, column, inside = tile(D, ROWS, BLOCK, tl.program_id(0))
    inside = inside & (bag < B)
    begin = tl.load(offsets + bag, mask=inside, other=0)
    count = tl.load(offsets + bag + 1, mask=inside, other=0) - begin
    total = _value(rows, None, inverse, weights, begin, count > 0, column, D)
    total = _add_in_order(total, rows, None, inverse, weights, begin + 1, count - 1, column, D)
    if MEAN:
        total = tl.div_rn(total, tl.maximum(count, 1).to(tl.float32))
    if out.dtype.element_ty == tl.bfloat16:
        total = to_bfloat16(total)
    tl.store(out + bag.to(tl.int64) * D + column, total, mask=inside)


def pool(
    rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool, dtype: torch.dtype
) -> Tensor:
    """Launch `ops.pool`."""
    B, D = len(offsets) - 1, rows.shape[1]
    assert weights is None or len(weights) == len(inverse)
    out = rows.new_empty((B, D), dtype=dtype)
    constants = shape(D, _ELEMENTS)
    launch(_pool, tiles(B, constants), rows, inverse, offsets, weights, out, B, MEAN=mean, **constants)
    return out


def sum_uses(
    grads: Tensor, order: Tensor, keys: Tensor, starts: Tensor, source: Tensor | None, weights: Tensor | None
) -> Tensor:
    """Launch `ops.sum_uses`."""
    N, D, U = len(order), grads.shape[1], len(starts) - 1
    assert len(keys) == N <= (len(grads) if source is None else len(source))
    assert weights is None or len(weights) == N
    out = grads.new_empty((U, D), dtype=torch.float32)
    windows = -(-N // SEGMENT) if N > SEGMENT else 0  # up to SEGMENT occurrences, no row has a second segment
    partial = out.new_empty((windows, D))
    constants = {"SEGMENT": SEGMENT, **shape(D, _ELEMENTS)}
    first = tiles(U, constants)
    arguments = grads, order, keys, starts, source, weights, out, partial, N, U, first
    launch(_sum_segments, first + tiles(windows, constants), *arguments, **constants)
    if windows:
        launch(_add_segments, first, starts, partial, out, U, **constants)
    return out
