"""Plan: which rows a batch needs, and where they are: in the tables, in the caches, or with an unfinished batch.

`read` takes the next request. `deduplicate` finds each group's unique ids, and sends them to the ranks that have the
rows. `plan` decides which rows enter and leave the caches, and finds conflicting rows, which an unfinished batch will
write (read-after-write hazards). A request's ids are flat and have no padding.

Conflicting rows form two subsets. Rows that the previous batch writes are forwarded on the device if possible.
Otherwise the previous batch's update begins with them, as soon as its gradients arrive. Rows that only older batches
write are ready even earlier.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hostdev.cache.plan import renumber
from hostdev.kernels.arrays import Positions
from hostdev.kernels.claims import Claims, Late, claim, intersect, others
from hostdev.kernels.pool import run_tasks
from hostdev.pipeline.batch_ids import (
    ConcatenatedIds,
    PlannedGroup,
    ReadBatch,
    Request,
    RowSubset,
    UniqueBatch,
    UniqueGroup,
)
from hostdev.pipeline.context import Context
from hostdev.pipeline.forwarding import find_forwarded
from hostdev.pipeline.keys import Assigned, assign_on_ranks
from hostdev.pipeline.results import PlannedBatch
from hostdev.pipeline.scheduling.in_flight import Conflicts, InFlight, SharedRows, Unfinished


def read(context: Context, source: Iterator[Request], number: int) -> ReadBatch | None:
    """Return the next batch, or None after the last."""
    context.before_stage("read", number)
    with context.timeline.span("read", number, flow="s") as span:
        request = next(source, None)
        span["rows"] = request.rows if request is not None else 0
    return None if request is None else ReadBatch(number, request)


def deduplicate(
    context: Context, batch: ReadBatch, position: int, update: bool, *, is_first: bool = False
) -> UniqueBatch:
    """Find the unique ids of each group, in order of first occurrence over the group's features.

    For a table by key, these are the rows of the batch's keys. With other ranks, exchange the ids, and return the ids
    of this rank's rows that any rank requests.

    Args:
        context: The pipeline's context.
        batch: The batch that was read.
        position: The batch's position in its loop, from 1.
        update: Whether the pass updates the tables.
        is_first: Whether the batch is the first one of its pass.
    """
    number, request = batch
    context.before_stage("unique", number)
    with context.timeline.span("unique", number) as span:
        if request.check is not None:
            request.check()
        groups = [UniqueGroup(*found) for found in context.unique(request.ids)]
        for n, table in context.keyed.items() if not context.exchanges else ():
            keys, inverse, *_ = groups[n]
            mine = table.assign(keys, inverse, request.ids[n], update=update, is_first=is_first)
            groups[n] = UniqueGroup(mine.rows, inverse, None, mine.plans, mine.guests)
        span["rows"] = sum(len(group.ids) for group in groups)
    if context.exchanges:
        groups = _exchange(context, batch, groups, update=update, is_first=is_first)
    return UniqueBatch(number, position, request, groups)


def _exchange(
    context: Context, batch: ReadBatch, groups: Sequence[UniqueGroup], *, update: bool, is_first: bool
) -> list[UniqueGroup]:
    """Send the unique ids to the ranks with the rows; keys are first sent to their owners, which find the rows."""
    exchange, (number, request) = context.exchanges[update], batch
    nothing = Assigned(None, False, None)
    requested: list[Any] = [group.ids for group in groups]
    assigned: dict[int, Assigned] = {}
    keyed = context.keyed
    with context.timeline.span("exchange ids", number):
        if exchange.keys is not None:
            found = assign_on_ranks(
                exchange.keys,
                list(keyed.values()),
                [(groups[n].ids, groups[n].inverse) for n in keyed],
                [request.ids[n] for n in keyed],
                update=update,
                is_first=is_first,
            )
            assigned = dict(zip(keyed, found, strict=True))
            for n, mine in assigned.items():
                requested[n] = mine.rows
        exchanged = exchange.ids(requested)
    return [
        UniqueGroup(ids, renumber(group.inverse, asked.places), asked, *assigned.get(n, nothing)[1:])
        for n, (group, (ids, asked)) in enumerate(zip(groups, exchanged, strict=True))
    ]


def announce(context: Context, batches: Sequence[UniqueBatch], announced: list[int]) -> None:
    """Announce batches to each cache, as far ahead as its window reaches.

    Args:
        context: The pipeline's context.
        batches: The batches that are not planned yet.
        announced: For each group, how many of `batches` have been announced; incremented here.
    """
    run_tasks([(_announce, n, n + 1, (context, batches, announced)) for n in context.cached])


def _announce(number: int, _: int, context: Context, batches: Sequence[UniqueBatch], announced: list[int]) -> None:
    cache = context.groups[number].cache
    while announced[number] < len(batches) and len(cache.planner) <= cache.window:
        group = batches[announced[number]].groups[number]
        cache.announce(group.ids, group.inverse if group.asked is None else group.asked.inverse)
        announced[number] += 1


def plan(
    context: Context, batch: UniqueBatch, update: bool, get_unfinished: Callable[[], Unfinished] | None
) -> PlannedBatch:
    """Return the batch with the caches' plans, and with the conflicting rows among the rows that it reads on the host.

    Args:
        context: The pipeline's context.
        batch: The batch with its unique ids.
        update: Whether the pass updates the tables; otherwise nothing is planned.
        get_unfinished: Called without arguments; returns the unfinished batches. None if all earlier batches are
            finished.
    """
    number = batch.number
    groups = [PlannedGroup(one.ids, one.asked, None, None, one.plans_keys, one.guests) for one in batch.groups]
    inverses = [group.inverse for group in batch.groups]
    conflicts = None
    if context.on_host and update and (get_unfinished is not None or context.cached):
        context.before_stage("plan", number)
        with context.timeline.span("plan", number) as span:
            run_tasks([(_plan, n, n + 1, (context, groups, inverses)) for n in context.cached])
            span["rows"] = sum(len(group.ids) for group in groups)
            reads, writes = _concatenate(context, groups)
            if get_unfinished is not None:
                conflicts = _find_conflicts(context, groups, reads, get_unfinished())
                span["conflicts"] = len(conflicts.rows)
    else:
        reads, writes = _concatenate(context, groups)
    return PlannedBatch(
        number=number,
        position=batch.position,
        request=batch.request,
        groups=groups,
        inverses=inverses,
        reads=reads,
        writes=writes,
        conflicts=conflicts,
    )


def _plan(number: int, _: int, context: Context, groups: list[PlannedGroup], inverses: list[Positions]) -> None:
    group, cache = groups[number], context.groups[number].cache
    made = cache.plan()
    assert made.ids is group.ids
    places, asked = made.places, group.asked
    if asked is None:
        inverses[number] = cache.planner.renumber(inverses[number], made, places)
    else:
        asked = asked._replace(inverse=cache.planner.renumber(asked.inverse, made, places))
    groups[number] = group._replace(asked=asked, plan=made, places=places)


def _concatenate(context: Context, groups: list[PlannedGroup]) -> tuple[ConcatenatedIds, ConcatenatedIds]:
    """Return the rows of all groups that the batch reads and writes on the host."""
    pairs = list(zip(context.groups, groups, strict=True))
    reads = context.offsets.concatenate([mine.reads if group.on_host else mine.ids[:0] for group, mine in pairs])
    if not context.cached:
        return reads, reads
    return reads, context.offsets.concatenate([mine.writes if group.on_host else mine.ids[:0] for group, mine in pairs])


def _find_conflicts(
    context: Context, groups: list[PlannedGroup], reads: ConcatenatedIds, unfinished: Unfinished
) -> Conflicts:
    """Find a batch's rows that an unfinished batch will write, and make the batch the last writer of its rows.

    Args:
        context: The pipeline's context.
        groups: The batch's groups.
        reads: The host rows that the batch reads.
        unfinished: The batch, and the unfinished batches for which it may have to wait.
    """
    batch, before, pin = unfinished.batch, unfinished.before, unfinished.pin
    number, hooks, last_writers = batch.number, context.hooks, context.last_writers
    written = reads.ids  # the rows whose last writer the batch becomes
    if context.cached:
        evicted = [group.plan.evicted if group.plan is not None else group.ids[:0] for group in groups]
        written = np.concatenate([written, context.offsets.concatenate(evicted).ids])
    newest = number - 1 - hooks.staleness
    late = claim(written, last_writers, number, unfinished.updated + 1, newest).first(len(reads))
    for group in hooks.ignore_hazards:
        kept = (late.rows < reads.starts[group]) | (late.rows >= reads.starts[group + 1])
        late = Late(late.rows[kept], late.owner[kept])
    is_of_before = late.owner == number - 1
    of_before, of_older = late.rows[is_of_before], late.rows[~is_of_before]
    subsets = []
    if len(of_before):
        subsets.append((RowSubset.select(reads.ids, of_before), number - 1))
    if len(of_older):
        subsets.append((RowSubset.select(reads.ids, of_older), int(late.owner[~is_of_before].max())))
    if before is None or not len(of_before):
        return Conflicts(late.rows, subsets, None, None)
    assert before.writes is not None
    conflicting = subsets[0][0]
    if pin is not None and pin():
        forwarded = find_forwarded(before.writes, conflicting, before.forwarded)
        return Conflicts(late.rows, subsets[1:], None, forwarded)
    if before.updating:
        return Conflicts(late.rows, subsets, None, None)
    theirs = before.writes.ids
    both = intersect(theirs, conflicting.ids, last_writers, number)
    rest = RowSubset.select(theirs, others(len(theirs), both))
    shared = SharedRows(RowSubset.select(theirs, both), rest, batch, conflicting)
    return Conflicts(late.rows, subsets, shared, None)


def record_writer(batch: InFlight, last_writers: Claims) -> None:
    """Make a batch, which was planned after all earlier updates and has no conflicts, the last writer of its rows."""
    assert batch.writes is not None
    claim(batch.writes.ids, last_writers, batch.number, batch.number, batch.number - 1)
    batch.claimed = True
