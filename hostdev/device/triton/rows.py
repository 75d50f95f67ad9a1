"""Kernels that move rows: from a cache to a batch, from rows to occurrences, and into and out of a cache.

`ops` describes the operations. A row with its optimizer state takes W = (1 + S) * D values, its weights first.

`launch` runs kernels over tiles of whole rows, with the options that make sure each operation is rounded once. A kernel
that updates in place has a barrier between its loads and stores. Without it, a warp could load a value that another
warp has already overwritten (https://github.com/triton-lang/triton/issues/1615).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Otherwise LLVM, or ptxas without --fmad=false, fuses a multiplication and the addition after it into one FMA.
OPTIONS = {"enable_fp_fusion": False}
_ELEMENTS = 1024  # per tile: 8 for each of 128 threads


@triton.jit
def tile(D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, program):
    """Return row, column and validity of each element of tile `program`, which has ROWS rows of D columns."""
    at = tl.arange(0, BLOCK)
    return program * ROWS + at // D, at % D, at < ROWS * D


def shape(D: int, elements: int = _ELEMENTS) -> dict[str, int]:
    """Return the constants of a tile of as many whole rows as fit, so that few lanes are idle."""
    block = max(elements, triton.next_power_of_2(D))
    return {"D": D, "ROWS": block // D, "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


def tiles(rows: int, constants: dict[str, int]) -> int:
    """Return the number of tiles that hold this many rows."""
    return -(-rows // constants["ROWS"])


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the current stream of the first tensor's device; do nothing for 0 programs."""
    if programs == 0:
        return
    for tensor in arguments:
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    first = next(tensor for tensor in arguments if isinstance(tensor, Tensor))
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]  # no effect for the interpreter on a CPU
        kernel[(programs,)](*arguments, **constants, **OPTIONS)


@triton.jit(do_not_specialize=["H", "A", "M"])
def _assemble(
    block,
    slots,
    admitted,
    passed,
    out,
    H,
    A,
    M,
    W: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = tile(D, ROWS, BLOCK, tl.program_id(0))
    inside = inside & (row < H + A + M)
    hit = inside & (row < H)
    new = inside & (row >= H) & (row < H + A)
    rest = inside & (row >= H + A)
    slot = tl.load(slots + row, mask=hit, other=0).to(tl.int64)
    value = tl.load(block + slot * W + column, mask=hit, other=0.0)
    value = tl.load(admitted + (row - H).to(tl.int64) * W + column, mask=new, other=value)
    value = tl.load(passed + (row - H - A).to(tl.int64) * D + column, mask=rest, other=value)
    tl.store(out + row.to(tl.int64) * D + column, value, mask=inside)


@triton.jit(do_not_specialize=["N"])
def _gather(rows, inverse, weights, out, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    use, column, inside = tile(D, ROWS, BLOCK, tl.program_id(0))
    inside = inside & (use < N)
    row = tl.load(inverse + use, mask=inside, other=0).to(tl.int64)
    value = tl.load(rows + row * D + column, mask=inside, other=0.0)
    if weights is not None:
        value = value * tl.load(weights + use, mask=inside, other=0.0)
    if out.dtype.element_ty == tl.bfloat16:
        value = to_bfloat16(value)
    tl.store(out + use.to(tl.int64) * D + column, value, mask=inside)


@triton.jit
def to_bfloat16(x):
    """Round to bfloat16, to nearest even, as the host's kernels do; NaN becomes the quiet NaN.

    The bits are computed here because Triton's interpreter truncates, and CUDA's conversion gives a different NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["A", "STAY"])
def _exchange(
    block,
    row_slots,
    slots,
    admitted,
    admitted_row_slots,
    A,
    STAY,
    R: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    row, column, inside = tile(D, ROWS, BLOCK, tl.program_id(0))
    _swap(block, slots, admitted, row, column, inside & (row < A), STAY, D)
    if R > 0:
        row, column, inside = tile(R, ROWS, PER_ROW, tl.program_id(0))
        _swap(row_slots, slots, admitted_row_slots, row, column, inside & (row < A), STAY, R)


@triton.jit
def _swap(there, slots, here, row, column, inside, STAY, D: tl.constexpr):
    """Write each row of `here` to its slot in `there`; rows from index STAY on swap places with the slot's old row."""
    at = there + tl.load(slots + row, mask=inside, other=0).to(tl.int64) * D + column
    own = here + row.to(tl.int64) * D + column
    comes, goes = tl.load(own, mask=inside), tl.load(at, mask=inside & (row >= STAY))
    tl.debug_barrier()  # see the module's docstring
    tl.store(at, comes, mask=inside)
    tl.store(own, goes, mask=inside & (row >= STAY))


def assemble(block: Tensor, hit_slots: Tensor, admitted: Tensor, passed: Tensor) -> Tensor:
    """Launch `ops.assemble`."""
    H, A, M, (_, planes, D) = len(hit_slots), len(admitted), len(passed), block.shape
    assert admitted.shape[1:] == block.shape[1:]
    assert passed.shape[1] == D
    out = block.new_empty((H + A + M, D))
    constants = shape(D)
    arguments = block, hit_slots, admitted, passed, out, H, A, M
    launch(_assemble, tiles(len(out), constants), *arguments, W=planes * D, **constants)
    return out


def lookup(block: Tensor, ids: Tensor) -> Tensor:
    """Launch `ops.lookup`: all rows are hits."""
    return assemble(block, ids, block[:0], block[:0, 0])


def gather_scaled(rows: Tensor, inverse: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Launch `ops.gather_scaled`."""
    N, D = len(inverse), rows.shape[1]
    assert weights is None or len(weights) == N
    out = rows.new_empty((N, D), dtype=dtype)
    constants = shape(D)
    launch(_gather, tiles(N, constants), rows, inverse, weights, out, N, **constants)
    return out


def exchange(
    block: Tensor, row_slots: Tensor, admitted_slots: Tensor, leaving: int, admitted: Tensor, admitted_row_slots: Tensor
) -> None:
    """Launch `ops.exchange`."""
    A, R = len(admitted), row_slots.shape[1]
    assert len(admitted_slots) == len(admitted_row_slots) == A >= leaving
    assert (block.shape[1:], R) == (admitted.shape[1:], admitted_row_slots.shape[1])
    constants = shape(block.shape[1] * block.shape[2])
    per_row = triton.next_power_of_2(max(1, constants["ROWS"] * R))
    arguments = block, row_slots, admitted_slots, admitted, admitted_row_slots, A, A - leaving
    launch(_exchange, tiles(A, constants), *arguments, R=R, PER_ROW=per_row, **constants)
