"""The queues between the stages, under the one condition variable of an overlapped pass."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hostdev.pipeline.batch_ids import ReadBatch
from hostdev.pipeline.results import SentBatch, SteppedBatch
from hostdev.pipeline.scheduling.in_flight import InFlight, InFlightBatches, SharedRows

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
