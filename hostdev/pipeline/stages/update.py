"""Update: apply a batch's gradients to the tables on the host, and write back the rows that left the caches."""

from collections.abc import Sequence

from hostdev.kernels.pool import Task, run_tasks, urgent
from hostdev.pipeline.batch_ids import RowSubset
from hostdev.pipeline.context import Context
from hostdev.pipeline.remote import exchange_gradients, exchange_rest
from hostdev.pipeline.results import SteppedBatch
from hostdev.pipeline.scheduling.in_flight import SharedRows


def await_step(context: Context, batch: SteppedBatch) -> None:
    """Wait until the device has finished a step, and record its time; raise an error if the update must not happen."""
    for outcome in batch.outcomes:
        outcome.arrive()
    if batch.check is not None:
        batch.check.get()
    context.staging.await_event(batch.clocks[1] if context.staging.copies else None)
    context.timeline.device_busy_ns += context.staging.nanoseconds(*batch.clocks)


def receive_sums(context: Context, batch: SteppedBatch) -> None:
    """With other ranks, send gradients to the ranks that have the rows, and receive the sums for this rank's rows."""
    if batch.outgoing is None:
        return
    context.staging.await_event(batch.received)
    summed = exchange_gradients(context, batch, batch.outgoing)
    for group, sums in zip(batch.groups, summed, strict=True):
        for rows, total in zip(group.rows, sums, strict=True):
            rows.receive([total], None)


def update_first(context: Context, batch: SteppedBatch, shared: SharedRows) -> None:
    """Update the rows for which the next batch waits, before the batch's other rows."""
    known, mark = batch.received_first
    context.staging.await_event(mark if known is shared else batch.received)
    with context.timeline.span("update first", batch.number) as span:
        span["rows"] = len(shared.first)
        subsets = context.offsets.split(shared.first, batch.writes.starts)
        tasks = _make_tasks(batch, subsets, first=known is shared)  # not urgent: may wait for a checkpoint's reader
        with urgent():  # the device may be waiting
            run_tasks(tasks)


def update(context: Context, batch: SteppedBatch, shared: SharedRows | None) -> None:
    """Update a batch's rows, except those that `update_first` has updated; then release its memory."""
    if batch.outgoing is not None:
        exchange_rest(context, batch, batch.outgoing)
    context.staging.await_event(batch.received)
    rest = batch.writes.all if shared is None else context.offsets.split(shared.rest, batch.writes.starts)
    with context.timeline.span("update", batch.number, flow="f") as span:
        span["rows"] = len(batch.writes if shared is None else shared.rest)
        run_tasks(_make_tasks(batch, rest))
        for group, mine in zip(context.groups, batch.groups, strict=True):
            for table, rows in enumerate(mine.rows):
                rows.updated()
                if mine.planned.plan is not None:
                    group.cache.left(mine.planned.plan, table)
    _report(context, batch)
    unpin(batch)
    for number, keys in context.keyed.items():
        planned = batch.groups[number].planned
        if planned.plans_keys and batch.stepped[number][0]:
            keys.finish_step()
        else:
            keys.finish_read(planned.guests)
    for group, stepped in zip(context.groups, batch.stepped, strict=True):
        for embedding, one in zip(group.embeddings, stepped, strict=True):
            embedding.steps += one
    context.steps += 1
    release(batch)


def unpin(batch: SteppedBatch) -> None:
    """Allow a batch's rows of tables on disk to leave the memory."""
    if batch.in_flight.pins is not None:
        batch.in_flight.pins.release()


def release(batch: SteppedBatch) -> None:
    """Release a batch's rows and host memory; the device must be done with them."""
    for group in batch.groups:
        group.rows.clear()
    batch.outcomes.clear()
    batch.memory.release()


def _make_tasks(batch: SteppedBatch, subsets: Sequence[RowSubset], *, first: bool = False) -> list[Task]:
    """Return tasks that update each group's subset of its rows."""
    return [
        task
        for mine, theirs in zip(batch.groups, subsets, strict=True)
        for rows in mine.rows
        for task in rows.update(theirs, first=first)
    ]


def _report(context: Context, batch: SteppedBatch) -> None:
    report = context.hooks.after_update
    if report is None:
        return
    for number, (group, mine) in enumerate(zip(context.groups, batch.groups, strict=True)):
        if group.on_host:
            plan = mine.planned.plan
            ids = mine.planned.ids if plan is None else plan.ids[plan.passed]
            report(batch.number, number, ids, [one.table.where(ids) for one in group.embeddings])
