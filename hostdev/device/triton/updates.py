"""The sparse optimizers' kernels: the operations of `hostdev.kernels` in the same order, each rounded once.

The recurrences are in `hostdev.optimizers`. Divisions and square roots are the correctly rounded ones (`div_rn`,
`sqrt_rn`); Triton's plain ones are approximations.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hostdev.device.triton.launch import launch, shape, tile, tiles
from hostdev.kernels.adagrad import LANES as ROW_WISE_LANES

_SCALARS = 6  # of the optimizer with most
_ROW_WISE_ELEMENTS = 512  # of a tile


@triton.jit
def _lazy_adam(w, m, v, g, lr_t, beta1, rest1, beta2, rest2, eps, NESTEROV: tl.constexpr):
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    numerator = m
    if NESTEROV:
        numerator = beta1 * m + rest1 * g
    return w - tl.div_rn(lr_t * numerator, tl.sqrt_rn(v) + eps), m, v


@triton.jit
def _ftrl(w, n, z, g, lr, l1, two_l2):
    n1 = n + g * g
    root = tl.sqrt_rn(n1)
    sigma = tl.div_rn(root - tl.sqrt_rn(n), lr)
    z = z + (g - sigma * w)
    sign_l1 = tl.where(z > 0.0, l1, -l1)
    w = tl.div_rn(sign_l1 - z, tl.div_rn(root, lr) + two_l2)
    return tl.where(tl.abs(z) <= l1, 0.0, w), n1, z  # NaN stays visible


@triton.jit
def _adagrad(w, accum, g, lr, eps):
    accum = accum + g * g
    return w - tl.div_rn(lr * g, tl.sqrt_rn(accum) + eps), accum


@triton.jit
def _weights_of(block, admitted, ids, row, inside, H, W: tl.constexpr):
    """Return where each row's weights lie, in the table for the first H rows and among the admitted for the others."""
    hit = row < H
    slot = tl.load(ids + row, mask=inside & hit, other=0).to(tl.int64)
    return tl.where(hit, block + slot * W, admitted + (row - H).to(tl.int64) * W)


@triton.jit
def _rows(skip, H, A):
    """Return how many rows to update: none where `skip` is not 0, NaN included."""
    rows = H + A
    if skip is not None:
        rows = tl.where(tl.load(skip) == 0.0, rows, 0)
    return rows


@triton.jit(do_not_specialize=["H", "A"])
def _update(
    block, ids, grads, skip, admitted, H, A, s0, s1, s2, s3, s4, s5,
    PRIMITIVE: tl.constexpr, NESTEROV: tl.constexpr,
    W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, inside = tile(D, ROWS, BLOCK, tl.program_id(0))
    inside = inside & (row < _rows(skip, H, A))
    at = _weights_of(block, admitted, ids, row, inside, H, W) + column
    g = tl.load(grads + row.to(tl.int64) * D + column, mask=inside, other=0.0)
    w = tl.load(at, mask=inside, other=0.0)
    if PRIMITIVE == "FusedSparseSGD":
        w = w - s0 * g
    elif PRIMITIVE == "FusedSparseAdagrad":
        accum = tl.load(at + D, mask=inside, other=0.0)
        w, accum = _adagrad(w, accum, g, s0, s1)
        tl.store(at + D, accum, mask=inside)
    else:
        a = tl.load(at + D, mask=inside, other=0.0)
        b = tl.load(at + 2 * D, mask=inside, other=0.0)
        if PRIMITIVE == "FusedSparseLazyAdam":
            w, a, b = _lazy_adam(w, a, b, g, s0, s1, s2, s3, s4, s5, NESTEROV)
        else:
            tl.static_assert(PRIMITIVE == "FusedSparseFtrl")
            w, a, b = _ftrl(w, a, b, g, s0, s1, s2)
        tl.store(at + D, a, mask=inside)
        tl.store(at + 2 * D, b, mask=inside)
    tl.store(at, w, mask=inside)


@triton.jit(do_not_specialize=["H", "A"])
def _update_row_wise(
    block, row_slots, ids, grads, skip, admitted, admitted_row_slots, H, A, lr, eps, columns,
    D: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < _rows(skip, H, A)
    weights = _weights_of(block, admitted, ids, row, inside, H, D)[:, None]
    accum = _weights_of(row_slots, admitted_row_slots, ids, row, inside, H, 1)
    grad = (grads + row.to(tl.int64) * D)[:, None]
    lane = tl.arange(0, LANES)[None, :]

    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for c in range(0, D, LANES):
        g = tl.load(grad + c + lane, mask=inside[:, None] & (c + lane < D), other=0.0)
        lanes += g * g  # where there is no column it adds 0
    total = tl.zeros((ROWS,), tl.float32)
    for k in tl.static_range(LANES):
        total += tl.sum(tl.where(lane == k, lanes, 0.0), axis=1)  # one lane and zeros: exact in any order
    a = tl.load(accum, mask=inside, other=0.0) + tl.div_rn(total, columns)
    tl.store(accum, a, mask=inside)
    divisor = (tl.sqrt_rn(a) + eps)[:, None]
    for c in range(0, D, LANES):
        here = inside[:, None] & (c + lane < D)
        g = tl.load(grad + c + lane, mask=here, other=0.0)
        w = tl.load(weights + c + lane, mask=here, other=0.0)
        tl.store(weights + c + lane, w - tl.div_rn(lr * g, divisor), mask=here)


def update(
    primitive: str,
    block: Tensor,
    row_slots: Tensor,
    ids: Tensor,
    grads: Tensor,
    scalars: list[float],
    skip: Tensor | None,
    admitted: Tensor | None,
    admitted_row_slots: Tensor | None,
) -> None:
    """Launch `ops.update`."""
    if admitted is None or admitted_row_slots is None:
        admitted, admitted_row_slots = block[:0], row_slots[:0]
    H, A, (_, planes, D) = len(ids), len(admitted), block.shape
    if primitive == "FusedSparseRowWiseAdagrad":
        lanes = min(ROW_WISE_LANES, triton.next_power_of_2(D))
        rows: dict[str, Any] = {"ROWS": _ROW_WISE_ELEMENTS // lanes, "num_warps": 4}
        arguments = block, row_slots, ids, grads, skip, admitted, admitted_row_slots, H, A, *scalars
        launch(_update_row_wise, tiles(H + A, rows), *arguments, D=D, LANES=lanes, **rows)
        return
    constants = shape(D)
    kind = {"PRIMITIVE": primitive, "NESTEROV": primitive == "FusedSparseLazyAdam" and bool(scalars[-1])}
    numbers = (*scalars[:_SCALARS], *[0.0] * (_SCALARS - len(scalars)))
    arguments = block, ids, grads, skip, admitted, H, A, *numbers
    launch(_update, tiles(H + A, constants), *arguments, W=planes * D, **kind, **constants)
