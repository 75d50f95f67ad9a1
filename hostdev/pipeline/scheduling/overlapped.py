"""The overlapped pass: stages of neighbouring batches run concurrently, with results bit-identical to the serial pass.

The in-flight rule: a batch sees a row only after every earlier batch's update of it. Planning a batch finds its rows
that an unfinished batch will write. Rows shared with the previous batch are updated first, as soon as that batch's
gradients arrive, and then looked up. Rows shared with an older batch are looked up after that batch's update. All other
rows are looked up immediately. Only the updater writes the tables, in the order of the batches, so no row is locked.

Threads: a fetcher (deduplicate, plan, look up, send), the caller's thread (read and step) and an updater; also a
reader, if batches may be read in the background. They share their state under one condition variable. A batch carries
its own results. An exception is passed on in place of the batch that caused it.

On a CPU, a step may run alone if this is faster (`turns`): the fetcher then works only while the caller waits for a
batch, after the previous batch's update, so that no row is in conflict.

Reading a batch calls the user's code. If batches are read in the caller's thread, this code never runs at the same time
as the loop's body, so both may use the same objects. How far reading runs ahead then depends only on the depth and the
caches' windows, not on timing.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from hostdev.core.signals import uninterruptible
from hostdev.kernels.pool import urgent
from hostdev.pipeline import remote
from hostdev.pipeline.batch_ids import ReadBatch, Request, UniqueBatch
from hostdev.pipeline.context import Context
from hostdev.pipeline.forwarding import ForwardedRows
from hostdev.pipeline.hazards import record_writer
from hostdev.pipeline.results import Gradients, PlannedBatch, SentBatch, StepBatch, SteppedBatch
from hostdev.pipeline.row_ids import Ids
from hostdev.pipeline.scheduling.in_flight import InFlight, Unfinished
from hostdev.pipeline.scheduling.passes import PassOptions, look_ahead, raise_held
from hostdev.pipeline.scheduling.queues import End, PipelineQueues, Stopped
from hostdev.pipeline.stages.look_up import (
    look_up,
    look_up_conflicting,
    read_forwarded,
    reload,
    take_forwarded,
    take_memory,
)
from hostdev.pipeline.stages.plan import plan
from hostdev.pipeline.stages.read import read
from hostdev.pipeline.stages.send import send
from hostdev.pipeline.stages.step import begin_step, end_step
from hostdev.pipeline.stages.update import await_step, receive_sums, release, unpin, update, update_first
from hostdev.pipeline.tiers import PassPins

_POLL_SECONDS = 0.2  # seconds between checks that other ranks still run, while a thread waits for them
LONGEST_JOIN = 0.8  # seconds to wait for a thread that may be inside the user's code or wait for a failed rank


class Workers:
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


class OverlappedPass:
    """Runs at most depth + 2 neighbouring batches concurrently; batches beyond these are only read and deduplicated.

    Args:
        context: The pipeline's context.
        source: The requests.
        options: The pass's options.
        are_ranks_gone: Called without arguments; returns whether other ranks will no longer answer.
    """

    def __init__(
        self, context: Context, source: Iterable[Request], options: PassOptions, are_ranks_gone: Callable[[], bool]
    ) -> None:
        self._context, self._update, self._timeline = context, options.update, context.timeline
        self._are_ranks_gone = are_ranks_gone
        self._window, self._ahead = options.window if options.update else 0, options.ahead_of_step
        self._queues = PipelineQueues(options.number)
        self._caller = threading.get_ident()
        self._given: int | None = None  # number of the batch that the caller has
        self._closed = False
        self._before_first, self._reads_behind = options.number, options.background
        self._taken = 0  # number of batches that the caller has asked for
        self._source: Iterator[Request] | None = None if options.background else iter(source)  # None after its end
        self._workers = Workers(context, self._queues, source if options.background else None, options)

    @property
    def number(self) -> int:
        """The number of the last batch that was read."""
        return self._workers.number

    def take(self) -> StepBatch | None:
        """See `Pass`."""
        queues = self._queues
        if self._given is not None:  # the caller asks for the next batch, and no longer holds this one
            queues.in_flight.release(self._given)
            self._given = None
        self._taken += 1
        if queues.alone:  # one after the other, as at depth 0
            with self._timeline.stall("step"):
                queues.wait(lambda: queues.update_error or queues.in_flight.updated >= queues.finished)
        self._read_ahead()
        with self._timeline.stall("step"):
            item = queues.take_fetched() or End(None)
        if isinstance(item, SentBatch):
            in_flight = queues.in_flight.by_number[item.number]
            self._await_rows(in_flight)
        self._raise_update_error()
        if isinstance(item, End):
            held = [item.error]
            del item
            self._join_updater()
            self._raise_update_error()
            raise_held(held)
            return None
        batch = begin_step(self._context, item, in_flight, self._update)
        if self._context.on_host and self._context.staging.copies:
            queues.in_flight.gather(item.number, self._context.staging.mark())
        self._given = item.number
        if self._update:
            turns = self._context.turns
            turns.begin_step()
            queues.alone = turns.alone
        return batch

    def _read_ahead(self) -> None:
        """Read in the caller's thread: at first only what the first step needs, then as far ahead as allowed.

        The first step needs its own batch and the batches of the caches' windows.
        """
        most = self._taken + self._window + min(self._ahead, self._taken - 1)
        while self._source is not None and self.number - self._before_first < most:
            if not self._workers.read_here(self._source):
                self._source = None

    def _await_rows(self, batch: InFlight) -> None:
        """Wait until all rows of a batch are sent, and look up its conflicting rows meanwhile."""
        queues = self._queues
        while True:
            with self._timeline.stall("step"):
                queues.wait(lambda: self._may_step(batch) or queues.in_flight.find_ready() is batch)
            if self._may_step(batch):
                return
            with urgent():  # the device is idle meanwhile
                self._workers.deliver(batch)

    def _may_step(self, batch: InFlight) -> bool:
        return not batch.missing or self._queues.update_error is not None

    def finish(self, batch: StepBatch, gradients: Gradients | None) -> None:
        """See `Pass`."""
        held = [end_step(self._context, batch, gradients)]
        if self._update:
            self._queues.finished = batch.number
            self._queues.put(self._queues.stepped, held)
            return
        await_step(self._context, held[0])
        release(held[0])
        unpin(held[0])
        self._queues.in_flight.release(batch.number)

    def drain(self) -> None:
        """See `Pass`."""
        queues = self._queues
        with self._timeline.stall("step"):
            queues.wait(lambda: queues.update_error or queues.in_flight.updated >= queues.finished)
        self._raise_update_error()

    def reload(self, table: Any, ids: Ids | None) -> None:
        """See `Pass`."""
        queues = self._queues
        if threading.get_ident() != self._caller:
            return
        with queues.looking_up_again():  # lookups after this see the written rows
            with queues.changed:
                batches = list(queues.in_flight.by_number.values())
            for batch in batches:
                if batch.rows is not None:
                    reload(self._context, batch.rows, table, ids, in_step=batch.number == self._given)

    def is_own(self, thread: threading.Thread) -> bool:
        """See `Pass`."""
        return thread in self._workers.threads

    def _raise_update_error(self) -> None:
        """Raise the updater's error, if any, and drop it, since it keeps frames alive. The pass must then be closed."""
        held, self._queues.update_error = [self._queues.update_error], None
        raise_held(held)

    def _join_updater(self) -> None:
        self._queues.put(self._queues.stepped, [End(None)])
        with self._timeline.stall("step"):
            self._workers.threads[-1].join()

    def close(self, *, failed: bool = False) -> None:
        """See `Pass`."""
        if self._closed:
            return
        self._closed = True
        queues, threads = self._queues, self._workers.threads
        queues.put(queues.stepped, [End(None)])  # the updater ends after the stepped batches
        together = bool(self._context.exchanges)
        if together and not failed and queues.update_error is None:  # each rank finishes what others have begun
            failed = not self._joined(threads[-1:])
            if self._given is not None:
                queues.in_flight.release(self._given)
            queues.close()
            if not self._reads_behind:
                queues.end_reading()
            failed = failed or not self._joined(threads[:-1])
        queues.stop()
        self._source = None

        def join() -> None:
            for thread in threads[self._reads_behind :]:
                thread.join()

        try:
            if together and failed:  # a thread may wait for a rank that has failed
                for thread in threads[self._reads_behind :]:
                    thread.join(LONGEST_JOIN)
            else:
                uninterruptible(join)  # the caller of `close` will write the same memory as these threads
            if self._reads_behind:
                threads[0].join(LONGEST_JOIN)
        finally:  # an interrupt is raised once all have ended
            queues.clear()
            self._workers.pins.close()
            if self._update and self._context.forwarding is not None:
                self._context.forwarding.clear()
        if not failed:
            self._raise_update_error()
        queues.update_error = None

    def _joined(self, threads: list[threading.Thread]) -> bool:
        """Wait for threads that exchange rows; return whether they have ended and the other ranks still run."""

        def wait() -> None:
            for thread in threads:
                while thread.is_alive() and not self._are_ranks_gone():
                    thread.join(_POLL_SECONDS)

        uninterruptible(wait)
        return not any(thread.is_alive() for thread in threads)
