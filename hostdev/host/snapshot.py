"""Copy-on-write snapshots of a table, for checkpoints that are written during training.

A `Snapshot` holds a table's rows at one moment. The checkpoint writer reads them in order. If training is about to
overwrite a row that the writer has not read, the old row is copied aside, and the writer reads the copy. One lock
guards the rows and their copies, and is held for a few rows at a time. For a table on disk, a snapshot may copy the
locations of records in place of values, since records do not change.

S and R: number of optimizer state columns with D values per row, and with one value per row.

A location is 1 + (number of the segment << 32 | number of the record in the segment), or 0 for a row with its initial
values.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.keys import KeyColumns
from hostdev.host.disk.segments import SegmentFile
from hostdev.host.disk.tier import Tier
from hostdev.host.storage import Storage, taken
from hostdev.kernels.arrays import AnyIds, Keys, Rows, scratch
from hostdev.kernels.bits import Bits, contains, count_bits, place_in_columns, rows_between, take

Values = tuple[Any, ...]  # arrays [N, ...] of N rows

AT_ONCE_BYTES = 1 << 22  # bytes copied each time the lock is held, for about half a millisecond
_SORTED_AT_ONCE = 16  # sets of copied rows that are sorted together
_BUCKETS = 32  # number of ranges of a table's rows; the copies of a range are freed once its rows are read
LOCATION_BITS = 32  # bits of a location that hold the number of the record in its segment


class Budget:
    """A limit on the bytes of copied rows, which several snapshots share; threads wait while the limit is reached."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._closed = limit, 0, False
        self._changed = threading.Condition()
        self.most = 0  # peak of the bytes in use
        self.seconds = 0.0  # training time spent on copying rows aside, waits included

    def await_room(self) -> None:
        """Wait until usage is below the limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._used < self._limit or self._closed)

    def add(self, nbytes: int) -> None:
        """Add to the bytes in use; a negative number frees bytes."""
        with self._changed:
            self._used += nbytes
            self.most = max(self.most, self._used)
            self._changed.notify_all()

    def close(self) -> None:
        """Release all waiting threads; later calls do not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class RowCopies:
    """Copies the values of rows for a `Snapshot`, whose outputs are columns [1 + S, N, D] and per-row state [R, N].

    Attributes:
        row_bytes: Bytes of the copy of a row.
        at_once: Rows to copy each time the lock is held.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._row_slots = storage, storage.row_slots
        _, planes, D = storage.shape
        self.row_bytes = 4 * (planes * D + self._row_slots.shape[1])
        self.at_once = max(1, AT_ONCE_BYTES // self.row_bytes)

    def held(self, rows: AnyIds) -> Iterator[AnyIds]:
        """Yield rows [N], which may be on disk, part by part; until the next part, `aside` can copy them."""
        for some, _ in self._storage.held(rows, read=True):
            yield some

    def prepare(self, rows: AnyIds) -> None:
        """Prepare a read of rows [N], before the lock is taken; here, there is nothing to prepare."""

    def aside(self, rows: AnyIds) -> Values:
        """Return copies of rows [N]."""
        return self._storage.taken(rows), self._storage.taken_row_slots(rows)

    def select(self, copied: Values, places: AnyIds) -> Values:
        """Return copies of the rows at `places` [any] in `copied`."""
        return tuple(taken(values, places) for values in copied)

    def read(self, rows: AnyIds, start: int, out: Values, left: AnyIds | None, first: int | None) -> None:
        """Copy rows [n] to the outputs, from the position `start` on.

        Args:
            rows: The rows.
            start: The position in the outputs of the first row.
            out: The outputs.
            left: bool [n], False for rows that were copied aside, which need not be copied; None if there are none.
            first: If not None, the rows are first, first + 1, ...
        """
        del left  # copying all of them is faster
        (columns, row_columns), stop = out, start + len(rows)
        ids = rows if first is None else None
        self._storage.copy_to_columns(0, len(rows), first or 0, ids, columns[:, start:stop])
        row_columns[:, start:stop] = self._row_slots[rows].T

    def end(self) -> None:
        """Note that nothing more will be copied; may be called again."""

    def place(self, copied: Values, at: AnyIds, positions: AnyIds, start: int, out: Values) -> None:
        """Write copied rows to the outputs, which from `start` on have the snapshot's rows at `positions` [n].

        Args:
            copied: The copies.
            at: The positions of the copied rows, ascending; some may not be in `positions`.
            positions: The positions of the outputs' rows, ascending.
            start: The index in the outputs of the first of these rows.
            out: The outputs.
        """
        (block, row_slots), (columns, row_columns), stop = copied, out, start + len(positions)
        place_in_columns(block, at, positions, columns[:, start:stop])
        place_in_columns(row_slots[:, :, None], at, positions, row_columns[:, start:stop, None])


def make_locations(segments: AnyIds, records: AnyIds) -> npt.NDArray[np.int64]:
    """Return the locations [N] of records, given the numbers of their segments, and their numbers in the segments."""
    found: npt.NDArray[np.int64] = (segments << LOCATION_BITS | records) + 1
    return found


def split_locations(locations: AnyIds) -> tuple[AnyIds, AnyIds]:
    """Return the numbers of segments and records at locations [N], none of which is 0."""
    return (locations - 1) >> LOCATION_BITS, (locations - 1) & ((1 << LOCATION_BITS) - 1)


class LocationCopies:
    """Copies the locations of rows on disk for a `Snapshot`, whose only output is int64 [N].

    Changed rows are written to segments when they are located. From construction to `end`, no segment is removed.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.row_bytes = 16  # a row's number and its location
        self.at_once = max(1, AT_ONCE_BYTES // tier.planes.row_bytes)
        self._numbers = np.full(len(tier.store.live), -1, np.int64)  # by index of a segment: its number in locations
        self._segments: list[int] = []  # indexes of the numbered segments, in the order of numbers
        self._read: int | None = tier.begin_read()

    def held(self, rows: AnyIds) -> Iterator[AnyIds]:
        """See `RowCopies`."""
        yield rows

    def prepare(self, rows: AnyIds) -> None:
        """See `RowCopies`; write changed rows to the disk, which may take time."""
        self._tier.write_back(rows)

    def aside(self, rows: AnyIds) -> Values:
        """See `RowCopies`."""
        return (self._locate(rows),)

    def select(self, copied: Values, places: AnyIds) -> Values:
        """See `RowCopies`."""
        return tuple(values[places] for values in copied)

    def read(self, rows: AnyIds, start: int, out: Values, left: AnyIds | None, first: int | None) -> None:
        """See `RowCopies`."""
        del first
        to = out[0][start : start + len(rows)]
        if left is None:
            to[:] = self._locate(rows)
        else:
            to[left] = self._locate(rows[left])

    def place(self, copied: Values, at: AnyIds, positions: AnyIds, start: int, out: Values) -> None:
        """See `RowCopies`."""
        places = np.minimum(np.searchsorted(positions, at), len(positions) - 1)
        here = positions[places] == at
        out[0][start + places[here]] = copied[0][here]

    def _locate(self, rows: AnyIds) -> npt.NDArray[np.int64]:
        found = self._tier.locate(rows)
        there = np.flatnonzero(found)
        segments, numbers = np.divmod(found[there] - 1, self._tier.store.format.per_segment)
        for segment in np.unique(segments[self._numbers[segments] < 0]).tolist():
            self._numbers[segment] = len(self._segments)
            self._segments.append(segment)
        found[there] = make_locations(self._numbers[segments], numbers)
        return found

    def finish(self, hold: Callable[[SegmentFile], str]) -> list[tuple[str, SegmentFile]]:
        """Call `hold` for each segment in the locations, in the order of their numbers; return each result and segment.

        Raises:
            UserError: A write to the disk has failed.
            OSError: As `hold` raises it.
        """
        return [(hold(file), file) for file in self._tier.store.finish(self._segments)]

    def end(self) -> None:
        """See `RowCopies`."""
        if self._read is not None:
            number, self._read = self._read, None
            self._tier.end_read(number)


Copies = RowCopies | LocationCopies


class Snapshot:
    """A table's rows as they are when the snapshot is constructed.

    Args:
        copies: What is copied of rows: `RowCopies` or `LocationCopies`.
        rows: V.
        wanted: The rows that the snapshot has, one bit per row of the table.
        budget: Limits the copies of rows that are overwritten before the snapshot's reader has read them.

    Attributes:
        gone: For a table by key, the keys that have lost their rows since the last snapshot, int64 [G].
    """

    gone: Keys = np.zeros(0, np.int64)

    def __init__(self, copies: Copies, rows: int, wanted: Bits, budget: Budget) -> None:
        self.copies = copies
        self.wanted = wanted
        self.count = count_bits(wanted)
        self._pending = wanted.copy()  # rows that are neither read nor copied aside yet
        self._aside: list[tuple[AnyIds, Values]] = []  # rows and their copies, in the order of writes
        self._sorted: dict[int, list[tuple[AnyIds, Values]]] = defaultdict(list)  # by bucket; positions ascend
        self._rows = rows
        self._bucket = -(-rows // _BUCKETS)
        self._budget = budget
        self._lock = threading.Lock()
        self._error: UserError | None = None
        self.ended = threading.Event()  # all rows are read, or the snapshot is abandoned

    def save_before_write(self, ids: AnyIds) -> None:
        """Copy aside those of the rows `ids` [N] that the reader has yet to read; the caller then overwrites the rows.

        Wait while the budget is used up. After an error of the disk, the snapshot is abandoned.
        """
        step, begin = self.copies.at_once, time.perf_counter()
        for start in range(0, len(ids), step):
            if self.ended.is_set():
                break
            part = ids[start : start + step]
            found = scratch("rows to copy aside", (len(part),), part.dtype)
            self._budget.await_room()
            with self._lock:
                count = 0 if self.ended.is_set() else int(take(part, self._pending, found))
                if not count:
                    continue
                rows = found[:count].copy()
                try:
                    self._aside.append((rows, self.copies.aside(rows)))
                except BaseException as error:
                    self._abandon(error)
                    if not isinstance(error, UserError):
                        raise
                    break  # training goes on, and the writer raises the error
            self._budget.add(count * self.copies.row_bytes)
        self._budget.seconds += time.perf_counter() - begin

    def save_before_forget(self, rows: AnyIds) -> None:
        """Do what `save_before_write` does for rows [N] that may be on disk, before they are forgotten."""
        if self.ended.is_set():
            return
        try:
            for some in self.copies.held(rows):
                self.save_before_write(some)
        except BaseException as error:
            self._abandon(error)
            if not isinstance(error, UserError):
                raise

    def _abandon(self, error: BaseException) -> None:
        """Let the writer fail: some rows were not copied before they changed."""
        self._error = error if isinstance(error, UserError) else UserError("copying of rows was interrupted")
        self.ended.set()

    def read(self, first: int, last: int, ids: AnyIds | None, columns: Rows, row_columns: Rows) -> None:
        """Copy the snapshot's rows in [first, last) to columns. Only one thread may call this, with ascending ranges.

        Args:
            first: The first row of the range.
            last: The end of the range.
            ids: The rows to copy, int64 [N], ascending, or None for all rows of the range (N = last - first).
            columns: Output, float32 [1 + S, N, D]: weights, then state columns.
            row_columns: Output, float32 [R, N]: per-row state.
        """
        self._read(first, last, ids, (columns, row_columns), columns.shape[1])

    def _read(self, first: int, last: int, ids: AnyIds | None, out: Values, N: int) -> None:
        step = self.copies.at_once
        for start in range(0, N, step):
            stop = min(N, start + step)
            positions = ids[start:stop] if ids is not None else np.arange(first + start, first + stop)
            rows = self._rows_at(positions)
            self.copies.prepare(rows[contains(self._pending, rows)])
            with self._lock:
                if self._error is not None:
                    raise self._error
                found = scratch("rows read", (len(rows),), rows.dtype)
                count = int(take(rows, self._pending, found))
                left = None if count == len(rows) else np.isin(rows, found[:count])
                self.copies.read(rows, start, out, left, first + start if rows is positions and ids is None else None)
                aside, self._aside = self._aside, []
            while aside:
                self._sort_in([aside.pop() for _ in range(min(_SORTED_AT_ONCE, len(aside)))])
            self._take_aside(positions, start, out)
        self._free(last)

    def _rows_at(self, positions: AnyIds) -> AnyIds:
        """Return the rows at positions of the snapshot [N], which for a table by id are the rows themselves."""
        return positions

    def _positions_of(self, rows: AnyIds) -> AnyIds:
        """Return the positions of rows [N]; the inverse of `_rows_at`."""
        return rows

    def _sort_in(self, aside: list[tuple[AnyIds, Values]]) -> None:
        """Sort copied rows into buckets, with few Python operations, since training threads need the GIL."""
        ids = self._positions_of(np.concatenate([rows for rows, _ in aside]))
        copied = tuple(np.concatenate(parts) for parts in zip(*(values for _, values in aside), strict=True))
        order = np.argsort(ids)
        ids = ids[order]
        buckets = ids // self._bucket
        edges = np.flatnonzero(np.diff(buckets, prepend=-1))
        for begin, end in zip(edges, [*edges[1:], len(ids)], strict=True):
            kept = ids[begin:end].copy(), self.copies.select(copied, order[begin:end])
            self._sorted[int(buckets[begin])].append(kept)

    def _take_aside(self, rows: AnyIds, start: int, out: Values) -> None:
        """Overwrite the outputs of rows that were copied aside with the copies: the table may have newer values."""
        first, last = int(rows[0]), int(rows[-1]) + 1
        for bucket in range(first // self._bucket, (last - 1) // self._bucket + 1):
            for ids, copied in self._sorted.get(bucket, ()):
                begin, end = np.searchsorted(ids, (first, last))
                if begin < end:
                    self.copies.place(tuple(values[begin:end] for values in copied), ids[begin:end], rows, start, out)

    def _free(self, last: int) -> None:
        """Free the copies of rows before `last`."""
        done = self._rows if last >= self._rows else last // self._bucket
        for bucket in [bucket for bucket in self._sorted if bucket < done]:
            freed = sum(len(ids) for ids, _ in self._sorted.pop(bucket))
            self._budget.add(-freed * self.copies.row_bytes)

    def locate(self, first: int, last: int, out: npt.NDArray[np.int64]) -> None:
        """Write the locations of the snapshot's rows at [first, last) to `out`; called like `read`."""
        self._read(first, last, None, (out,), last - first)

    def finish(self, hold: Callable[[SegmentFile], str]) -> list[tuple[str, SegmentFile]]:
        """Call `hold` for each segment that has rows of the snapshot; see `LocationCopies.finish`."""
        assert isinstance(self.copies, LocationCopies)
        return self.copies.finish(hold)

    def key_columns(self, first: int, last: int) -> KeyColumns | None:
        """Return the keys of rows of a table by key; None for a table by id."""
        return None

    def other_keys(self) -> tuple[Any, ...] | None:
        """Return the fields of `checkpoint.keyed.OtherKeys` for a table by key; None for a table by id."""
        return None

    def rows_between(self, first: int, last: int) -> AnyIds:
        """Return the snapshot's rows in [first, last), int64, ascending."""
        out = np.empty(last - first, np.int64)
        return out[: rows_between(first, last, self.wanted, out)].copy()

    def end(self) -> None:
        """Stop copying rows aside, and free all copies: all rows have been read, or the snapshot is abandoned."""
        self.ended.set()
        with self._lock:
            self.copies.end()
            left = sum(len(rows) for rows, _ in self._aside)
            left += sum(len(rows) for parts in self._sorted.values() for rows, _ in parts)
            self._aside = []
            self._sorted.clear()
        self._budget.add(-left * self.copies.row_bytes)
