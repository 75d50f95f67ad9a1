"""Which rows of a table have been written, and what they held before: for checkpoints while training goes on.

A `Snapshot` is a table as of one moment. Its rows are read in order by who saves them; a row that training wants to
write before is copied aside first, and the reader takes the copy. Both happen under one lock, for a few rows at a time.
"""

import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.host.storage import Storage, taken
from hostdev.kernels.bits import (
    Bits,
    all_bits,
    bits_for,
    count_bits,
    mark,
    place_in_columns,
    rows_between,
    take,
)
from hostdev.kernels.buffers import scratch

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[Any]

_AT_ONCE_BYTES = 1 << 22  # copied under the lock; half a millisecond
_SORTED_AT_ONCE = 16  # of these copies
_BUCKETS = 32  # of a table's rows; the copies of one are freed when it has been read


class Budget:
    """Bytes of copies, which several snapshots share; who wants more than there are waits."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._closed = limit, 0, False
        self._changed = threading.Condition()
        self.most = 0  # used so far
        self.seconds = 0.0  # that training has spent with copying rows aside, and waiting for that

    def await_room(self) -> None:
        """Wait until less than the limit is used."""
        with self._changed:
            self._changed.wait_for(lambda: self._used < self._limit or self._closed)

    def add(self, nbytes: int) -> None:
        """Count bytes that are used; below 0 for bytes that no longer are."""
        with self._changed:
            self._used += nbytes
            self.most = max(self.most, self._used)
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Snapshot:
    """Rows of a table as of now, though they are written later.

    storage  the table's memory
    wanted   the rows
    budget   for the copies of those that are written before they have been read
    """

    def __init__(self, storage: Storage, wanted: Bits, budget: Budget) -> None:
        self.storage, self.row_slots = storage, storage.row_slots
        self.wanted = wanted
        self.count = count_bits(wanted)
        self._pending = wanted.copy()  # neither read nor copied aside
        self._aside: list[tuple[Ids, Rows, Rows]] = []  # in the order of the writes
        self._sorted: dict[int, list[tuple[Ids, Rows, Rows]]] = defaultdict(list)  # by bucket, ids ascending
        V, planes, D = storage.shape
        self._rows = V
        self._bucket = -(-V // _BUCKETS)
        self._first_bucket = 0  # that is not freed
        self._budget = budget
        self._lock = threading.Lock()
        self.ended = threading.Event()  # all has been read, or nobody is going to
        self._row_bytes = 4 * (planes * D + self.row_slots.shape[1])

    def save_before_write(self, ids: Ids) -> None:
        """Copy those of the rows ids [N] aside that have not been read; waits where there is no room for copies."""
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
                self._aside.append((rows, self.storage.taken(rows), taken(self.row_slots, rows)))
            self._budget.add(count * self._row_bytes)
        self._budget.seconds += time.perf_counter() - begin

    def read(self, first: int, last: int, ids: Ids | None, columns: Rows, row_columns: Rows) -> None:
        """Copy rows of [first, last) to columns; ranges come in ascending order, from one thread.

        ids          int64 [N], ascending: which of them; None for all, N = last - first
        columns      float32 [1 + S, N, D], written
        row_columns  float32 [R, N], written
        """
        step = max(1, _AT_ONCE_BYTES // self._row_bytes)
        N = columns.shape[1]
        for start in range(0, N, step):
            stop = min(N, start + step)
            rows = ids[start:stop] if ids is not None else np.arange(first + start, first + stop)
            with self._lock:
                self.storage.copy_to_columns(start, stop, first, ids, columns)
                row_columns[:, start:stop] = self.row_slots[rows].T
                take(rows, self._pending, scratch("rows read", (len(rows),), rows.dtype))
                aside, self._aside = self._aside, []
            while aside:
                self._sort_in([aside.pop() for _ in range(min(_SORTED_AT_ONCE, len(aside)))])
            self._take_aside(rows, columns[:, start:stop], row_columns[:, start:stop])
        self._free(last)

    def _sort_in(self, aside: list[tuple[Ids, Rows, Rows]]) -> None:
        """File copies by the rows' buckets; in few steps, as training's threads want Python's lock."""
        ids, rows, row_slots = (np.concatenate(parts) for parts in zip(*aside, strict=True))
        order = np.argsort(ids)
        ids = ids[order]
        buckets = ids // self._bucket
        edges = np.flatnonzero(np.diff(buckets, prepend=-1))
        for begin, end in zip(edges, [*edges[1:], len(ids)], strict=True):
            part = order[begin:end]
            kept = ids[begin:end].copy(), taken(rows, part), taken(row_slots, part)
            self._sorted[int(buckets[begin])].append(kept)

    def _take_aside(self, rows: Ids, columns: Rows, row_columns: Rows) -> None:
        """Put copies in the place of rows that may have been written."""
        first, last = int(rows[0]), int(rows[-1]) + 1
        for bucket in range(first // self._bucket, (last - 1) // self._bucket + 1):
            for ids, values, row_slots in self._sorted.get(bucket, ()):
                begin, end = np.searchsorted(ids, (first, last))
                if begin < end:
                    of_these = ids[begin:end]
                    place_in_columns(values[begin:end], of_these, rows, columns)
                    place_in_columns(row_slots[begin:end, :, None], of_these, rows, row_columns[:, :, None])

    def _free(self, last: int) -> None:
        """Let go of the copies of rows before `last`."""
        done = self._rows if last >= self._rows else last // self._bucket
        for bucket in [bucket for bucket in self._sorted if bucket < done]:
            freed = sum(len(ids) for ids, _, _ in self._sorted.pop(bucket))
            self._budget.add(-freed * self._row_bytes)

    def rows_between(self, first: int, last: int) -> Ids:
        """Return the wanted rows of [first, last), int64, ascending."""
        out = np.empty(last - first, np.int64)
        return out[: rows_between(first, last, self.wanted, out)].copy()

    def end(self) -> None:
        """Copy nothing any more: all has been read, or nobody is going to."""
        self.ended.set()
        with self._lock:
            left = sum(len(kept[0]) for kept in self._aside)
            left += sum(len(kept[0]) for parts in self._sorted.values() for kept in parts)
            self._aside = []
            self._sorted.clear()
        self._budget.add(-left * self._row_bytes)


class Changes:
    """What is noted of a table's rows, at a bit a row, when they are written.

    storage  the table's memory, as in `Snapshot`
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._rows = storage, storage.shape[0]
        self._touched = bits_for(self._rows)  # since the last snapshot
        self._unsaved: list[Bits] = []  # of snapshots that were not saved
        self.since: Any = None  # what they are counted from: whoever saves notes it here
        self._snapshot: Snapshot | None = None

    @property
    def touched(self) -> Bits:
        """The rows written since the last snapshot that was saved."""
        for bits in self._unsaved:
            self._touched |= bits
        self._unsaved = []
        return self._touched

    def before_write(self, ids: Ids) -> None:
        """Note that rows ids [N] are about to be written; one thread at a time."""
        if self._snapshot is not None:
            self._snapshot.save_before_write(ids)
        mark(ids, self._touched)

    def begin(self, budget: Budget, *, everything: bool) -> Snapshot:
        """Return a snapshot of the rows written since the last one, or of all; nobody writes in the meantime.

        RuntimeError while the one before has not ended.
        """
        if self._snapshot is not None:
            raise RuntimeError("a snapshot of this table is being saved")
        wanted = all_bits(self._rows) if everything else self.touched
        self._unsaved = []
        self._snapshot = snapshot = Snapshot(self._storage, wanted, budget)
        self._touched = bits_for(self._rows)
        return snapshot

    def await_end(self) -> None:
        """Wait until the snapshot that there is has been read, or given up."""
        if self._snapshot is not None:
            self._snapshot.ended.wait()

    def end(self, snapshot: Snapshot, *, saved: bool) -> None:
        """End a snapshot; where it was not saved, its rows count as not saved."""
        snapshot.end()
        if not saved:
            self._unsaved.append(snapshot.wanted)  # others may be marking rows
        self._snapshot = None
