"""The path of a pass's batches: the order of the stages, written once for passes inline and on threads.

`look_ahead` and `fetch` come before the caller's step, `update` after it. `Waits` says what a batch waits for on its
way: inline, each batch is finished before the next one begins, and waits for nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from hostdev.pipeline import remote
from hostdev.pipeline.batch_ids import ReadBatch, RowSubset, UniqueBatch
from hostdev.pipeline.context import Context
from hostdev.pipeline.forwarding import ForwardedRows
from hostdev.pipeline.results import PlannedBatch, SentBatch, SteppedBatch
from hostdev.pipeline.scheduling.in_flight import Conflicts, InFlight, SharedRows, Unfinished
from hostdev.pipeline.stages.look_up import (
    look_up,
    look_up_conflicting,
    read_forwarded,
    send,
    take_forwarded,
    take_memory,
)
from hostdev.pipeline.stages.plan import announce, deduplicate, plan
from hostdev.pipeline.stages.update import await_step, receive_sums, release, unpin, update, update_first
from hostdev.pipeline.tiers import PassPins

_NOTHING: AbstractContextManager[Any] = nullcontext()


class End(NamedTuple):
    """The last item of a queue, with the error that ended the stage, if any."""

    error: BaseException | None


def raise_held(held: list[BaseException | None]) -> None:
    """Remove the error, if any, from a list and raise it; in the list, it would form a reference cycle."""
    if held[0] is not None:
        raise held.pop()  # type: ignore[misc]


class Stopped(Exception):  # noqa: N818  (not an error: a thread is asked to end)
    """Raised in a waiting thread when the pass is over."""


class PassOptions(NamedTuple):
    """Options of a pass: where it begins, and how far it runs ahead."""

    depth: int  # the pipeline's depth
    window: int  # number of batches that the caches know in advance, in addition to those that are looked up ahead
    number: int  # number of the batch before the first
    position: int  # position of that batch in the caller's loop
    update: bool  # whether steps update the tables
    background: bool  # whether a background thread reads the batches, instead of the caller's thread
    ahead_of_step: int  # number of batches looked up ahead, at most `depth`, if the caller's thread reads them


class Waits:
    """What batches wait for. In this base class, they wait for nothing: a batch is finished before the next begins.

    Attributes:
        overlap: Whether a batch may be planned before earlier ones are finished.
    """

    overlap = False

    def find_unfinished(self, batch: InFlight) -> Callable[[], Unfinished] | None:
        """Return a function that returns the batches for which `batch` may have to wait; None if there are none."""
        return None

    def pin(self, pins: PassPins, batch: PlannedBatch) -> None:
        """Pin the batch's rows of tables on disk in memory, and wait until there is room for them."""
        pins.try_pin(batch.number, batch.groups)

    def looking_up(self) -> AbstractContextManager[Any]:
        """Return a context in which a thread may look up or send rows."""
        return _NOTHING

    def is_updated(self, number: int) -> bool:
        """Return whether the update of batch `number` is finished."""
        return True

    def await_update(self, number: int) -> None:
        """Wait until the update of batch `number` is finished."""

    def await_room(self, number: int) -> None:
        """Wait until there is room on the device for the rows of batch `number`."""

    def request(self, batch: InFlight, conflicts: Conflicts) -> list[RowSubset]:
        """Ask for the batch's conflicting rows; return the subsets that are updated already."""
        return []

    def count_fetched(self, batch: InFlight) -> None:
        """Record that all rows that need not wait for an update have been sent."""

    def unpin(self, batch: InFlight) -> None:
        """Allow the update of a batch, because its rows have been read for forwarding."""

    def begin_update(self, batch: InFlight) -> SharedRows | None:
        """Wait until a batch may be updated; return the rows for which the next batch waits."""
        return None

    def end_first_update(self, shared: SharedRows) -> None:
        """Record that the rows for which the next batch waits are updated."""

    def end_update(self, batch: InFlight) -> None:
        """Record that the batch's update is finished."""


class Path:
    """The stages of a pass's batches, in their order.

    Args:
        context: The pipeline's context.
        options: The pass's options.
        waits: What batches wait for.
    """

    def __init__(self, context: Context, options: PassOptions, waits: Waits) -> None:
        self._context, self._options, self._waits, self._update = context, options, waits, options.update
        self.pins = PassPins(context.tiers, options.update)

    def look_ahead(self, take: Callable[[], ReadBatch | End]) -> Iterator[UniqueBatch | End]:
        """Yield deduplicated batches in order, and then an `End`. Batches are announced to the caches a window ahead.

        Args:
            take: Called without arguments; returns the next batch that was read, or an `End`.
        """
        context, options, update = self._context, self._options, self._update
        position, window = options.position, options.window if update else 0
        waiting: list[UniqueBatch] = []
        announced = [0] * len(context.groups)
        ends: list[End] = []
        while True:
            while not ends and len(waiting) <= window:
                try:
                    item = take()
                    if isinstance(item, ReadBatch):
                        position += 1
                        is_first = item.number == options.number + 1
                        waiting.append(deduplicate(context, item, position, update, is_first=is_first))
                        if update:
                            announce(context, waiting, announced)
                    else:
                        if item.error is None and context.exchanges:
                            context.exchanges[update].end()
                        ends.append(item)
                    del item  # otherwise a finished batch would live until the next one is read
                except Stopped:
                    raise
                except Exception as error:  # batches that were read earlier come first
                    ends.append(End(error))
            if waiting:
                if update:
                    announce(context, waiting, announced)
                announced = [max(0, count - 1) for count in announced]
                if context.tiers:
                    self.pins.announce(waiting)
                yield waiting.pop(0)
            else:
                yield ends.pop()  # not kept: an error holds the frames that it passed through, including this one
                return

    def fetch(self, batch: UniqueBatch, in_flight: InFlight, before: InFlight | None = None) -> SentBatch:
        """Plan a batch; look up and send its rows, except conflicting rows that still wait for an update.

        Args:
            batch: The batch with its unique ids.
            in_flight: Its shared state.
            before: The previous batch, if it is unfinished.
        """
        waits = self._waits
        try:
            find_unfinished = waits.find_unfinished(in_flight)
            planned = plan(self._context, batch, self._update, find_unfinished)
            in_flight.writes, in_flight.claimed = planned.writes, find_unfinished is not None
            if self._context.tiers:
                waits.pin(self.pins, planned)
                in_flight.pins = self.pins.take(planned.number)
                in_flight.pins.await_rows()
            return self._look_up(planned, in_flight, before)
        finally:
            if before is not None:
                waits.unpin(before)

    def _look_up(self, batch: PlannedBatch, in_flight: InFlight, before: InFlight | None) -> SentBatch:
        context, waits, number, conflicts = self._context, self._waits, batch.number, batch.conflicts
        if conflicts is not None:
            in_flight.forwarded = conflicts.forwarded
            in_flight.awaits = max((writer for _, writer in conflicts.subsets), default=0)
        memory = take_memory(context, batch)
        forwarded = take_forwarded(context, batch, memory)
        read_now = bool(forwarded) and before is not None and waits.is_updated(before.awaits)
        with waits.looking_up() if context.on_host else _NOTHING:
            if read_now and before is not None:  # first, because the update of the previous batch waits for it
                self._read_forwarded(number, forwarded, before)
            looked_up = look_up(context, batch, memory, forwarded)
            in_flight.rows = looked_up.rows
        if context.on_host:
            if context.exchanges:
                how = {"update": self._update, "overlapped": waits.overlap}
                early = remote.exchange_early(context, looked_up, conflicts, before, **how)
                looked_up = looked_up._replace(early=early)
            in_flight.missing = 1  # the subset of rows that is sent below
            waits.await_room(number)
        if forwarded and not read_now and before is not None:
            waits.await_update(before.awaits)
            with waits.looking_up():
                self._read_forwarded(number, forwarded, before)
        with waits.looking_up():
            sent = send(context, looked_up)
        for rows in waits.request(in_flight, conflicts) if conflicts is not None else ():
            span = context.timeline.span("lookup", number, rows=len(rows), bytes=len(rows) * context.row_bytes)
            with span, waits.looking_up():
                look_up_conflicting(context, number, looked_up.rows, rows)
        if context.on_host:
            waits.count_fetched(in_flight)
        return sent

    def _read_forwarded(self, number: int, rows: list[ForwardedRows | None], before: InFlight) -> None:
        read_forwarded(self._context, number, rows)
        self._waits.unpin(before)

    def update(self, batch: SteppedBatch) -> None:
        """Update a batch's host rows once its step has ended: first the rows for which the next batch waits."""
        context, waits = self._context, self._waits
        context.before_stage("update", batch.number)
        receive_sums(context, batch)
        shared = waits.begin_update(batch.in_flight)
        if shared is not None:
            update_first(context, batch, shared)
            waits.end_first_update(shared)
        update(context, batch, shared)
        waits.end_update(batch.in_flight)

    def leave(self, batch: SteppedBatch) -> None:
        """In a pass that updates nothing, release a batch's rows and memory once its step has ended."""
        await_step(self._context, batch)
        release(batch)
        unpin(batch)
