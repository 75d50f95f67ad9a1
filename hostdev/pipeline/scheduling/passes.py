"""Passes over batches: the interface, the serial pass, and the look-ahead that all passes share.

The queues between the stages of an overlapped pass have one condition variable.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from hostdev.kernels.arrays import AnyIds
from hostdev.pipeline import remote
from hostdev.pipeline.batch_ids import ReadBatch, Request, UniqueBatch
from hostdev.pipeline.context import Context
from hostdev.pipeline.results import Gradients, SentBatch, StepBatch, SteppedBatch
from hostdev.pipeline.scheduling.in_flight import InFlight, InFlightBatches, SharedRows
from hostdev.pipeline.stages.deduplicate import announce, deduplicate, read
from hostdev.pipeline.stages.look_up import look_up, reload, send, take_memory
from hostdev.pipeline.stages.plan import plan
from hostdev.pipeline.stages.step import begin_step, end_step
from hostdev.pipeline.stages.update import await_step, receive_sums, release, unpin, update
from hostdev.pipeline.tiers import PassPins

_LONGEST_PAUSE = 2.0  # seconds that a stage waits for the end of a step that runs alone


class End(NamedTuple):
    """The last item of a queue, with the error that ended the stage, if any."""

    error: BaseException | None


class Stopped(Exception):  # noqa: N818  (not an error: a thread is asked to end)
    """Raised in a waiting thread when the pass is over."""


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
        self.alone = False  # the caller's step runs alone: the fetcher works only while the caller waits for it
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
        """Make all threads end at their next wait."""
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


class PassOptions(NamedTuple):
    """Options of a pass: where it begins, and how far it runs ahead."""

    depth: int  # the pipeline's depth
    window: int  # number of batches that the caches know in advance, in addition to those that are looked up ahead
    number: int  # number of the batch before the first
    position: int  # position of that batch in the caller's loop
    update: bool  # whether steps update the tables
    background: bool  # whether a background thread reads the batches, instead of the caller's thread
    ahead_of_step: int  # number of batches looked up ahead, at most `depth`, if the caller's thread reads them


class Pass(Protocol):
    """A pass, which gives the caller batches in order for its steps. A single thread must call `take` and `finish`."""

    def take(self) -> StepBatch | None:
        """Return the next batch with its rows on the device, or None after the last, when all updates are finished."""

    def finish(self, batch: StepBatch, gradients: Gradients | None) -> None:
        """End a step; gradients are None in a pass that updates nothing."""

    def drain(self) -> None:
        """Wait until the updates of all stepped batches are finished."""

    def reload(self, table: Any, ids: AnyIds | None) -> None:
        """After `drain` and a write to a table, look up again its rows that were looked up ahead.

        This has an effect only in the thread that takes the batches.

        Args:
            table: The table that was written.
            ids: int32 or int64 [N]; None for all rows.
        """

    def is_own(self, thread: threading.Thread) -> bool:
        """Return whether a thread belongs to the pass."""

    def close(self, *, failed: bool = False) -> None:
        """End the pass: update stepped batches, and drop the others. Raise the updater's error unless `failed`.

        Args:
            failed: Whether another error has ended the pass.
        """


def raise_held(held: list[BaseException | None]) -> None:
    """Remove the error, if any, from a list and raise it; in the list, it would form a reference cycle."""
    if held[0] is not None:
        raise held.pop()  # type: ignore[misc]


def look_ahead(
    context: Context, take: Callable[[], ReadBatch | End], options: PassOptions, pins: PassPins
) -> Iterator[UniqueBatch | End]:
    """Yield deduplicated batches in order, and then an `End`. Batches are announced to the caches a window ahead.

    Args:
        context: The pipeline's context.
        take: Called without arguments; returns the next batch that was read, or an `End`.
        options: The pass's options.
        pins: The rows of tables on disk that the pass's batches need.
    """
    update, position = options.update, options.position
    window = options.window if update else 0
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
            pins.announce(waiting)
            yield waiting.pop(0)
        else:
            yield ends.pop()  # not kept: an error holds the frames that it passed through, including this one
            return


class SerialPass:
    """Runs the stages one after the other in the caller's thread. The overlapped pass must give the same results.

    Args:
        context: The pipeline's context.
        source: The requests.
        options: The pass's options.
    """

    def __init__(self, context: Context, source: Iterable[Request], options: PassOptions) -> None:
        self._context, self._update, self.number = context, options.update, options.number
        self._source = iter(source)
        self._caller = threading.get_ident()
        self._given: StepBatch | None = None  # the batch in the caller's step
        self._pins = PassPins(context.tiers, options.update)
        self._batches = look_ahead(context, self._read, options, self._pins)

    def _read(self) -> ReadBatch | End:
        batch = read(self._context, self._source, self.number + 1)
        if batch is None:
            return End(None)
        self.number += 1
        return batch

    def take(self) -> StepBatch | None:
        """See `Pass`."""
        item = next(self._batches)
        if isinstance(item, End):
            held = [item.error]
            del item
            raise_held(held)
            return None
        context, update = self._context, self._update
        planned = plan(context, item, update, None)
        in_flight = InFlight(item.number)
        if self._pins:
            self._pins.try_pin(item.number, planned.groups)
            in_flight.pins = self._pins.take(item.number)
            in_flight.pins.await_rows()
        looked_up = look_up(context, planned, take_memory(context, planned))
        if context.exchanges and context.on_host:
            early = remote.exchange_early(context, looked_up, None, None, update=update, overlapped=False)
            looked_up = looked_up._replace(early=early)
        in_flight.rows = looked_up.rows
        self._given = begin_step(context, send(context, looked_up), in_flight, update)
        return self._given

    def finish(self, batch: StepBatch, gradients: Gradients | None) -> None:
        """See `Pass`."""
        self._given = None
        context = self._context
        stepped = end_step(context, batch, gradients)
        if not self._update:
            await_step(context, stepped)
            release(stepped)
            unpin(stepped)
            return
        context.before_stage("update", batch.number)
        await_step(context, stepped)
        receive_sums(context, stepped)
        update(context, stepped, None)

    def drain(self) -> None:
        """See `Pass`."""

    def reload(self, table: Any, ids: AnyIds | None) -> None:
        """See `Pass`."""
        if self._given is not None and threading.get_ident() == self._caller:
            assert self._given.in_flight.rows is not None
            reload(self._context, self._given.in_flight.rows, table, ids, in_step=True)

    def is_own(self, thread: threading.Thread) -> bool:
        """See `Pass`."""
        return False

    def close(self, *, failed: bool = False) -> None:
        """See `Pass`."""
        self._given = None
        self._batches.close()  # type: ignore[attr-defined]
        self._pins.close()
