"""Kernels of the sparse optimizers: the operations of `hostdev.kernels` in the same order, each rounded once.

`hostdev.core.optimizers` has the recurrences. Divisions and square roots are correctly rounded (`div_rn`, `sqrt_rn`);
Triton's plain operators are approximations.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hostdev.device.triton.rows import launch, shape, tile, tiles
from hostdev.kernels.adagrad import LANES as ROW_WISE_LANES

_SCALARS = 6  # maximum number of scalars over the optimizers, apart from a flag
_ROW_WISE_ELEMENTS = 512  # per tile


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
    return tl.where(tl.abs(z) <= l1, 0.0, w), n1, z  # NaN stays NaN


@triton.jit
def _adagrad(w, accum, g, lr, eps):
    accum = accum + g * g
    return w - tl.div_rn(lr * g, tl.sqrt_rn(accum) + eps), accum


@triton.jit
def _momentum(w, buffer, g, lr, decay, NESTEROV: tl.constexpr):
    buffer = decay * buffer + g
    step = buffer
    if NESTEROV:
        step = g + decay * buffer
    return w - lr * step, buffer


@triton.jit
def _rows(program, FIRST, H, A, skip):
    """Return a program's tile number in the block or in the admitted rows, and how many rows to update there."""
    rows = H
    if program >= FIRST:
        program -= FIRST
        rows = A
    if skip is not None:
        rows = tl.where(tl.load(skip) == 0.0, rows, 0)
    return program, rows


@triton.jit(do_not_specialize=["H", "A", "FIRST"])
def _update(
    block,
    ids,
    grads,
    skip,
    admitted,
    H,
    A,
    FIRST,
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    PRIMITIVE: tl.constexpr,
    NESTEROV: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update rows of `block` in the programs below FIRST, and rows of `admitted` in the other programs."""
    program, rows = _rows(tl.program_id(0), FIRST, H, A, skip)
    row, column, inside = tile(D, ROWS, BLOCK, program)
    inside = inside & (row < rows)
    if tl.program_id(0) < FIRST:
        table, use = block, row
        slot = tl.load(ids + row, mask=inside, other=0).to(tl.int64)
    else:
        table, use = admitted, H + row
        slot = row.to(tl.int64)
    at = table + slot * W + column
    g = tl.load(grads + use.to(tl.int64) * D + column, mask=inside, other=0.0)
    w = tl.load(at, mask=inside, other=0.0)
    a, b = w, w
    if W > D:
        a = tl.load(at + D, mask=inside, other=0.0)
    if W > 2 * D:
        b = tl.load(at + 2 * D, mask=inside, other=0.0)
    tl.debug_barrier()  # see the module `rows`
    if PRIMITIVE == "FusedSparseSGD":
        w = w - s0 * g
    elif PRIMITIVE == "FusedSparseMomentum":
        w, a = _momentum(w, a, g, s0, s1, NESTEROV)
    elif PRIMITIVE == "FusedSparseAdagrad":
        w, a = _adagrad(w, a, g, s0, s1)
    elif PRIMITIVE == "FusedSparseLazyAdam":
        w, a, b = _lazy_adam(w, a, b, g, s0, s1, s2, s3, s4, s5, NESTEROV)
    else:
        tl.static_assert(PRIMITIVE == "FusedSparseFtrl")
        w, a, b = _ftrl(w, a, b, g, s0, s1, s2)
    tl.store(at, w, mask=inside)
    if W > D:
        tl.store(at + D, a, mask=inside)
    if W > 2 * D:
        tl.store(at + 2 * D, b, mask=inside)


@triton.jit(do_not_specialize=["H", "A", "FIRST"])
def _update_row_wise(
    block,
    row_slots,
    ids,
    grads,
    skip,
    admitted,
    admitted_row_slots,
    H,
    A,
    FIRST,
    lr,
    eps,
    columns,
    beta1,
    rest1,
    beta2,
    rest2,
    ADAM: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Update as `_update` does, LANES columns of a row at a time, with row-wise Adam if ADAM, else row-wise Adagrad."""
    program, rows = _rows(tl.program_id(0), FIRST, H, A, skip)
    row = program * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    if tl.program_id(0) < FIRST:
        table, accum, use = block, row_slots, row
        slot = tl.load(ids + row, mask=inside, other=0).to(tl.int64)
    else:
        table, accum, use = admitted, admitted_row_slots, H + row
        slot = row.to(tl.int64)
    weights = table + (slot * W)[:, None]
    accum += slot
    grad = grads + (use.to(tl.int64) * D)[:, None]
    lane = tl.arange(0, LANES)[None, :]

    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for c in range(0, D, LANES):
        g = tl.load(grad + c + lane, mask=inside[:, None] & (c + lane < D), other=0.0)
        lanes += g * g  # adds 0 where there is no column
    total = tl.zeros((ROWS,), tl.float32)
    for k in tl.static_range(LANES):
        total += tl.sum(tl.where(lane == k, lanes, 0.0), axis=1)  # one lane and zeros: exact in any order
    mean = tl.div_rn(total, columns)
    a = tl.load(accum, mask=inside, other=0.0)
    if ADAM:
        a = beta2 * a + rest2 * mean
    else:
        a = a + mean
    tl.debug_barrier()  # see the module `rows`
    tl.store(accum, a, mask=inside)
    divisor = (tl.sqrt_rn(a) + eps)[:, None]
    for c in range(0, D, LANES):
        here = inside[:, None] & (c + lane < D)
        g = tl.load(grad + c + lane, mask=here, other=0.0)
        w = tl.load(weights + c + lane, mask=here, other=0.0)
        if ADAM:
            g = beta1 * tl.load(weights + D + c + lane, mask=here, other=0.0) + rest1 * g
        tl.debug_barrier()
        tl.store(weights + c + lane, w - tl.div_rn(lr * g, divisor), mask=here)
        if ADAM:
            tl.store(weights + D + c + lane, g, mask=here)


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
    assert len(grads) >= H + A
    assert grads.shape[1] == D
    assert (admitted.shape[1:], len(admitted_row_slots)) == (block.shape[1:], A)
    if primitive in ("FusedSparseRowWiseAdagrad", "FusedSparseRowWiseAdam"):
        adam = primitive == "FusedSparseRowWiseAdam"
        lr, *betas, eps, columns = scalars
        lanes = min(ROW_WISE_LANES, triton.next_power_of_2(D))
        rows: dict[str, Any] = {"ROWS": _ROW_WISE_ELEMENTS // lanes, "num_warps": 4}
        first = tiles(H, rows)
        rows |= {"ADAM": adam, "W": planes * D, "D": D, "LANES": lanes}
        tables = block, row_slots, ids, grads, skip, admitted, admitted_row_slots
        scalars = [lr, eps, columns, *(betas or [0.0] * 4)]
        launch(_update_row_wise, first + tiles(A, rows), *tables, H, A, first, *scalars, **rows)
        return
    constants = shape(D)
    has_flag = primitive in ("FusedSparseLazyAdam", "FusedSparseMomentum")
    kind = {"PRIMITIVE": primitive, "NESTEROV": has_flag and bool(scalars[-1])}
    numbers = *scalars[:_SCALARS], *[0.0] * (_SCALARS - len(scalars))
    first = tiles(H, constants)
    arguments = block, ids, grads, skip, admitted, H, A, first, *numbers
    launch(_update, first + tiles(A, constants), *arguments, W=planes * D, **kind, **constants)
