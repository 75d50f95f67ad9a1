"""Read the next request, and deduplicate: find each group's unique ids, and send them to their ranks and caches.

A request's ids are flat and have no padding. The unique ids go to the ranks that have the rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hostdev.cache.plan import renumber
from hostdev.kernels.pool import run_tasks
from hostdev.pipeline.batch_ids import ReadBatch, Request, UniqueBatch, UniqueGroup
from hostdev.pipeline.context import Context
from hostdev.pipeline.keys import Assigned, assign_on_ranks


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
    """Send the unique ids to the ranks with the rows; keys go to their owners first, which know their rows."""
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
