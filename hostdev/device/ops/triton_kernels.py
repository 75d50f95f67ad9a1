"""One launch each, on CUDA: `hostdev.device.triton`. What its kernels do not do, torch's operations do."""

from typing import Any

import torch
from torch import Tensor

from hostdev.device.ops import torch_operations
from hostdev.device.triton import ops as fused
from hostdev.device.triton.ops import Uses

lookup = fused.lookup
assemble = fused.assemble
gather = fused.gather_scaled


def uses_of(inverse: Tensor, rows: int, *, in_order: bool) -> Uses:
    """See `Ops`."""
    return fused.sort_uses(inverse, rows)


def sum_uses(grads: Tensor, uses: Uses, weights: Tensor | None, rows: int) -> Tensor:
    """See `Ops`; rows of more than 64 uses in segments, see `hostdev.device.triton.ops.sum_uses`."""
    return fused.sum_uses(grads.contiguous(), uses, weights)


def update(
    primitive: str,
    block: Tensor,
    row_slots: Tensor,
    ids: Tensor,
    grads: Tensor,
    scalars: tuple[Any, ...],
    skip: Tensor | None = None,
    admitted: Tensor | None = None,
    admitted_row_slots: Tensor | None = None,
) -> None:
    """See `Ops`."""
    way = fused if fused.supports(primitive, scalars) else torch_operations
    way.update(primitive, block, row_slots, ids, grads, scalars, skip, admitted, admitted_row_slots)


def exchange(
    block: Tensor, row_slots: Tensor, slots: Tensor, leaving: int, admitted: Tensor, admitted_row_slots: Tensor
) -> tuple[Tensor, Tensor]:
    """See `Ops`; the rows that leave lie where the admitted ones were."""
    fused.exchange(block, row_slots, slots, leaving, admitted, admitted_row_slots)
    stay = len(slots) - leaving
    return admitted[stay:], admitted_row_slots[stay:]


def place(rows: Tensor, positions: Tensor, values: Tensor) -> None:
    """See `Ops`."""
    none = torch.empty((len(rows), 0), device=rows.device)
    block, new = (part.view(len(part), 1, -1) for part in (rows, values))
    fused.exchange(block, none, positions, 0, new, none[: len(values)])
