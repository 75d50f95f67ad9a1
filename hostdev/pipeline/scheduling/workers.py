"""The threads of an overlapped pass, and the queues between them; see `overlapped` for the order of their work.

The threads share all state under the queues' condition variable.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from hostdev.pipeline.batch_ids import ReadBatch, Request, RowSubset, UniqueBatch
from hostdev.pipeline.context import Context
from hostdev.pipeline.path import End, PassOptions, Path, Stopped, Waits
from hostdev.pipeline.results import PlannedBatch, SentBatch, SteppedBatch
from hostdev.pipeline.scheduling.in_flight import Conflicts, InFlight, InFlightBatches, SharedRows, Unfinished
from hostdev.pipeline.stages.look_up import look_up_conflicting
from hostdev.pipeline.stages.plan import read, record_writer
from hostdev.pipeline.stages.update import await_step
from hostdev.pipeline.tiers import PassPins

_LONGEST_PAUSE = 2.0  # seconds that a stage waits for the end of a step that runs alone


class PipelineQueues:
    """The queues between the stages, and the in-flight batches, shared by the threads of a pass.

    Args:
        updated: Number of the last batch whose update is finished.
    """

    def __init__(self, updated: int) -> None:
        self.changed = threading.Condition()
        self.in_flight = InFlightBatches(self.changed, updated)
        self.read: deque[ReadBatch | End] = deque()
        self.fetched: deque[SentBatch | End] = deque()
        self.stepped: deque[SteppedBatch | End] = deque()
        self.finished = updated  # number of the last batch that has been stepped
        self.stopping = False
        self.closing = False  # threads continue until they would have to wait, which is the same point on all ranks
        self.read_all = False  # whether the reader has ended
        self.update_error: BaseException | None = None
        self.alone = False  # whether the step runs alone: the fetcher works only while the caller waits for a batch
        self._caller_waits = False
        self._lookups = 0  # number of threads in `looking_up`
        self._looking_up_again = False  # whether the caller is in `looking_up_again`

    @contextmanager
    def looking_up(self) -> Iterator[None]:
        """A context in which a thread looks up or sends rows. Several threads may be in such a context at once.

        No thread is in it during `looking_up_again`. It is not a lock: a thread inside may yield to an urgent thread,
        which would then wait for the lock.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self._looking_up_again)
            self._lookups += 1
        try:
            yield
        finally:
            with self.changed:
                self._lookups -= 1
                if self._looking_up_again:
                    self.changed.notify_all()

    @contextmanager
    def looking_up_again(self) -> Iterator[None]:
        """A context that waits until no thread is in `looking_up`, and lets none enter it."""
        with self.changed:
            self._looking_up_again = True
            self.changed.wait_for(lambda: not self._lookups)
        try:
            yield
        finally:
            with self.changed:
                self._looking_up_again = False
                self.changed.notify_all()

    def put(self, queue: deque[Any], held: list[Any]) -> None:
        """Move the last item of `held` to a queue, so that the calling thread no longer holds the batch."""
        with self.changed:
            queue.append(held.pop())
            self.changed.notify_all()

    def take(self, queue: deque[Any]) -> Any:
        """Wait for an item of a queue, and return it; raise `Stopped` if there will be none."""
        self.wait(lambda: queue or (self.closing and self.read_all), at_close=True)
        if not queue:
            raise Stopped
        return queue.popleft()

    def wait(self, ready: Callable[[], Any], *, finish: bool = False, at_close: bool = False) -> None:
        """Wait until `ready()` is true; raise `Stopped` if the pass ends first.

        Args:
            ready: Called while the thread holds the lock of `changed`.
            finish: Whether to return if `ready()` is true while the pass is stopping.
            at_close: Whether to keep waiting while the pass is closing.
        """
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.stopping or (self.closing and not at_close))
            if (self.stopping and not finish) or not ready():
                raise Stopped

    def take_fetched(self) -> SentBatch | End | None:
        """Wait for the next batch in the caller's thread, and return it; None after an error of the updater."""
        with self.changed:
            self._caller_waits = True
            self.changed.notify_all()
            try:
                self.wait(lambda: self.fetched or self.update_error)
                return self.fetched.popleft() if self.update_error is None else None
            finally:
                self._caller_waits = False

    def await_turn(self, ready: Callable[[], Any]) -> None:
        """If the caller's step runs alone, wait until the caller waits for a batch and `ready()` is true.

        The wait takes at most 2 s, because the caller's code may itself wait for work in the background.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: not self.alone or (self._caller_waits and ready()) or self.stopping or self.closing,
                _LONGEST_PAUSE,
            )

    def begin_update(self, batch: InFlight) -> SharedRows | None:
        """Wait until a batch is not pinned, and begin its update; return the rows that the next batch waits for."""
        with self.changed:
            self.changed.wait_for(lambda: not batch.pinned or self.stopping)
            return self.in_flight.begin_update(batch)

    def end_reading(self) -> None:
        """Record that the reader has ended."""
        with self.changed:
            self.read_all = True
            self.changed.notify_all()

    def close(self) -> None:
        """Let the reader and the fetcher continue until they would have to wait."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def stop(self) -> None:
        """Make each thread end at its next wait; the updater first finishes the stepped batches."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def clear(self) -> None:
        """Drop the batches that no thread will take."""
        with self.changed:
            self.read.clear()
            self.fetched.clear()

    def fail_update(self, error: BaseException) -> None:
        """Report the error after which no further batch will be updated."""
        with self.changed:
            self.update_error = error
            self.changed.notify_all()


class _QueueWaits(Waits):
    """What the batches of an overlapped pass wait for, under the condition variable of the queues."""

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
