"""Passes over batches: their interface, the serial pass, and the queues of the overlapped one.

The queues between the stages of an overlapped pass have one condition variable.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from hostdev.kernels.arrays import AnyIds
from hostdev.pipeline.batch_ids import ReadBatch, Request
from hostdev.pipeline.context import Context
from hostdev.pipeline.path import End, PassOptions, Path, Stopped, Waits
from hostdev.pipeline.results import Gradients, SentBatch, StepBatch, SteppedBatch
from hostdev.pipeline.scheduling.in_flight import InFlight, InFlightBatches, SharedRows
from hostdev.pipeline.stages.deduplicate import read
from hostdev.pipeline.stages.look_up import reload
from hostdev.pipeline.stages.step import begin_step, end_step
from hostdev.pipeline.stages.update import await_step

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
        self._path = Path(context, options, Waits())
        self._batches = self._path.look_ahead(self._read)

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
        in_flight = InFlight(item.number)
        self._given = begin_step(self._context, self._path.fetch(item, in_flight), in_flight, self._update)
        return self._given

    def finish(self, batch: StepBatch, gradients: Gradients | None) -> None:
        """See `Pass`."""
        self._given = None
        stepped = end_step(self._context, batch, gradients)
        if not self._update:
            self._path.leave(stepped)
            return
        await_step(self._context, stepped)
        self._path.update(stepped)

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
        self._path.pins.close()
