"""The threads of an overlapped pass; see `overlapped` for the order in which they work on batches."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from hostdev.pipeline import remote
from hostdev.pipeline.batch_ids import ReadBatch, Request, UniqueBatch
from hostdev.pipeline.context import Context
from hostdev.pipeline.forwarding import ForwardedRows
from hostdev.pipeline.hazards import record_writer
from hostdev.pipeline.results import PlannedBatch, SentBatch, SteppedBatch
from hostdev.pipeline.scheduling.in_flight import InFlight, Unfinished
from hostdev.pipeline.scheduling.passes import End, PassOptions, PipelineQueues, Stopped, look_ahead
from hostdev.pipeline.stages.deduplicate import read
from hostdev.pipeline.stages.look_up import (
    look_up,
    look_up_conflicting,
    read_forwarded,
    send,
    take_forwarded,
    take_memory,
)
from hostdev.pipeline.stages.plan import plan
from hostdev.pipeline.stages.update import await_step, receive_sums, update, update_first
from hostdev.pipeline.tiers import PassPins


class PassWorkers:
    """The threads of an overlapped pass, and the work of each.

    Args:
        context: The pipeline's context.
        queues: The queues between the threads.
        source: The requests, if a reader thread reads them.
        options: The pass's options.
    """

    def __init__(
        self, context: Context, queues: PipelineQueues, source: Iterable[Request] | None, options: PassOptions
    ) -> None:
        self._context, self._queues, self._update = context, queues, options.update
        self._timeline = context.timeline
        self._most = options.depth + 2  # maximum number of batches that are looked up but not updated
        self._most_read = options.depth + 2 + (options.window if options.update else 0)
        self.number = options.number  # number of the last batch that was read
        self.pins = PassPins(context.tiers, options.update)
        batches = look_ahead(context, self._take_read, options, self.pins)
        work: list[Any] = [
            ("fetcher", self._fetch_next, queues.fetched, batches),
            ("updater", self._update_next, None),
        ]
        if source is not None:
            work.insert(0, ("reader", self._read_next, queues.read, iter(source)))
        self.threads = [
            threading.Thread(target=self._serve, args=(stage, out, *arguments), name=f"hostdev-{name}", daemon=True)
            for name, stage, out, *arguments in work
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, stage: Any, out: deque[Any] | None, *arguments: Any) -> None:
        """Repeat a thread's stage until the batches end; an exception becomes the last item of `out`."""
        self._context.staging.enter_thread()
        try:
            self._repeat(stage, out, arguments)
        finally:
            if out is self._queues.read:
                self._queues.end_reading()

    def _repeat(self, stage: Any, out: deque[Any] | None, arguments: Any) -> None:
        try:
            while stage(*arguments):
                pass
        except Stopped:
            return
        except BaseException as error:
            if out is not None:
                self._queues.put(out, [End(error)])
                return
            self._queues.fail_update(error)

    def read_here(self, source: Iterator[Request]) -> bool:
        """Read a batch in the caller's thread; return False after the last."""
        try:
            held: list[Any] = [read(self._context, source, self.number + 1) or End(None)]
        except Exception as error:  # raised where its batch would have arrived
            held = [End(error)]
        more = isinstance(held[0], ReadBatch)
        if more:
            self.number += 1
            self._queues.in_flight.add(self.number)
        self._queues.put(self._queues.read, held)
        return more

    def _read_next(self, source: Iterator[Request]) -> bool:
        queues = self._queues
        with self._timeline.stall("read"):
            queues.wait(lambda: len(queues.in_flight.by_number) < self._most_read)
        held: list[Any] = [read(self._context, source, self.number + 1) or End(None)]
        more = isinstance(held[0], ReadBatch)
        with queues.changed:
            if queues.stopping:  # by now, the next pass may have begun
                raise Stopped
            if more:
                self.number += 1
                queues.in_flight.add(self.number)
        queues.put(queues.read, held)
        return more

    def _take_read(self) -> ReadBatch | End:
        with self._timeline.stall("unique"):
            item: ReadBatch | End = self._queues.take(self._queues.read)
            self._queues.await_turn(lambda: not self._queues.fetched)
        return item

    def _fetch_next(self, batches: Iterator[UniqueBatch | End]) -> bool:
        queues = self._queues
        held: list[Any] = [next(batches)]
        if more := isinstance(held[0], UniqueBatch):
            number = held[0].number
            with self._timeline.stall("lookup"):
                queues.wait(lambda: number - next(iter(queues.in_flight.by_number)) < self._most)
                queues.await_turn(lambda: not self._update or next(iter(queues.in_flight.by_number)) == number)
            held.append(self._fetch(held.pop()))
        queues.put(queues.fetched, held)
        return more

    def _fetch(self, batch: UniqueBatch) -> SentBatch:
        """Plan a batch; look up and send its rows, except conflicting rows that still wait for an update."""
        context, queues, update = self._context, self._queues, self._update
        in_flights, number = queues.in_flight, batch.number
        in_flight, before = in_flights.by_number[number], in_flights.by_number.get(number - 1)
        if before is not None and not before.claimed:
            record_writer(before, context.last_writers)
        forwards = context.forwarding is not None
        unfinished: Callable[[], Unfinished] | None = partial(in_flights.get_unfinished, number, forwards=forwards)
        if queues.alone and update and in_flights.updated == number - 1 and not context.cached:
            unfinished = None  # the next batch, too, is most likely planned after this batch's update
        try:
            planned = plan(context, batch, update, unfinished)
            in_flight.writes, in_flight.claimed = planned.writes, unfinished is not None
            if self.pins:
                self._pin(planned, in_flight)
            return self._look_up(planned, in_flight, before)
        finally:
            if before is not None:
                in_flights.unpin(before)

    def _pin(self, batch: PlannedBatch, in_flight: InFlight) -> None:
        """Wait until the batch's rows of tables on disk are in memory."""
        pins = self.pins
        with self._timeline.stall("lookup"):
            while True:
                before = pins.released
                if pins.try_pin(batch.number, batch.groups):
                    break
                self._queues.wait(partial(pins.has_released, before))
            in_flight.pins = pins.take(batch.number)
            in_flight.pins.await_rows()

    def _look_up(self, batch: PlannedBatch, in_flight: InFlight, before: InFlight | None) -> SentBatch:
        """Look up and send a planned batch's rows; `before` is the previous batch, if it is unfinished."""
        context, queues, update = self._context, self._queues, self._update
        in_flights, number, conflicts = queues.in_flight, batch.number, batch.conflicts
        if conflicts is not None:
            in_flight.forwarded = conflicts.forwarded
            in_flight.awaits = max((writer for _, writer in conflicts.subsets), default=0)
        memory = take_memory(context, batch)
        forwarded = take_forwarded(context, batch, memory)
        read_now = bool(forwarded) and before is not None and in_flights.updated >= before.awaits
        with queues.looking_up() if context.on_host else nullcontext():
            if read_now and before is not None:  # first, because the update of the previous batch waits for it
                self._read_forwarded(number, forwarded, before)
            looked_up = look_up(context, batch, memory, forwarded)
            in_flight.rows = looked_up.rows
        if context.on_host:
            if context.exchanges:
                early = remote.exchange_early(context, looked_up, conflicts, before, update=update, overlapped=True)
                looked_up = looked_up._replace(early=early)
            in_flight.missing = 1  # the subset of rows that is sent below
            self._await_room(number)
        if forwarded and not read_now and before is not None:
            with self._timeline.stall("lookup"):
                queues.wait(lambda: in_flights.updated >= before.awaits)
            with queues.looking_up():
                self._read_forwarded(number, forwarded, before)
        with queues.looking_up():
            sent = send(context, looked_up)
        for rows in in_flights.request(in_flight, conflicts) if conflicts is not None else ():
            span = self._timeline.span("lookup", number, rows=len(rows), bytes=len(rows) * context.row_bytes)
            with span, queues.looking_up():
                look_up_conflicting(context, number, looked_up.rows, rows)
        if context.on_host:
            in_flights.count_fetched(in_flight)
        return sent

    def _read_forwarded(self, number: int, rows: list[ForwardedRows | None], before: InFlight) -> None:
        read_forwarded(self._context, number, rows)
        self._queues.in_flight.unpin(before)

    def _await_room(self, number: int) -> None:
        """Wait until the step has taken the previous batch's rows: only one batch's rows may wait on the device."""
        queues, staging = self._queues, self._context.staging
        if not staging.copies:
            return
        with self._timeline.stall("send"):
            queues.wait(lambda: queues.in_flight.gathered[0] >= number - 1)
            staging.await_event(queues.in_flight.gathered[1])

    def deliver(self, batch: InFlight) -> None:
        """Look up and send conflicting rows of a batch; the updater or the caller calls this, whichever is idle."""
        in_flights = self._queues.in_flight
        subset = in_flights.begin_delivery(batch)
        if subset is None:
            return
        assert batch.rows is not None
        try:
            with self._timeline.span("lookup late", batch.number) as span:
                span["rows"], span["bytes"] = len(subset), len(subset) * self._context.row_bytes
                with self._queues.looking_up():
                    look_up_conflicting(self._context, batch.number, batch.rows, subset)
            in_flights.count_fetched(batch)
        finally:
            in_flights.end_delivery()

    def _update_next(self) -> bool:
        queues = self._queues
        in_flights = queues.in_flight
        with self._timeline.stall("update"):
            queues.wait(lambda: queues.stepped or in_flights.find_ready(), finish=True)
            item = queues.stepped.popleft() if queues.stepped else None
            if isinstance(item, End):
                return False
            if item is not None:
                await_step(self._context, item)
        if item is not None:
            self._update_batch(item)
            number = item.number
            del item
            in_flights.release(number)
        elif (batch := in_flights.find_ready()) is not None:
            self.deliver(batch)
        return True

    def _update_batch(self, batch: SteppedBatch) -> None:
        """Update a batch's host rows: first the rows that the next batch waits for, then the others."""
        context, in_flights, in_flight = self._context, self._queues.in_flight, batch.in_flight
        context.before_stage("update", batch.number)
        receive_sums(context, batch)
        shared = self._queues.begin_update(in_flight)
        if shared is not None:
            update_first(context, batch, shared)
            in_flights.end_first_update(shared)
        update(context, batch, shared)
        in_flights.end_update(in_flight)
