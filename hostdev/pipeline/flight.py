"""What the threads of a pipeline share: the batches on their way, and who waits for which of their rows."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.cache.planner import Plan
from hostdev.data.batch import WideBatch as Batch
from hostdev.pipeline.rows import BatchRows, Part


class Flight:
    """A batch on its way."""

    def __init__(self, number: int, batch: Batch) -> None:
        self.number = number
        self.position = 0  # in its run over batches, from 1
        self.batch = batch
        self.ids: npt.NDArray[Any] = np.empty(0, np.int32)  # unique [U]
        self.inverse: Any = None
        self.places: Any = None  # of the ids' rows on the device, int32 [U]; None: in the order of the ids
        self.plan: Plan | None = None  # the cache's
        self.reads = self.ids  # rows that it takes from the host: those that pass the cache by, those that it admits
        self.writes = self.ids  # rows of the host that its update writes: those that pass by, those that are evicted
        self.prepared: Any = None
        self.rows: list[BatchRows] = []
        self.missing = 0  # parts of the rows that have not been fetched, late ones and the others
        self.late: list[Part] = []  # those that may be fetched now
        self.shared: Shared | None = None  # what the next one waits for
        self.after: list[tuple[Flight, Part]] = []  # what later ones wait for
        self.closed = False  # its update has begun: too late to ask for rows to be updated first
        self.held = True  # by the caller, to whom its result goes, or by the updater
        self.memory: Any = None  # a `Slab` of the host's, for its copies
        self.outcome: Any = None  # an `Outcome`
        self.received: Any = None  # a mark: all that the host takes is there
        self.received_first: tuple[Shared | None, Any] = None, None  # what of it came before the rest, and its mark
        self.clocks: tuple[Any, Any] = (None, None)

    def release(self) -> None:
        """Give up the host's memory; the device is done with it."""
        self.memory.release()
        self.memory = None


class Shared(NamedTuple):
    """The rows of a batch that the next one has too."""

    first: Part
    rest: Part  # the others
    next: Flight
    late: Part  # where the next one has them


class End(NamedTuple):
    """Goes where the next batch would go."""

    error: BaseException | None


class Stopped(Exception):  # noqa: N818  (not an error: a thread is asked to end)
    """Raised in a thread that waits, when the run is over."""


Queue = deque[Flight | End]


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
        self.yielded = 0  # the batch whose result the caller has
        self.delivering = False  # somebody fetches a part that was late
        self.stopping = False
        self.error: BaseException | None = None  # of the stages before the step, when its turn has come
        self.update_error: BaseException | None = None

    def put(self, queue: Queue, held: list[Flight | End]) -> None:
        """Hand a batch on, taken out of the list: so that the thread, if it is held up here, keeps no batch alive."""
        with self.changed:
            queue.append(held.pop())
            self.changed.notify_all()

    def take(self, queue: Queue) -> Flight | End:
        """Wait for a batch."""
        self.wait(lambda: queue)
        return queue.popleft()

    def wait(self, ready: Callable[[], Any], *, finish: bool = False) -> None:
        """Wait until `ready`; Stopped if the run ends before, or at once, unless what is there is to be finished."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.stopping)
            if (self.stopping and not finish) or not ready():
                raise Stopped

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
