"""What a cache or a table on a CUDA device does with its rows: torch operations `hostdev::*`, one or two launches each.

Each has the host kernels' bits: float32, every operation rounded once, in the stated order, no FMA. Only the key CUDA
is registered; on the CPU the host's kernels are called instead of these operations. Everything is launched on the
current stream; nothing waits for it. Importing this module defines them, without importing Triton.

C slots or rows of a table, S optimizer slots of D values a row, R of one value; U unique rows of a batch, of which H
are hits in the cache, A are admitted, M pass by; N uses of them. Tensors are contiguous and float32, unless said;
ids, slots and positions are int32 or int64.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SEGMENT = 64  # uses; part of the definition of `sum_uses`, as the order of additions depends on it

SCHEMAS = {
    "assemble": ("rows", "(Tensor block, Tensor hit_slots, Tensor admitted, Tensor passed) -> Tensor"),
    "lookup": ("rows", "(Tensor block, Tensor ids) -> Tensor"),
    "gather_scaled": ("rows", "(Tensor rows, Tensor inverse, Tensor? weights, ScalarType dtype) -> Tensor"),
    "pool": (
        "sums",
        "(Tensor rows, Tensor inverse, Tensor offsets, Tensor? weights, bool mean, ScalarType dtype) -> Tensor",
    ),
    "exchange": (
        "rows",
        "(Tensor(a!) block, Tensor(b!) row_slots, Tensor admitted_slots, int leaving, Tensor(c!) admitted, "
        "Tensor(d!) admitted_row_slots) -> ()",
    ),
    "sum_uses": (
        "sums",
        "(Tensor grads, Tensor order, Tensor keys, Tensor starts, Tensor? source, Tensor? weights) -> Tensor",
    ),
    "update": (
        "updates",
        "(str primitive, Tensor(a!) block, Tensor(b!) row_slots, Tensor ids, Tensor grads, float[] scalars, "
        "Tensor? skip, Tensor(c!)? admitted, Tensor(d!)? admitted_row_slots) -> ()",
    ),
}  # by name: the module with the launch function of that name, and the schema

_SHAPES: dict[str, Callable[..., Tensor | None]] = {
    "assemble": lambda block, hits, admitted, passed: block.new_empty(
        (len(hits) + len(admitted) + len(passed), block.shape[2])
    ),
    "lookup": lambda block, ids: block.new_empty((len(ids), block.shape[2])),
    "gather_scaled": lambda rows, inverse, weights, dtype: rows.new_empty((len(inverse), rows.shape[1]), dtype=dtype),
    "pool": lambda rows, inverse, offsets, weights, mean, dtype: rows.new_empty(
        (len(offsets) - 1, rows.shape[1]), dtype=dtype
    ),
    "exchange": lambda *arguments: None,
    "sum_uses": lambda grads, order, keys, starts, source, weights: grads.new_empty(
        (len(starts) - 1, grads.shape[1]), dtype=torch.float32
    ),
    "update": lambda *arguments: None,
}


def launching(name: str) -> Callable[..., Any]:
    """Return what launches an operation; Triton is imported when it is called first."""

    def launch(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"hostdev.device.triton.{SCHEMAS[name][0]}"), name)(*arguments)

    return launch


def _define() -> Any:
    library: Any = torch.library.Library("hostdev", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, (_, schema) in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, launching(name), "CUDA")
        library.impl(name, _SHAPES[name], "Meta")
    return library


_library = _define()  # what it registered would go with it
_OPS: Any = torch.ops.hostdev


class Uses(NamedTuple):
    """A batch's uses sorted by unique row, each row's in order of occurrence; all tables of a batch share it."""

    order: Tensor  # int32 [N], the uses
    keys: Tensor  # int32 [N], the row of each of them
    starts: Tensor  # int32 [U + 1], where each row's begin


def assemble(block: Tensor, hit_slots: Tensor, admitted: Tensor, passed: Tensor) -> Tensor:
    """Return the weights of a batch's unique rows: those of the hits, then the admitted ones, then those that pass by.

    block      [C, 1 + S, D]: a row's weights, then its slots
    hit_slots  [H]
    admitted   [A, 1 + S, D]
    passed     [M, D]
    returns    [H + A + M, D]
    """
    out: Tensor = _OPS.assemble(block, hit_slots, admitted, passed)
    return out


def lookup(block: Tensor, ids: Tensor) -> Tensor:
    """Return the weights of rows: block[ids, 0].

    block    [C, 1 + S, D]
    ids      [U]
    returns  [U, D]
    """
    out: Tensor = _OPS.lookup(block, ids)
    return out


def gather_scaled(rows: Tensor, inverse: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return each use's row times its weight: the product in float32, then rounded to dtype, ties to even.

    rows     [U, D]
    inverse  [N], the row of each use
    weights  [N], or None for 1
    dtype    torch.float32 or torch.bfloat16
    returns  dtype [N, D]
    """
    out: Tensor = _OPS.gather_scaled(rows, inverse, weights, dtype)
    return out


def pool(
    rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool, dtype: torch.dtype
) -> Tensor:
    """Return each bag's sum of its uses' rows times their weights: ((t0 + t1) + t2) + ..., in order of occurrence.

    rows     [U, D]
    inverse  [N], the row of each use
    offsets  int32 [B + 1], where each bag's uses begin
    weights  [N], or None for 1
    mean     the sum is divided by the number of uses
    dtype    torch.float32 or torch.bfloat16, to which it is rounded at the end
    returns  dtype [B, D]; 0 for an empty bag
    """
    out: Tensor = _OPS.pool(rows, inverse, offsets, weights, mean, dtype)
    return out


def exchange(
    block: Tensor,
    row_slots: Tensor,
    admitted_slots: Tensor,
    leaving: int,
    admitted: Tensor,
    admitted_row_slots: Tensor,
) -> None:
    """Move the admitted rows to their slots, and what was in the last `leaving` of these back, all in place.

    block               [C, 1 + S, D]
    row_slots           [C, R]
    admitted_slots      [A], no slot twice
    leaving             E, at most A
    admitted            [A, 1 + S, D]; afterwards admitted[A - E:] are the rows that left, with their slots
    admitted_row_slots  [A, R]; the same
    """
    _OPS.exchange(block, row_slots, admitted_slots, leaving, admitted, admitted_row_slots)


def sort_uses(inverse: Tensor, rows: int) -> Uses:
    """Sort a batch's uses by unique row, in torch's operations (the sort is stable).

    inverse  int32 [N], the row of each use, each in [0, rows)
    rows     U
    """
    keys, order = torch.sort(inverse, stable=True)
    starts = torch.searchsorted(keys, torch.arange(rows + 1, dtype=keys.dtype, device=keys.device), out_int32=True)
    return Uses(order.int(), keys, starts)


def sum_uses(grads: Tensor, uses: Uses, source: Tensor | None, weights: Tensor | None) -> Tensor:
    """Return the sum over each row's uses of their gradients times their weights, in this order, two launches.

    The terms are float32(grad) * weight, rounded. A row's terms in order of occurrence are cut into segments of 64 (the
    last one may be shorter); each segment is summed as ((t0 + t1) + t2) + ..., and so are the segments' sums. Up to 64
    uses that is plain order of occurrence, the host's; a hotter row's segments are summed in parallel.

    grads    float32 or bfloat16 [any, D]
    source   int32 [N], the row of `grads` of each use; None: its own
    weights  [N], or None for 1
    returns  [U, D]; -0 for a row without uses, which adds nothing
    """
    out: Tensor = _OPS.sum_uses(grads, *uses, source, weights)
    return out


def supports(primitive: str, scalars: Sequence[Any]) -> bool:
    """Tell whether `update` does this optimizer: all but FTRL with another power than -0.5, which needs pow."""
    return primitive != "FusedSparseFtrl" or float(scalars[-1]) == 0.5


def update(
    primitive: str,
    block: Tensor,
    row_slots: Tensor,
    ids: Tensor,
    grads: Tensor,
    scalars: Sequence[Any],
    skip: Tensor | None,
    admitted: Tensor | None = None,
    admitted_row_slots: Tensor | None = None,
) -> None:
    """Take one optimizer step on unique rows of a table, and on admitted ones where they still lie, in place.

    primitive           the optimizer's op, such as "FusedSparseFtrl"; its docstring in `core.optimizers` has the
                        recurrence and its source, and `hostdev.kernels` the order of the operations
    block               [C, 1 + S, D]
    row_slots           [C, R]
    ids                 [H], unique, each in [0, C)
    grads               [at least H + A, D], summed: first those of `ids`, then those of `admitted`
    scalars             as from the optimizer's `scalars`, of which `supports` is true
    skip                [], on the device: nothing is written unless it is 0; None goes ahead
    admitted            [A, 1 + S, D]
    admitted_row_slots  [A, R]
    """
    numbers = [float(scalar) for scalar in scalars]  # exact: they are float32 values, and go back to float32
    _OPS.update(primitive, block, row_slots, ids, grads, numbers, skip, admitted, admitted_row_slots)
