"""Plan: decide which rows enter and leave the caches, and find the rows that an unfinished batch will write."""

from collections.abc import Callable

import numpy as np

from hostdev.kernels.arrays import Positions
from hostdev.kernels.pool import run_tasks
from hostdev.pipeline.batch_ids import ConcatenatedIds, PlannedGroup, UniqueBatch
from hostdev.pipeline.context import Context
from hostdev.pipeline.hazards import find_conflicts
from hostdev.pipeline.results import PlannedBatch
from hostdev.pipeline.scheduling.in_flight import Conflicts, Unfinished


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
    places, asked, renumber = made.places, group.asked, cache.planner.renumber
    if asked is None:
        inverses[number] = renumber(inverses[number], made, places)
    else:
        asked = asked._replace(inverse=renumber(asked.inverse, made, places))
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
    written = reads.ids
    if context.cached:
        evicted = [group.plan.evicted if group.plan is not None else group.ids[:0] for group in groups]
        written = np.concatenate([written, context.offsets.concatenate(evicted).ids])
    hooks = context.hooks
    return find_conflicts(
        unfinished, reads, written, context.last_writers, staleness=hooks.staleness, ignored=hooks.ignore_hazards
    )
