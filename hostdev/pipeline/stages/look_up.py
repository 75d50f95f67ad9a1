"""Look up: read from the tables on the host the rows that bypass the caches, and the rows that the caches admit.

The stage that follows, send, copies a batch's rows, inverses and tensors to the device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hostdev.device.staging import PinnedBuffer
from hostdev.kernels.arrays import AnyIds
from hostdev.kernels.claims import others
from hostdev.kernels.pool import run_tasks
from hostdev.pipeline.batch_ids import RowSubset
from hostdev.pipeline.context import Context
from hostdev.pipeline.forwarding import ForwardedRows, count_forwarded_bytes, make_forwarded
from hostdev.pipeline.results import LookedUpBatch, PlannedBatch, SentBatch
from hostdev.pipeline.rows import BatchRows, FetchedRows, count_bytes, fetch_late, make_rows

_MANY_CONFLICTS = 4  # if more than one row in 4 conflicts, conflicting rows are looked up only once, when ready


def take_memory(context: Context, batch: PlannedBatch) -> PinnedBuffer:
    """Return host memory for a batch's copies."""
    needs = 0
    if context.staging.copies:
        needs = sum(tensor.nbytes for tensor in batch.request.tensors)
        for group, mine, inverse in zip(context.groups, batch.groups, batch.inverses, strict=True):
            needs += count_bytes(group, len(mine.ids), mine.plan, len(inverse))
            if mine.asked is not None:  # rows of other ranks, and their gradients
                needs += 2 * mine.asked.size * group.row_bytes
        if batch.conflicts is not None and batch.conflicts.forwarded is not None:
            needs += count_forwarded_bytes(context.groups, batch.conflicts.forwarded)
    return context.staging.pinned_buffers.take(needs)


def take_forwarded(context: Context, batch: PlannedBatch, memory: PinnedBuffer) -> list[ForwardedRows | None]:
    """Return, by group, the still unread rows that the previous batch forwards to this batch; [] if there are none."""
    if batch.conflicts is None or batch.conflicts.forwarded is None:
        return []
    parts = context.groups, context.offsets, batch.reads, batch.conflicts.forwarded
    return make_forwarded(*parts, context.staging, memory)


def read_forwarded(context: Context, number: int, rows: Sequence[ForwardedRows | None]) -> None:
    """Read the state of rows that are forwarded to this batch but were not forwarded to the previous one."""
    context.before_stage("lookup forwarded", number)
    found = [one for one in rows if one is not None]
    with context.timeline.span("lookup forwarded", number) as span:
        run_tasks([task for one in found for task in one.read_tasks()])
        span["rows"] = sum(one.new for one in found)


def look_up(
    context: Context, batch: PlannedBatch, memory: PinnedBuffer, forwarded: list[ForwardedRows | None] | None = None
) -> LookedUpBatch:
    """Look up the rows on the host. Conflicting rows are looked up again later or, if there are many, only later."""
    reads, conflicts = batch.reads, batch.conflicts
    rows: list[list[BatchRows]] = [[] for _ in batch.groups]
    if context.on_host:
        context.before_stage("lookup", batch.number)
        with context.timeline.span("lookup", batch.number) as span:
            for n, (group, planned) in enumerate(zip(context.groups, batch.groups, strict=True)):
                if group.on_host:
                    rows[n] = make_rows(group, len(planned.ids), planned.plan, context.row_stagings[n], memory)
            subsets, n_rows = reads.all, len(reads)
            if conflicts is not None and len(conflicts.rows) * _MANY_CONFLICTS > n_rows:
                subset = RowSubset.select(reads.ids, others(n_rows, conflicts.rows))
                subsets, n_rows = context.offsets.split(subset, reads.starts), len(subset)
            run_tasks(
                [
                    task
                    for mine, theirs in zip(rows, subsets, strict=True)
                    for table in mine
                    for task in table.fetch(theirs)
                ]
            )
            span["rows"], span["bytes"] = n_rows, n_rows * context.row_bytes
    return LookedUpBatch(batch, FetchedRows(reads, rows, forwarded or []), memory)


def look_up_conflicting(context: Context, number: int, rows: FetchedRows, subset: RowSubset) -> None:
    """Look up and send rows that had to wait for an update."""
    context.before_stage("lookup late", number)
    fetch_late(_pair(rows, context.offsets.split(subset, rows.ids.starts)))


def reload(context: Context, rows: FetchedRows, table: Any, ids: AnyIds | None, *, in_step: bool) -> None:
    """Look up a batch's rows of `table` again if they were written after the batch looked them up.

    Args:
        context: The pipeline's context.
        rows: The batch's rows.
        table: The table that was written.
        ids: The rows that were written, int32 or int64 [N]; None for all rows.
        in_step: Whether the batch is in the caller's step. Then only the rows that a cache admits, or that the step may
            forward, are read again.
    """
    if in_step and context.forwarding is not None:
        context.forwarding.reload(table, ids)
    for forwarded in rows.forwarded if not in_step else ():
        if forwarded is not None and forwarded.has(table):
            forwarded.reload(ids)
    for one, all_rows in _pair(rows, rows.ids.all):
        if one.embedding.table is not table:
            continue
        reads = all_rows.ids
        at = np.arange(len(reads)) if ids is None else np.flatnonzero(np.isin(reads, ids))
        if len(at):
            (one.reload_in_step if in_step else one.reload)(RowSubset.select(reads, at.astype(np.int32)))


def _pair(rows: FetchedRows, subsets: Sequence[RowSubset]) -> Sequence[tuple[BatchRows, RowSubset]]:
    """Pair each table's rows with the subset of its group."""
    return [(table, share) for group, share in zip(rows.groups, subsets, strict=True) for table in group]


def send(context: Context, batch: LookedUpBatch) -> SentBatch:
    """Begin to copy a batch to the device, and return the batch. Conflicting rows may be copied later."""
    planned = batch.planned
    context.before_stage("send", planned.number)
    with context.timeline.span("send", planned.number):
        arrays = [*planned.inverses]
        arrays += [mine.ids for group, mine in zip(context.groups, planned.groups, strict=True) if not group.on_host]
        tensors = [*(torch.from_numpy(array) for array in arrays), *planned.request.tensors]
        sent, mark = context.staging.send(tensors, batch.memory)
        left = iter(sent)
        inverses = [next(left) for _ in planned.groups]
        device_ids = [None if group.on_host else next(left) for group in context.groups]
        for tables in batch.rows.groups:
            for table in tables:
                table.send()
        for forwarded in batch.rows.forwarded:
            if forwarded is not None:
                forwarded.send()
    return SentBatch(planned, batch.rows, batch.memory, batch.early, inverses, device_ids, list(left), sent, mark)
