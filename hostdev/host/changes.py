"""Change tracking and copy-on-write snapshots of a table, for checkpoints that are written during training.

A `Snapshot` holds a table's rows at one moment. The checkpoint writer reads them in order. If training is about to
overwrite a row that the writer has not read, the old row is copied aside, and the writer reads the copy. One lock
guards the rows and their copies, and is held for a few rows at a time.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.digest import RangeDigests, rows_per_range
from hostdev.host.storage import Storage, taken
from hostdev.kernels.bits import (
    Bits,
    any_in_ranges,
    count_bits,
    empty_bits,
    full_bits,
    mark,
    place_in_columns,
    rows_between,
    take,
)
from hostdev.kernels.buffers import scratch

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[Any]

_AT_ONCE_BYTES = 1 << 22  # bytes copied each time the lock is held, for about half a millisecond
_SORTED_AT_ONCE = 16  # sets of copied rows
_BUCKETS = 32  # ranges of a table's rows; a bucket's copies are freed once its rows are read


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


class Snapshot:
    """A table's rows as they are when the snapshot is constructed.

    Args:
        storage: The table's memory.
        wanted: The rows that the snapshot has, one bit each.
        budget: Limits the copies of rows that are overwritten before the snapshot's reader has read them.
    """

    def __init__(self, storage: Storage, wanted: Bits, budget: Budget) -> None:
        self.storage, self.row_slots = storage, storage.row_slots
        self.wanted = wanted
        self.count = count_bits(wanted)
        self._pending = wanted.copy()  # neither read nor copied aside yet
        self._aside: list[tuple[Ids, Rows, Rows]] = []  # in write order
        self._sorted: dict[int, list[tuple[Ids, Rows, Rows]]] = defaultdict(list)  # by bucket, ids ascending
        V, planes, D = storage.shape
        self._rows = V
        self._bucket = -(-V // _BUCKETS)
        self._first_bucket = 0  # the first bucket that is not freed
        self._budget = budget
        self._lock = threading.Lock()
        self.ended = threading.Event()  # all rows are read, or the snapshot is abandoned
        self._row_bytes = 4 * (planes * D + self.row_slots.shape[1])

    def save_before_write(self, ids: Ids) -> None:
        """Before the rows `ids` [N] are overwritten, copy aside those that the snapshot's reader has still to read.

        Wait while the budget is used up.
        """
        step = max(1, _AT_ONCE_BYTES // self._row_bytes)
        begin = time.perf_counter()
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
                self._aside.append((rows, self.storage.taken(rows), self.storage.taken_row_slots(rows)))
            self._budget.add(count * self._row_bytes)
        self._budget.seconds += time.perf_counter() - begin

    def read(self, first: int, last: int, ids: Ids | None, columns: Rows, row_columns: Rows) -> None:
        """Copy the snapshot's rows in [first, last) to columns. Only one thread may call this, with ascending ranges.

        Args:
            first: The first row of the range.
            last: The end of the range.
            ids: The rows to copy, int64 [N], ascending, or None for all rows of the range (N = last - first).
            columns: Output, float32 [1 + S, N, D]: weights, then state columns.
            row_columns: Output, float32 [R, N]: per-row state.
        """
        step = max(1, _AT_ONCE_BYTES // self._row_bytes)
        N = columns.shape[1]
        for start in range(0, N, step):
            stop = min(N, start + step)
            positions = ids[start:stop] if ids is not None else np.arange(first + start, first + stop)
            rows = self._rows_at(positions)
            with self._lock:
                if rows is positions:
                    self.storage.copy_to_columns(start, stop, first, ids, columns)
                else:
                    self.storage.copy_to_columns(0, len(rows), 0, rows, columns[:, start:stop])
                row_columns[:, start:stop] = self.row_slots[rows].T
                take(rows, self._pending, scratch("rows read", (len(rows),), rows.dtype))
                aside, self._aside = self._aside, []
            while aside:
                self._sort_in([aside.pop() for _ in range(min(_SORTED_AT_ONCE, len(aside)))])
            self._take_aside(positions, columns[:, start:stop], row_columns[:, start:stop])
        self._free(last)

    def _rows_at(self, positions: Ids) -> Ids:
        """Return the rows at positions of the snapshot [N], which for a table by id are the rows themselves."""
        return positions

    def _positions_of(self, rows: Ids) -> Ids:
        """Return the positions of rows [N]; the inverse of `_rows_at`."""
        return rows

    def _sort_in(self, aside: list[tuple[Ids, Rows, Rows]]) -> None:
        """Sort copied rows into buckets, with few Python operations, since training threads need the GIL."""
        ids, rows, row_slots = (np.concatenate(parts) for parts in zip(*aside, strict=True))
        ids = self._positions_of(ids)
        order = np.argsort(ids)
        ids = ids[order]
        buckets = ids // self._bucket
        edges = np.flatnonzero(np.diff(buckets, prepend=-1))
        for begin, end in zip(edges, [*edges[1:], len(ids)], strict=True):
            part = order[begin:end]
            kept = ids[begin:end].copy(), taken(rows, part), taken(row_slots, part)
            self._sorted[int(buckets[begin])].append(kept)

    def _take_aside(self, rows: Ids, columns: Rows, row_columns: Rows) -> None:
        """Write the old values of rows that were copied aside to the columns, since the table may have newer values."""
        first, last = int(rows[0]), int(rows[-1]) + 1
        for bucket in range(first // self._bucket, (last - 1) // self._bucket + 1):
            for ids, values, row_slots in self._sorted.get(bucket, ()):
                begin, end = np.searchsorted(ids, (first, last))
                if begin < end:
                    of_these = ids[begin:end]
                    place_in_columns(values[begin:end], of_these, rows, columns)
                    place_in_columns(row_slots[begin:end, :, None], of_these, rows, row_columns[:, :, None])

    def _free(self, last: int) -> None:
        """Free the copies of rows before `last`."""
        done = self._rows if last >= self._rows else last // self._bucket
        for bucket in [bucket for bucket in self._sorted if bucket < done]:
            freed = sum(len(ids) for ids, _, _ in self._sorted.pop(bucket))
            self._budget.add(-freed * self._row_bytes)

    def rows_between(self, first: int, last: int) -> Ids:
        """Return the snapshot's rows in [first, last), int64, ascending."""
        out = np.empty(last - first, np.int64)
        return out[: rows_between(first, last, self.wanted, out)].copy()

    def end(self) -> None:
        """Stop copying rows aside, and free all copies: all rows have been read, or the snapshot is abandoned."""
        self.ended.set()
        with self._lock:
            left = sum(len(kept[0]) for kept in self._aside)
            left += sum(len(kept[0]) for parts in self._sorted.values() for kept in parts)
            self._aside = []
            self._sorted.clear()
        self._budget.add(-left * self._row_bytes)


class Changes:
    """The set of a table's rows that were written since the last snapshot, one bit per row."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._rows = storage, storage.shape[0]
        self._touched = empty_bits(self._rows)  # since the last snapshot
        self._unsaved: list[Bits] = []  # rows of snapshots that were not saved
        self.since: Any = None  # the checkpoint since which changes are tracked; set by the checkpoint manager
        self.digests: RangeDigests | None = None  # of row ranges; each is valid while it is marked `known`
        self._snapshot: Snapshot | None = None

    @property
    def touched(self) -> Bits:
        """The rows written since the last snapshot that was saved."""
        for bits in self._unsaved:
            self._touched |= bits
        self._unsaved = []
        return self._touched

    def known_digests(self) -> RangeDigests | None:
        """Return the digests of row ranges, with `known` only for unchanged ranges, or None if there are no digests."""
        if self.digests is None:
            return None
        by_column, known = self.digests
        length = rows_per_range(self._storage.shape[2])
        return RangeDigests(by_column, known & ~any_in_ranges(self.touched, self._rows, length))

    def before_write(self, ids: Ids) -> None:
        """Record that the rows `ids` [N] are about to be written; only one thread at a time may call this."""
        if self._snapshot is not None:
            self._snapshot.save_before_write(ids)
        mark(ids, self._touched)

    def begin(self, budget: Budget, *, everything: bool) -> Snapshot:
        """Begin a snapshot: of all rows if `everything`, else of the rows written since the last saved snapshot.

        No thread may write to the table during this call.

        Raises:
            RuntimeError: The last snapshot has not ended.
        """
        self._require_none()
        wanted = full_bits(self._rows) if everything else self.touched
        self.digests = self.known_digests()
        self._unsaved = []
        self._snapshot = snapshot = Snapshot(self._storage, wanted, budget)
        self._touched = empty_bits(self._rows)
        return snapshot

    def begin_with(self, snapshot: Snapshot) -> None:
        """Begin a snapshot that the caller has made, after which no row counts as touched; see `begin`."""
        self._require_none()
        self._unsaved = []
        self._snapshot, self._touched = snapshot, empty_bits(self._rows)

    def _require_none(self) -> None:
        if self._snapshot is not None:
            raise RuntimeError("the previous snapshot of this table is still being saved; wait until it ends")

    def await_end(self) -> None:
        """Wait until all rows of the current snapshot, if any, have been read, or it is abandoned."""
        if self._snapshot is not None:
            self._snapshot.ended.wait()

    def end(self, snapshot: Snapshot, *, saved: bool) -> None:
        """End a snapshot; if it was not saved, the snapshot's rows count as changed again."""
        snapshot.end()
        if not saved:
            self._unsaved.append(snapshot.wanted)  # merged later: another thread may be marking rows
        self._snapshot = None
