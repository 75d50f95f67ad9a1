"""The line of batches in flight: queues between the stages, and what their threads wait for, under one condition."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hostdev.pipeline.flight import End, Flight, Queue, Stopped
from hostdev.pipeline.groups import Part


class Line:
    """The queues between the stages and the batches alive, under one condition."""

    def __init__(self, depth: int, window: int, updated: int, *, update: bool) -> None:
        self.update = update
        self.changed = threading.Condition()
        self.read: Queue = deque()
        self.fetched: Queue = deque()
        self.stepped: Queue = deque()
        self.flights: dict[int, Flight] = {}  # batches alive, in order
        self.most = depth + 2  # that are more than ids
        self.most_read = depth + 2 + window
        self.updated = updated  # the last batch whose update is finished
        self.gathered: tuple[int, Any] = (updated, None)  # the last one whose rows the step has taken, and a mark there
        self.finished = updated  # the last batch that has been stepped
        self.lookups = 0  # that read rows now
        self.reading_again = False  # the caller looks rows up again that others may have looked up before it wrote them
        self.delivering = False  # somebody fetches a part that was late
        self.stopping = False
        self.closing = False  # who need not wait goes on, and nobody waits: so that all ranks come equally far
        self.read_all = False  # the reader has ended
        self.update_error: BaseException | None = None

    @contextmanager
    def looking_up(self) -> Iterator[None]:
        """Read rows of a batch, or send them: not while `look_up_again` does. Several may, and nobody waits for them.

        It is no lock: one who holds it may give way to an urgent thread, which would wait for it.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self.reading_again)
            self.lookups += 1
        try:
            yield
        finally:
            with self.changed:
                self.lookups -= 1
                if self.reading_again:
                    self.changed.notify_all()

    @contextmanager
    def look_up_again(self) -> Iterator[None]:
        """Wait for those who are looking up, and let nobody else begin."""
        with self.changed:
            self.reading_again = True
            self.changed.wait_for(lambda: not self.lookups)
        try:
            yield
        finally:
            with self.changed:
                self.reading_again = False
                self.changed.notify_all()

    def put(self, queue: Queue, held: list[Flight | End]) -> None:
        """Hand a batch on, taken out of the list: so that the thread, if it is held up here, keeps no batch alive."""
        with self.changed:
            queue.append(held.pop())
            self.changed.notify_all()

    def take(self, queue: Queue) -> Flight | End:
        """Wait for a batch."""
        self.wait(lambda: queue or (self.closing and self.read_all), at_close=True)
        if not queue:
            raise Stopped
        return queue.popleft()

    def wait(self, ready: Callable[[], Any], *, finish: bool = False, at_close: bool = False) -> None:
        """Wait until `ready`; Stopped if the run ends before, or at once, unless what is there is to be finished.

        at_close  wait also while it is closing
        """
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.stopping or (self.closing and not at_close))
            if (self.stopping and not finish) or not ready():
                raise Stopped

    def end_reading(self) -> None:
        """Note that the reader has ended."""
        with self.changed:
            self.read_all = True
            self.changed.notify_all()

    def close(self) -> None:
        """Let the reader and the fetcher go on as far as they may with what has been stepped, and no further."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def deliverable(self) -> Flight | None:
        """Return the first batch with late rows that may be fetched now; one thread at a time fetches such."""
        with self.changed:  # others add and remove batches
            if self.delivering:
                return None
            return next((flight for flight in self.flights.values() if flight.late), None)

    def begin_delivery(self, flight: Flight) -> Part | None:
        """Take a part of its late rows to fetch, if there is still one."""
        with self.changed:
            if self.delivering or not flight.late:
                return None
            self.delivering = True
            return flight.late.pop(0)

    def end_delivery(self) -> None:
        """Let others fetch late rows."""
        with self.changed:
            self.delivering = False
            self.changed.notify_all()

    def fail_update(self, error: BaseException) -> None:
        """Report that no further batch is going to be updated."""
        with self.changed:
            self.update_error = error
            self.changed.notify_all()

    def let_go(self, number: int) -> None:
        """The caller or the updater is done with a batch, and has no reference to it; after both another is read."""
        with self.changed:
            if self.flights[number].held:
                self.flights[number].held = False
            else:
                del self.flights[number]
                self.changed.notify_all()

    def gather(self, number: int, mark: Any) -> None:
        """Note that a batch's step has taken its rows, before this mark in the device's stream."""
        with self.changed:
            self.gathered = number, mark
            self.changed.notify_all()

    def arrived(self, flight: Flight) -> None:
        """Count a part of a batch's rows as fetched."""
        with self.changed:
            flight.missing -= 1
            if not flight.missing:
                self.changed.notify_all()
