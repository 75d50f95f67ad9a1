"""The threads of an overlapped pass; see `overlapped` for the order in which they work on batches."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from hostdev.pipeline.batch_ids import ReadBatch, Request, RowSubset, UniqueBatch
from hostdev.pipeline.context import Context
from hostdev.pipeline.hazards import record_writer
from hostdev.pipeline.path import End, PassOptions, Path, Stopped, Waits
from hostdev.pipeline.results import PlannedBatch, SentBatch
from hostdev.pipeline.scheduling.in_flight import Conflicts, InFlight, SharedRows, Unfinished
from hostdev.pipeline.scheduling.passes import PipelineQueues
from hostdev.pipeline.stages.deduplicate import read
from hostdev.pipeline.stages.look_up import look_up_conflicting
from hostdev.pipeline.stages.update import await_step
from hostdev.pipeline.tiers import PassPins


class _QueueWaits(Waits):
    """What the batches of an overlapped pass wait for, under the condition of the pass's queues."""

    overlap = True

    def __init__(self, context: Context, queues: PipelineQueues, *, update: bool) -> None:
        self._context, self._queues, self._updates = context, queues, update
        self._in_flight = queues.in_flight

    def find_unfinished(self, batch: InFlight) -> Callable[[], Unfinished] | None:
        context, in_flights = self._context, self._in_flight
        if self._queues.alone and self._updates and in_flights.updated == batch.number - 1 and not context.cached:
            return None  # the next batch, too, is most likely planned after this batch's update
        return partial(in_flights.get_unfinished, batch.number, forwards=context.forwarding is not None)

    def pin(self, pins: PassPins, batch: PlannedBatch) -> None:
        with self._context.timeline.stall("lookup"):
            while True:
                before = pins.released
                if pins.try_pin(batch.number, batch.groups):
                    return
                self._queues.wait(partial(pins.has_released, before))

    def looking_up(self) -> AbstractContextManager[Any]:
        return self._queues.looking_up()

    def is_updated(self, number: int) -> bool:
        return self._in_flight.updated >= number

    def await_update(self, number: int) -> None:
        with self._context.timeline.stall("lookup"):
            self._queues.wait(lambda: self._in_flight.updated >= number)

    def await_room(self, number: int) -> None:
        """Wait until the step has taken the previous batch's rows: only one batch's rows may wait on the device."""
        staging, in_flights = self._context.staging, self._in_flight
        if not staging.copies:
            return
        with self._context.timeline.stall("send"):
            self._queues.wait(lambda: in_flights.gathered[0] >= number - 1)
            staging.await_event(in_flights.gathered[1])

    def request(self, batch: InFlight, conflicts: Conflicts) -> list[RowSubset]:
        return self._in_flight.request(batch, conflicts)

    def count_fetched(self, batch: InFlight) -> None:
        self._in_flight.count_fetched(batch)

    def unpin(self, batch: InFlight) -> None:
        self._in_flight.unpin(batch)

    def begin_update(self, batch: InFlight) -> SharedRows | None:
        return self._queues.begin_update(batch)

    def end_first_update(self, shared: SharedRows) -> None:
        self._in_flight.end_first_update(shared)

    def end_update(self, batch: InFlight) -> None:
        self._in_flight.end_update(batch)


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
        self.path = Path(context, options, _QueueWaits(context, queues, update=options.update))
        batches = self.path.look_ahead(self._take_read)
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
        in_flights = self._queues.in_flight
        before = in_flights.by_number.get(batch.number - 1)
        if before is not None and not before.claimed:
            record_writer(before, self._context.last_writers)
        return self.path.fetch(batch, in_flights.by_number[batch.number], before)

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
            self.path.update(item)
            number = item.number
            del item
            in_flights.release(number)
        elif (batch := in_flights.find_ready()) is not None:
            self.deliver(batch)
        return True
