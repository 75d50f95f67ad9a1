"""Exchange of rows and their gradients with other ranks, if tables are partitioned over ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hostdev.device.staging import PinnedBuffer
from hostdev.distributed.exchange import Asked
from hostdev.distributed.gradients import SelectedRows
from hostdev.kernels.pool import urgent
from hostdev.pipeline.batch_ids import PlannedGroup
from hostdev.pipeline.context import Context
from hostdev.pipeline.results import EarlyRows, Gradients, LookedUpBatch, Outgoing, SentBatch, StepBatch, SteppedBatch
from hostdev.pipeline.scheduling.in_flight import Conflicts, InFlight

_NONE = np.empty(0, np.int32)


def _get_asked(groups: Sequence[PlannedGroup]) -> list[Asked]:
    return [group.asked for group in groups if group.asked is not None]


def _make_buffer(memory: PinnedBuffer) -> Callable[[int, int], Any]:
    """Return a function of (rows, dim) that allocates an array in a batch's host memory."""
    return lambda rows, dim: memory.buffer(rows, dim).numpy()


def exchange_early(
    context: Context,
    batch: LookedUpBatch,
    conflicts: Conflicts | None,
    before: InFlight | None,
    *,
    update: bool,
    overlapped: bool,
) -> EarlyRows:
    """Exchange with other ranks those requested rows that need not wait for an update.

    Args:
        context: The pipeline's context.
        batch: The batch, with its rows on this rank.
        conflicts: The batch's conflicting rows on this rank.
        before: The previous batch, if it is unfinished on this rank. Its attribute `first` is set to the rows for which
            `batch` waits.
        update: Whether the pass updates the tables.
        overlapped: Whether batches overlap, so that rows may have to wait on any rank.
    """
    exchange = context.exchanges[update]
    with context.timeline.span("exchange rows", batch.planned.number):
        groups, starts = batch.planned.groups, batch.rows.ids.starts
        asked = _get_asked(groups)
        values = [
            None if group.plan is not None else [table.host for table in tables]
            for group, tables in zip(groups, batch.rows.groups, strict=True)
        ]
        early = None
        if update and (overlapped or context.cached):
            early = [np.full(len(group.ids), group.plan is None) for group in groups]
            at = np.searchsorted(conflicts.rows, starts).tolist() if conflicts is not None else []
            for number, (mask, group) in enumerate(zip(early, groups, strict=True)):
                if conflicts is not None and group.plan is None:
                    mask[conflicts.rows[at[number] : at[number + 1]] - starts[number]] = False
        in_two = update and overlapped and not context.cached
        known = context.asked_before[1] if in_two and context.asked_before[0] == batch.planned.number - 1 else []
        shared = _choose_shared(known, conflicts, before)
        wanted = [one.wanted for one in shared]
        incoming = exchange.early_rows(asked, values, early, _make_buffer(batch.memory), known, wanted)
        if in_two:
            context.asked_before = batch.planned.number, asked
        if known and before is not None:
            before.first = [one._replace(asked=mask) for one, mask in zip(shared, incoming.shared, strict=True)]
        if not context.staging.copies:
            return EarlyRows(incoming, [])
        flat = [torch.from_numpy(rows) for group in incoming.rows for rows in group]
        sent, _ = context.staging.send(flat, batch.memory)  # the event of the batch's next copy covers this copy
        return EarlyRows(incoming, sent)


def _choose_shared(asked: Sequence[Asked], conflicts: Conflicts | None, before: InFlight | None) -> list[SelectedRows]:
    """Return, for each group, this rank's rows of the previous batch for which the current batch waits."""
    found = []
    starts, positions = [0] * (len(asked) + 1), _NONE
    if before is not None:
        assert before.writes is not None
        starts = before.writes.starts
        if conflicts is not None and conflicts.shared is not None:
            assert conflicts.shared.first.positions is not None
            positions = conflicts.shared.first.positions
    at = np.searchsorted(positions, starts)
    for group, one in enumerate(asked):
        rows = np.zeros(starts[group + 1] - starts[group], np.bool_)
        rows[positions[at[group] : at[group + 1]] - starts[group]] = True
        wanted = rows[one.inverse] if before is not None else np.zeros(len(one.inverse), np.bool_)
        found.append(SelectedRows(rows[:0], wanted, rows))
    return found


def exchange_late(context: Context, batch: SentBatch, values: list[list[Tensor]], update: bool) -> list[list[Tensor]]:
    """Exchange the rows that had to wait for an update; return the batch's rows on the device, by group and table.

    Args:
        context: The pipeline's context.
        batch: The batch; its early rows have been sent.
        values: The rows of this rank that any rank requests, by group and table.
        update: Whether the pass updates the tables.
    """
    assert batch.early is not None
    asked, staging, (incoming, sent) = _get_asked(batch.planned.groups), context.staging, batch.early
    if incoming.given is not None:
        with urgent(), context.timeline.span("exchange late rows", batch.planned.number):
            given = [[value.cpu().numpy() for value in group] for group in values]
            # Early rows may still be in transit from their buffers to the device, so late rows get other buffers.
            buffer = _make_buffer(batch.memory) if staging.copies else None
            places, late = context.exchanges[update].late_rows(incoming, asked, given, buffer)
        if staging.copies:
            on_device = iter(sent)
            for group, at in zip(late, places, strict=True):
                for rows in group:
                    target = next(on_device)
                    if len(at):
                        mark = staging.patch(target, at, torch.from_numpy(rows), batch.memory)
                        staging.await_sent([mark], [target])
    arrived = iter(sent)
    return [[next(arrived) if staging.copies else torch.from_numpy(rows) for rows in group] for group in incoming.rows]


class Leaving(NamedTuple):
    """The result of `send_gradients`: a step's gradients for this rank's rows, and those for other ranks."""

    gradients: Gradients | None  # gradients for updating this rank's rows now; None if the updater does this later
    outgoing: Outgoing | None  # gradients that the updater sends to the ranks with the rows; None if none are left
    received: Any  # the event after which the outgoing gradients are in host memory


def send_gradients(context: Context, batch: StepBatch, gradients: Gradients) -> Leaving:
    """Copy a step's gradients to host memory for the ranks that have the rows; with a cache, exchange them at once."""
    if not gradients.parts:  # no rank has gradients
        return Leaving(gradients, None, None)
    flat = [part for group in gradients.parts for table in group for part in table or ()]
    host, received = context.staging.receive(flat, batch.memory)
    left = iter(host)
    parts = [
        [None if table is None else [next(left).numpy() for _ in table] for table in group] for group in gradients.parts
    ]
    sums = [
        [
            None if table is None else np.empty((len(mine.planned.ids), one.table.dim), np.float32)
            for table, one in zip(tables, group.embeddings, strict=True)
        ]
        for tables, mine, group in zip(parts, batch.groups, context.groups, strict=True)
    ]
    outgoing = Outgoing(parts, gradients.micro_batches, batch.first if gradients.in_two else None, sums)
    if not context.cached:
        for mine, tables in zip(batch.groups, gradients.parts, strict=True):
            for rows, table in zip(mine.rows, tables, strict=True):
                if table is not None:
                    rows.begin_step()
        return Leaving(None, outgoing, received)
    if gradients.check is not None:
        gradients.check.get()
    context.staging.await_event(received)
    summed = exchange_gradients(context, batch, outgoing)
    on_device = [
        [None if one is None else one.to(staging.device) for one in mine]
        for staging, mine in zip(context.row_stagings, summed, strict=True)
    ]
    return Leaving(gradients._replace(grads=on_device), None, received)


def exchange_gradients(
    context: Context, batch: StepBatch | SteppedBatch, outgoing: Outgoing
) -> list[list[Tensor | None]]:
    """Send gradients to the ranks that have the rows; return the sums for this rank's rows, in host memory.

    If the gradients of some rows are sent first, only these are exchanged, and `exchange_rest` must be called later.
    """
    if outgoing.chosen is None:
        _exchange(context, batch, outgoing, None)
    else:
        with urgent():
            _exchange(context, batch, outgoing, outgoing.chosen)
    return [[None if one is None else torch.from_numpy(one) for one in group] for group in outgoing.sums]


def exchange_rest(context: Context, batch: SteppedBatch, outgoing: Outgoing) -> None:
    """Exchange the gradients that `exchange_gradients` left out, and complete its sums."""
    if outgoing.chosen is not None:
        _exchange(context, batch, outgoing, [one.others() for one in outgoing.chosen])


def _exchange(
    context: Context, batch: StepBatch | SteppedBatch, outgoing: Outgoing, chosen: list[SelectedRows] | None
) -> None:
    with context.timeline.span("exchange gradients", batch.number):
        asked = _get_asked([group.planned for group in batch.groups])
        context.exchanges[True].gradients(asked, outgoing.grads, outgoing.micro_batches, outgoing.sums, chosen)
