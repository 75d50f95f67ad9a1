"""Forwarding on the device: rows that two successive steps share stay on the device, instead of going through the host.

Shapes: U rows of the earlier step, F forwarded rows; per row, S optimizer state columns of D values, and R numbers of
per-row state.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.table_dtypes import TableStep
from hostdev.device.ops import get_ops


class RowState(NamedTuple):
    """Rows of a table with their optimizer state."""

    block: Tensor  # float32 [F, 1 + S, D]
    row_slots: Tensor  # float32 [F, R]


class ForwardedPlaces(NamedTuple):
    """Positions of a group's forwarded rows, on the device, shared by all tables of the group."""

    source: Tensor  # int32 [F], among the rows of the earlier step
    target: Tensor  # int32 [F], among the rows of the later step
    held: Tensor  # int32 [F], among the rows forwarded to the earlier step, followed by the rows from the host
    row_ids: Tensor | None = None  # int32 or int64 [F], the rows' ids; None if no table's rounding depends on them


class StepGradients(NamedTuple):
    """A step's gradients of a table's rows, which update the table on the host and forwarded rows on the device."""

    grads: Tensor  # float32 [U, D]
    step: TableStep
    skip: Tensor | None  # float32 []; if it is not 0, nothing changes; None means 0


def forward_rows(
    optimizer: SparseOptimizer,
    held: RowState | None,
    new: RowState,
    at: ForwardedPlaces,
    taken: StepGradients | None,
    rows: Tensor,
) -> RowState:
    """Compute the forwarded rows as they are after the earlier step, and write their weights to the later step's rows.

    The host computes the same rows from the same gradients, so nothing has to be copied back.

    Args:
        optimizer: The table's optimizer.
        held: The rows that were forwarded to the earlier step, as they were before that step; None if there were none.
        new: The rows that come from the host, as they were before the earlier step.
        at: Positions of the forwarded rows.
        taken: The earlier step's gradients, or None if the table took no step.
        rows: The later step's rows, float32 [any, D]; the forwarded rows' weights are written here.

    Returns:
        The state of the forwarded rows after the earlier step.
    """
    ops = get_ops(rows.device)
    block, row_slots = new
    if held is not None:
        block = torch.cat([held.block, block]).index_select(0, at.held)
        row_slots = torch.cat([held.row_slots, row_slots]).index_select(0, at.held)
    if taken is not None:
        grads = taken.grads.index_select(0, at.source)
        if taken.step.clip is not None:
            grads = ops.clip_rows(grads, taken.step.clip)
        ids = torch.arange(len(block), dtype=torch.int32, device=block.device)
        ops.update(optimizer.primitive, block, row_slots, ids, grads, taken.step.scalars, taken.skip)
        if taken.step.rounding is not None:
            assert at.row_ids is not None
            ops.round_rows(block, None, at.row_ids, *taken.step.rounding)
    ops.place(rows, at.target, block[:, 0].contiguous())
    return RowState(block, row_slots)


def forwarded_bytes(
    held: RowState | None, new: RowState, at: ForwardedPlaces, taken: StepGradients | None, rows: Tensor
) -> int:
    """Return how many bytes `forward_rows` moves: it reads gradients, reads and writes rows, and copies weights."""
    _, planes, dim = new.block.shape
    return 4 * len(at.source) * (2 * dim + 2 * (planes * dim + new.row_slots.shape[1]))
