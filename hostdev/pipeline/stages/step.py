"""Step: give the caller a batch's rows on the device, and take the gradients that the caller computes.

The caller runs forward, backward and its optimizer in between. At the end of the step, rows on the device are updated,
rows enter and leave the caches, and the gradients of the other rows go to the host.
"""

from functools import partial
from typing import Any

from torch import Tensor

from hostdev.device.forwarding import StepGradients
from hostdev.pipeline.batch_ids import RowSubset
from hostdev.pipeline.context import Context
from hostdev.pipeline.remote import exchange_late, send_gradients
from hostdev.pipeline.results import Gradients, SentBatch, StepBatch, StepGroup, SteppedBatch
from hostdev.pipeline.rows import BatchRows, find_on_device, receive_rows
from hostdev.pipeline.scheduling.in_flight import InFlight


def begin_step(context: Context, batch: SentBatch, in_flight: InFlight, update: bool) -> StepBatch:
    """Return the batch with the rows of all tables on the device, whose current stream waits for them.

    Args:
        context: The pipeline's context.
        batch: The batch; all its rows have been sent.
        in_flight: The batch's shared state.
        update: Whether the pass updates the tables.
    """
    planned, staging = batch.planned, context.staging
    number, request = planned.number, planned.request
    context.before_stage("step", number)
    span = context.timeline.span("step", number, flow="t" if update else "f", rows=request.rows)
    span.__enter__()
    early = [] if batch.early is None else batch.early.sent  # sent before all other tensors, in the same stream
    staging.await_sent([batch.mark], [*early, *batch.sent])
    begun = staging.clock()
    values = [
        [table.arrived() for table in rows]
        if group.on_host
        else [one.lookup(one.table, device_ids) for one in group.embeddings]
        for group, rows, device_ids in zip(context.groups, batch.rows.groups, batch.device_ids, strict=True)
    ]
    if batch.early is not None:
        values = exchange_late(context, batch, values, update)
    for group, tables in zip(context.groups, values, strict=True):
        if group.on_host:
            tables[:] = [one.current(rows) for one, rows in zip(group.embeddings, tables, strict=True)]
    if context.forwarding is not None and update:
        context.forwarding.begin(batch.rows.forwarded, values)
    parts = zip(planned.groups, batch.rows.groups, batch.inverses, batch.device_ids, values, strict=True)
    groups = [StepGroup(*part) for part in parts]
    return StepBatch(
        number=number,
        position=planned.position,
        request=request,
        groups=groups,
        tensors=batch.tensors,
        writes=planned.writes,
        memory=batch.memory,
        outcomes=[],
        in_flight=in_flight,
        begun=begun,
        span=span,
    )


def end_step(context: Context, batch: StepBatch, gradients: Gradients | None) -> SteppedBatch:
    """Update the rows on the device, and start to copy the gradients of the other rows to the host.

    Args:
        context: The pipeline's context.
        batch: The batch in the step.
        gradients: The step's gradients, or None if nothing changes, as in evaluation.
    """
    try:
        check = gradients.check if gradients is not None else None
        if check is not None and not context.staging.copies:
            check.get()  # raises before anything is updated
        stepped: list[list[bool]] = []
        outgoing = received = None
        if gradients is not None and gradients.parts:
            stepped = [[table is not None for table in group] for group in gradients.parts]
        if gradients is not None and context.exchanges:
            gradients, outgoing, received = send_gradients(context, batch, gradients)
        leaving: list[_Leaving] = []
        if gradients is not None:
            stepped = [[grad is not None for grad in grads] for grads in gradients.grads]
            leaving = _update_on_device(context, batch, gradients)
        for group in batch.groups:
            group.values.clear()
        clocks = batch.begun, context.staging.clock()
        received_first: tuple[Any, Any] = None, None
        if leaving:
            shared = batch.in_flight.shared  # None unless the next batch is planned and waits for rows
            received_first, received = _receive(context, batch, leaving, shared)
        return SteppedBatch(
            number=batch.number,
            groups=batch.groups,
            stepped=stepped,
            writes=batch.writes,
            memory=batch.memory,
            outcomes=batch.outcomes,
            check=check,
            received=received,
            received_first=received_first,
            outgoing=outgoing,
            clocks=clocks,
            in_flight=batch.in_flight,
        )
    finally:
        abandon_step(batch)


def abandon_step(batch: StepBatch) -> None:
    """End the timeline's span of a step, which may be abandoned."""
    batch.span.__exit__(None, None, None)


_Leaving = tuple[int, BatchRows, list[Tensor | None]]  # a group's number, a table's rows, tensors for the host


def _update_on_device(context: Context, batch: StepBatch, gradients: Gradients) -> list[_Leaving]:
    """Update the rows on the device; return the tensors that the host needs to update each host table."""
    skip = gradients.skip
    parts = list(zip(context.groups, batch.groups, gradients.grads, strict=True))
    for group, mine, grads in parts:
        if group.on_host:
            for rows, grad in zip(mine.rows, grads, strict=True):
                if grad is not None:
                    rows.update_cached(grad, skip)
            continue
        for embedding, grad in zip(group.embeddings, grads, strict=True):
            if grad is not None:
                embedding.begun += 1
                embedding.update(embedding.table, mine.device_ids, grad, skip)
    leaving: list[_Leaving] = []
    for number, (group, mine, grads) in enumerate(parts):
        _report_update(context, batch.number, number, mine)
        if not group.on_host:
            continue
        plan = mine.planned.plan
        for table, (rows, grad) in enumerate(zip(mine.rows, grads, strict=True)):
            if context.forwarding is not None and grad is not None and rows.step is not None:
                context.forwarding.end(number, table, StepGradients(grad, rows.step, skip))
            leaving.append((number, rows, rows.leave(grad)))
            if plan is not None:
                group.cache.stepped(plan, table, partial(rows.bring_back, plan.evicted))
    return leaving


def _receive(context: Context, batch: StepBatch, leaving: list[_Leaving], shared: Any) -> tuple[tuple[Any, Any], Any]:
    """Copy the tensors in `leaving` to the host, first the gradients of rows for which the next batch waits."""
    first: list[RowSubset | None] = [None] * len(batch.groups)
    if shared is not None:
        first[:] = context.offsets.split(shared.first, batch.writes.starts)
    marks: tuple[Any, Any] = None, None
    for staging in {id(one): one for one in context.row_stagings}.values():
        rows = [(table, left, first[group]) for group, table, left in leaving if context.row_stagings[group] is staging]
        if rows:
            found = receive_rows(rows, staging, batch.memory)
            marks = found if staging.copies else marks
    return (shared, marks[0]), marks[1]


def _report_update(context: Context, batch: int, number: int, mine: StepGroup) -> None:
    report, group = context.hooks.after_update, context.groups[number]
    if report is None:
        return
    if not group.on_host:
        report(batch, number, mine.device_ids, [one.table.where(mine.device_ids) for one in group.embeddings])
    elif mine.planned.plan is not None:
        for ids, places in find_on_device(mine.planned.plan, group.cache.slots, mine.rows):
            report(batch, number, ids, list(places))
