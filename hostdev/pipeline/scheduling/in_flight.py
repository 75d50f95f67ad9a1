"""In-flight batches, and which of their rows wait for another batch's update."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hostdev.distributed.gradients import SelectedRows
from hostdev.kernels.arrays import Positions
from hostdev.pipeline.batch_ids import ConcatenatedIds, RowSubset
from hostdev.pipeline.forwarding import Forwarded
from hostdev.pipeline.rows import FetchedRows
from hostdev.pipeline.tiers import BatchPins


@dataclass(slots=True, eq=False)
class InFlight:
    """The shared state of an in-flight batch; threads change it under `InFlightBatches.changed`.

    `writes`, `rows` and `first` are each set once, by the fetcher. Only the fetcher uses `claimed`, `forwarded` and
    `awaits`.
    """

    number: int
    writes: ConcatenatedIds | None = None  # host rows that its update writes
    rows: FetchedRows | None = None  # its rows, set once they are looked up
    first: list[SelectedRows] | None = None  # rows for which the next batch waits, if all ranks know them
    missing: int = 0  # number of subsets of its rows that are not fetched yet
    ready: list[RowSubset] = field(default_factory=list)  # conflicting rows that may be looked up now
    shared: "SharedRows | None" = None  # rows that the next batch waits for
    after: "list[tuple[InFlight, RowSubset]]" = field(default_factory=list)  # later batches, and the rows they wait for
    updating: bool = False  # whether the update has begun; from then on, `shared` is not set any more
    pinned: bool = False  # whether rows are being read to forward them; the update must not begin meanwhile
    pins: BatchPins | None = None  # its pinned rows of tables on disk
    forwarded: Forwarded | None = None  # rows that the previous batch forwards to it
    awaits: int = 0  # number of the last batch for whose update its conflicting rows wait; 0 for none
    claimed: bool = True  # whether the batch is recorded as the last writer of its rows
    held: bool = True  # False once the caller or the updater has released the batch


class SharedRows(NamedTuple):
    """The rows of a batch, divided into rows that the next batch shares and other rows."""

    first: RowSubset  # the shared rows, which are updated first
    rest: RowSubset  # the batch's other rows
    next: InFlight  # the next batch
    conflicting: RowSubset  # `first` as a subset of the next batch


class Conflicts(NamedTuple):
    """Rows of a batch that unfinished batches will write (read-after-write hazards)."""

    rows: Positions  # positions of the conflicting rows among the rows that the batch reads
    subsets: list[tuple[RowSubset, int]]  # rows to look up late, each with the batch whose update must come first
    shared: SharedRows | None  # rows shared with the previous batch, if they are looked up late
    forwarded: Forwarded | None  # rows that the previous batch forwards, and that are not looked up late


class Unfinished(NamedTuple):
    """The batches whose updates are not finished when a batch is planned."""

    batch: InFlight  # the batch that is planned
    before: InFlight | None  # the previous batch, if it is unfinished
    updated: int  # number of the last batch whose update is finished
    pin: Callable[[], bool] | None  # delays the update of `before`, or returns False; None if rows are not forwarded


class InFlightBatches:
    """The in-flight batches by number, in order.

    Args:
        changed: The condition variable of `workers.PipelineQueues`.
        updated: Number of the last batch whose update is finished.
    """

    def __init__(self, changed: threading.Condition, updated: int) -> None:
        self.changed = changed
        self.by_number: dict[int, InFlight] = {}
        self.updated = updated
        self.gathered: tuple[int, Any] = (updated, None)  # last arguments of `gather`
        self._delivering = False  # whether a thread is looking up conflicting rows

    def add(self, number: int) -> None:
        """Add a batch that has been read."""
        with self.changed:
            self.by_number[number] = InFlight(number)

    def get_unfinished(self, number: int, *, forwards: bool) -> Unfinished:
        """Return the unfinished batches for which batch `number` may have to wait."""
        before = self.by_number.get(number - 1)
        pin = partial(self.pin, before) if forwards and before is not None else None
        return Unfinished(self.by_number[number], before, self.updated, pin)

    def pin(self, batch: InFlight) -> bool:
        """Delay the update of a batch until `unpin`; return False if it has begun."""
        with self.changed:
            batch.pinned = not batch.updating
            return batch.pinned

    def unpin(self, batch: InFlight) -> None:
        """Allow the update of a batch."""
        with self.changed:
            batch.pinned = False
            self.changed.notify_all()

    def request(self, batch: InFlight, conflicts: Conflicts) -> list[RowSubset]:
        """Register a batch with the writers of its conflicting rows; return the subsets already updated."""
        found = []
        with self.changed:
            for rows, number in conflicts.subsets:
                if number <= self.updated:
                    found.append(rows)
                    continue
                writer = self.by_number[number]
                batch.missing += 1
                if conflicts.shared is not None and rows is conflicts.shared.conflicting and not writer.updating:
                    writer.shared = conflicts.shared
                else:
                    writer.after.append((batch, rows))
        return found

    def count_fetched(self, batch: InFlight) -> None:
        """Count a part of a batch's rows as fetched."""
        with self.changed:
            batch.missing -= 1
            if not batch.missing:
                self.changed.notify_all()

    def find_ready(self) -> InFlight | None:
        """Return the first batch with conflicting rows to look up now; None while another thread looks up such rows."""
        with self.changed:  # other threads add and remove batches
            if self._delivering:
                return None
            return next((batch for batch in self.by_number.values() if batch.ready), None)

    def begin_delivery(self, batch: InFlight) -> RowSubset | None:
        """Return conflicting rows of a batch to look up now, or None.

        If rows are returned, `end_delivery` must be called after their lookup.
        """
        with self.changed:
            if self._delivering or not batch.ready:
                return None
            self._delivering = True
            return batch.ready.pop(0)

    def end_delivery(self) -> None:
        """Allow other threads to look up conflicting rows."""
        with self.changed:
            self._delivering = False
            self.changed.notify_all()

    def begin_update(self, batch: InFlight) -> SharedRows | None:
        """Record that a batch's update begins; return the rows that the next batch waits for."""
        with self.changed:
            batch.updating = True
            return batch.shared

    def end_first_update(self, shared: SharedRows) -> None:
        """Allow the next batch to read the rows that were updated first."""
        with self.changed:
            shared.next.ready.append(shared.conflicting)
            self.changed.notify_all()

    def end_update(self, batch: InFlight) -> None:
        """Record that a batch's update is finished, so that later batches may read its rows."""
        with self.changed:
            self.updated = batch.number
            for later, rows in batch.after:
                later.ready.append(rows)
            batch.after, batch.shared = [], None
            self.changed.notify_all()

    def gather(self, number: int, mark: Any) -> None:
        """Record that a batch's step takes its rows; the device has taken them after the event `mark`."""
        with self.changed:
            self.gathered = number, mark
            self.changed.notify_all()

    def release(self, number: int) -> None:
        """Release a batch for the caller or the updater; drop the batch once both have released it."""
        with self.changed:
            if self.by_number[number].held:
                self.by_number[number].held = False
            else:
                del self.by_number[number]
                self.changed.notify_all()
