"""The batches in flight, and which of their rows wait for the update of another one."""

import threading
from typing import Any, NamedTuple

from hostdev.distributed.gradients import SelectedRows
from hostdev.pipeline.row_ids import ConcatenatedIds, Positions, RowSubset
from hostdev.pipeline.rows import FetchedRows


class InFlight:
    """What the threads share of a batch in flight; changed under the condition of `InFlightBatches`.

    `writes`, `rows` and `first` are each set once, by the fetcher.
    """

    __slots__ = ("after", "first", "held", "missing", "number", "ready", "rows", "shared", "updating", "writes")

    def __init__(self, number: int) -> None:
        self.number = number
        self.writes: ConcatenatedIds | None = None  # rows of the host that its update writes
        self.rows: FetchedRows | None = None  # once they are looked up
        self.first: list[SelectedRows] | None = (
            None  # rows that the next batch waits for, where other ranks know of them
        )
        self.missing = 0  # parts of the rows that have not been fetched
        self.ready: list[RowSubset] = []  # conflicting rows that may be looked up now
        self.shared: SharedRows | None = None  # rows that the next batch waits for
        self.after: list[tuple[InFlight, RowSubset]] = []  # rows that later batches wait for
        self.updating = False  # too late to ask for rows to be updated first
        self.held = True  # by the caller, who steps it, or by the updater


class SharedRows(NamedTuple):
    """The rows of a batch that the next one has, too."""

    first: RowSubset
    rest: RowSubset  # the others
    next: InFlight
    conflicting: RowSubset  # `first`, as the next batch has them


class Conflicts(NamedTuple):
    """Rows of a batch that unfinished batches are going to write (read-after-write hazards)."""

    rows: Positions  # among those that the batch reads
    subsets: list[tuple[RowSubset, int]]  # each with the batch after whose update it may be read
    shared: SharedRows | None  # those of the batch right before


class Unfinished(NamedTuple):
    """The batches whose updates are not finished, as a batch is planned."""

    batch: InFlight  # the one that is planned
    before: InFlight | None  # the one right before, if it is unfinished
    updated: int  # the last one whose update is finished


class InFlightBatches:
    """The batches in flight by number, in order.

    Args:
        changed: The condition of the `PipelineQueues`.
        updated: Number of the last batch whose update is finished.
    """

    def __init__(self, changed: threading.Condition, updated: int) -> None:
        self.changed = changed
        self.by_number: dict[int, InFlight] = {}
        self.updated = updated
        self.gathered: tuple[int, Any] = (updated, None)  # the last one whose rows the step has taken, and its mark
        self._delivering = False  # a thread fetches conflicting rows

    def add(self, number: int) -> None:
        """Add a batch that has been read."""
        with self.changed:
            self.by_number[number] = InFlight(number)

    def get_unfinished(self, number: int) -> Unfinished:
        """Return what a batch may have to wait for."""
        batches = self.by_number
        return Unfinished(batches[number], batches.get(number - 1), self.updated)

    def request(self, batch: InFlight, conflicts: Conflicts) -> list[RowSubset]:
        """Ask the unfinished batches for conflicting rows; return those whose batch has been updated by now."""
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
        """Return the first batch with conflicting rows that may be fetched now; one thread at a time fetches them."""
        with self.changed:  # others add and remove batches
            if self._delivering:
                return None
            return next((batch for batch in self.by_number.values() if batch.ready), None)

    def begin_delivery(self, batch: InFlight) -> RowSubset | None:
        """Return conflicting rows to fetch, if there still are any; `end_delivery` must follow."""
        with self.changed:
            if self._delivering or not batch.ready:
                return None
            self._delivering = True
            return batch.ready.pop(0)

    def end_delivery(self) -> None:
        """Let other threads fetch conflicting rows."""
        with self.changed:
            self._delivering = False
            self.changed.notify_all()

    def begin_update(self, batch: InFlight) -> SharedRows | None:
        """Note that a batch's update begins; return the rows that the next one waits for."""
        with self.changed:
            batch.updating = True
            return batch.shared

    def end_first_update(self, shared: SharedRows) -> None:
        """Let the next batch read the rows that were updated first."""
        with self.changed:
            shared.next.ready.append(shared.conflicting)
            self.changed.notify_all()

    def end_update(self, batch: InFlight) -> None:
        """Note that a batch's update is finished; later ones may read its rows."""
        with self.changed:
            self.updated = batch.number
            for later, rows in batch.after:
                later.ready.append(rows)
            batch.after, batch.shared = [], None
            self.changed.notify_all()

    def gather(self, number: int, mark: Any) -> None:
        """Note that a batch's step has taken its rows, before this mark in the device's stream."""
        with self.changed:
            self.gathered = number, mark
            self.changed.notify_all()

    def release(self, number: int) -> None:
        """Drop a batch once both the caller and the updater have released it; then another is read."""
        with self.changed:
            if self.by_number[number].held:
                self.by_number[number].held = False
            else:
                del self.by_number[number]
                self.changed.notify_all()
