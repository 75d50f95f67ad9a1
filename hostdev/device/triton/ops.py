"""Row operations of caches and tables on CUDA: torch operations `hostdev::*`, one or two launches each.

They compute in float32, in the stated order, each operation rounded once, without FMA. Their results equal the host
kernels' bit for bit, except for the segments of `sum_uses`. They are registered for CUDA only; the CPU uses the host's
kernels. Everything is launched on the current stream, asynchronously. Importing this module defines the operations,
without importing Triton.

Shapes: C slots, or rows of a table; per row, S optimizer state columns of D values and R state values. A batch has U
unique rows (H hits in the cache, A admitted, M bypassing) and N occurrences. Tensors are contiguous and float32 unless
noted; ids, slots and positions are int32 or int64.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SEGMENT = 64  # occurrences; part of the definition of `sum_uses`, as it sets the order of additions

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
}  # by name: the module that launches the operation, and its schema

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
    """Return a function that launches an operation; its first call imports Triton."""

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


_library = _define()  # must stay alive, or the operations are unregistered
_OPS: Any = torch.ops.hostdev


class SortedUses(NamedTuple):
    """A batch's occurrences, stably sorted by unique row; all tables of a group share them."""

    order: Tensor  # int32 [N], the occurrences
    keys: Tensor  # int32 [N], their rows
    starts: Tensor  # int32 [U + 1], where each row's occurrences begin


def assemble(block: Tensor, hit_slots: Tensor, admitted: Tensor, passed: Tensor) -> Tensor:
    """Return the weights of a batch's unique rows [H + A + M, D]: hits, then admitted, then bypassing rows.

    Args:
        block: The rows in the slots, [C, 1 + S, D]: weights, then optimizer state.
        hit_slots: The slots of the hits, [H].
        admitted: The admitted rows, [A, 1 + S, D].
        passed: The weights of the bypassing rows, [M, D].
    """
    out: Tensor = _OPS.assemble(block, hit_slots, admitted, passed)
    return out


def lookup(block: Tensor, ids: Tensor) -> Tensor:
    """Return the weights of rows, block[ids, 0]: block [C, 1 + S, D], ids [U] -> [U, D]."""
    out: Tensor = _OPS.lookup(block, ids)
    return out


def gather_scaled(rows: Tensor, inverse: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return each occurrence's row times its weight, dtype [N, D]: a float32 product, rounded to nearest even.

    Args:
        rows: The unique rows, [U, D].
        inverse: The row of each occurrence, [N].
        weights: The weight of each occurrence, [N]; None for 1.
        dtype: torch.float32 or torch.bfloat16.
    """
    out: Tensor = _OPS.gather_scaled(rows, inverse, weights, dtype)
    return out


def pool(
    rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool, dtype: torch.dtype
) -> Tensor:
    """Return each bag's sum of rows times weights, in order of occurrence: ((t0 + t1) + t2) + ...

    Args:
        rows: The unique rows, [U, D].
        inverse: The row of each occurrence, [N].
        offsets: The first occurrence of each bag, int32 [B + 1].
        weights: The weight of each occurrence, [N]; None for 1.
        mean: Whether to divide the sum by the bag's size.
        dtype: torch.float32 or torch.bfloat16; rounded once, at the end.

    Returns:
        dtype [B, D]; 0 for an empty bag.
    """
    out: Tensor = _OPS.pool(rows, inverse, offsets, weights, mean, dtype)
    return out


def exchange(
    block: Tensor, row_slots: Tensor, admitted_slots: Tensor, leaving: int, admitted: Tensor, admitted_row_slots: Tensor
) -> None:
    """Write admitted rows to their slots, in place; the rows of the last E slots replace the last E admitted rows.

    Args:
        block: The rows in the slots, [C, 1 + S, D].
        row_slots: Their per-row state, [C, R].
        admitted_slots: The slots of the admitted rows, [A], all different.
        leaving: E, at most A.
        admitted: The admitted rows, [A, 1 + S, D]; afterwards admitted[A - E:] are the evicted rows.
        admitted_row_slots: Their per-row state, [A, R]; afterwards admitted_row_slots[A - E:] belong to evicted rows.
    """
    _OPS.exchange(block, row_slots, admitted_slots, leaving, admitted, admitted_row_slots)


def sort_uses(inverse: Tensor, rows: int) -> SortedUses:
    """Sort a batch's occurrences stably by unique row, with torch operations.

    Args:
        inverse: The row of each occurrence, in [0, rows), int32 [N].
        rows: U, the number of unique rows.
    """
    keys, order = torch.sort(inverse, stable=True)
    starts = torch.searchsorted(keys, torch.arange(rows + 1, dtype=keys.dtype, device=keys.device), out_int32=True)
    return SortedUses(order.int(), keys, starts)


def sum_uses(grads: Tensor, uses: SortedUses, source: Tensor | None, weights: Tensor | None) -> Tensor:
    """Return each row's sum of gradients times weights over its occurrences, [U, D], in two launches.

    The terms are float32(grad) * weight, rounded. A row's terms, in order of occurrence, are cut into segments of 64
    (the last one may be shorter). Each segment is summed as ((t0 + t1) + t2) + ..., and so are the segments' sums. Up
    to 64 occurrences this is the host's order; a hotter row's segments are summed in parallel. A row without
    occurrences gets -0, the neutral element of addition.

    Args:
        grads: The gradients of occurrences or bags, float32 or bfloat16 [any, D].
        uses: From `sort_uses`.
        source: The row of `grads` for each occurrence, int32 [N]; None if it is row i for occurrence i.
        weights: The weight of each occurrence, [N]; None for 1.
    """
    out: Tensor = _OPS.sum_uses(grads, *uses, source, weights)
    return out


def supports(primitive: str, scalars: Sequence[Any]) -> bool:
    """Return whether `update` supports this optimizer: all but FTRL with a power other than -0.5, which needs pow."""
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
    """Take one optimizer step, in place, on unique rows of a table and on admitted rows.

    Args:
        primitive: The optimizer's op, such as "FusedSparseFtrl". `core.optimizers` gives its recurrence and source,
            and `hostdev.kernels` gives the order of operations.
        block: The rows of a table or of a cache's slots, [C, 1 + S, D].
        row_slots: Their per-row state, [C, R].
        ids: The rows of the block to update, [H], unique, each in [0, C).
        grads: Their summed gradients, then those of the admitted rows, [at least H + A, D].
        scalars: From the optimizer's `scalars`; `supports(primitive, scalars)` must be True.
        skip: A scalar tensor on the device; if it is not 0, nothing is written. None means 0.
        admitted: The admitted rows, [A, 1 + S, D].
        admitted_row_slots: Their per-row state, [A, R].
    """
    numbers = [float(scalar) for scalar in scalars]  # exact: float32 values, converted back to float32
    _OPS.update(primitive, block, row_slots, ids, grads, numbers, skip, admitted, admitted_row_slots)
