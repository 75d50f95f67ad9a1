"""The steps of a table by key, which the pipeline plans ahead, and the rows that keys without a row read.

Methods take and return row numbers, which are private.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import INITIAL, SHARED, ZEROS
from hostdev.host.committed_keys import CommittedKeys
from hostdev.host.free_rows import GuestRows
from hostdev.host.key_eviction import EvictionReports, Total
from hostdev.host.key_index import KeyIndex
from hostdev.host.key_plan import KeyCount, PlannedKeys
from hostdev.host.storage import Shape
from hostdev.host.writes import WritableTable
from hostdev.kernels.arrays import Ids
from hostdev.kernels.counter import key64
from hostdev.kernels.key_directory import EMPTY

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]

_AT_ONCE = 1 << 16  # rows that are filled or read at a time


class SteppedKeys(WritableTable):
    """The methods of a table by key that the pipeline calls for each batch."""

    index: KeyIndex
    _lock: threading.RLock  # held while the index is read or changed
    _noting: threading.Lock  # held while rows are recorded as changed
    _gone: list[Keys]  # keys that have lost their rows since the last checkpoint
    unknown: str  # one of UNKNOWN
    key_counts: list[KeyCount] | None
    _unknown: dict[str, int]  # out-of-vocabulary rows by name
    _reports: EvictionReports
    _first_step: int  # the table's step count when the index was at step 0
    _key_shape: Shape

    @property
    def is_first(self) -> bool:
        """Whether this process has the out-of-vocabulary rows."""
        return self.part is None or self.part[0] == 0

    def committed(self) -> CommittedKeys:
        """Return the table's keys after its last finished step, with their rows."""
        with self._lock:
            return self.index.committed()

    @contextmanager
    def _rekeying(self) -> Iterator[None]:
        """Change keys in a `with` block, while no step of an open loop is planned ahead."""
        self._before_write()
        for owner in self._owners:
            owner.before_rekey(self)
        with self._lock:
            if self.index.unfinished:
                raise ValueError(
                    f"table {self.name!r}: a loop has a batch without its step; change keys after the batch's step, "
                    "or between loops"
                )
            self.untouched = False
            yield

    def unknown_row(self, name: str = "") -> int:
        """Return the row that features with the out-of-vocabulary row `name` use for keys without a row.

        The first rank has these rows; others return EMPTY. If such keys read zeros, there is one row of zeros, which no
        step updates; if they read their own initial values, there is one row, which nothing reads.
        """
        if not self.is_first:
            return EMPTY
        if self.unknown != SHARED:
            name = ""
        with self._lock:
            if name not in self._unknown:
                key = np.array([key64(0, "out of vocabulary", name)], np.uint64).view(np.int64)
                row = self._unknown[name] = self.index.take_row(int(key[0]))
                if self.unknown == ZEROS:
                    self._write_zeros(np.array([row], np.int32))
                else:
                    self._fill(np.array([row], np.int32), self.history.steps)
            return self._unknown[name]

    def use_unknown(self, names: Iterable[str]) -> None:
        """See `Owned`."""
        for name in dict.fromkeys(names):
            self.unknown_row(name)

    @property
    def unknown_rows(self) -> Mapping[str, int]:
        """The rows for keys without a row, by name, in the order of the names."""
        return dict(sorted(self._unknown.items()))

    def are_unused(self, rows: Ids) -> npt.NDArray[np.bool_]:
        """Return which rows [N] no key and no feature uses after the last planned step, bool [N]."""
        with self._lock:
            found: npt.NDArray[np.bool_] = self.index.are_unused(rows) & ~np.isin(rows, list(self._unknown.values()))
            return found

    def find_rows(self, keys: Keys) -> Positions:
        """Return the rows of keys [N] after the last finished step, int32 [N]; EMPTY for a key without a row."""
        with self._lock:
            return self.index.find_committed(keys)

    def find_or_guest(self, keys: Keys) -> tuple[Positions, GuestRows | None]:
        """Return the rows of distinct keys [U] as `find_rows` does, for a batch that only reads.

        If keys without a row read their own initial values, these are in rows for this batch, which must keep the
        second value.
        """
        rows = self.find_rows(keys)
        strangers = np.flatnonzero(rows == EMPTY)
        if self.unknown != INITIAL or not len(strangers):
            return rows, None
        with self._lock:
            guests = self.index.take_guests(keys[strangers])
            rows[strangers] = guests
            self._fill(guests, self.history.steps)
            return rows, GuestRows(guests, self.index.returned)

    def plan(
        self, keys: Keys, uses: npt.NDArray[np.int32], *, may_read: bool, total: Total | None = None
    ) -> PlannedKeys:
        """Plan the next step, see `KeyIndex.plan`, and initialize the rows of new keys.

        `may_read` is whether all earlier steps are finished, with all rows on the host.
        """
        with self._lock:
            if not self.index.unfinished:
                self._first_step = self.history.steps - self.index.step
            planned = self.index.plan(keys, uses, self._norms if may_read else None, total)
            try:
                before = self._first_step + self.index.step + self.index.unfinished - 1
                self._fill(planned.rows[planned.new], before)
                if self.unknown == ZEROS:
                    self._write_zeros(planned.guests)
                else:
                    self._fill(planned.guests, before)
            except BaseException:
                self.index.rollback(self.index.unfinished - 1)
                raise
            return planned

    def commit(self) -> tuple[Positions, Positions]:
        """Finish the first planned step; return the rows that it evicted, and those that were for this step alone.

        `retire` makes the former free, and `release` the latter.
        """
        with self._lock:
            evicted, guests, counts = self.index.commit()
            if self.key_counts is not None:
                self.key_counts.append(counts)
            if self.changes is not None and len(evicted):
                self._gone.append(self.index.keys[evicted])
            return evicted, guests

    def release(self, rows: Positions) -> None:
        """Allow the use of rows that were for one step alone, once nothing uses them any more."""
        self._forget(rows)
        with self._lock:
            self.index.release(rows)

    def _forget(self, rows: Positions) -> None:
        """Free the memory and the disk that rows take which nothing uses any more."""
        self.storage.forget(rows, self.changes)

    def retire(self, rows: Positions) -> None:
        """Allow the use of rows that a step has evicted, once nothing uses them any more; note them for `on_evict`."""
        if self._reports:
            self._reports.add(self.index.keys[rows], lambda at: np.ascontiguousarray(self._read(rows[at])[0][:, 0]))
        self._forget(rows)
        with self._lock:
            self.index.release(rows)

    def on_evict(self, listener: Callable[[Keys, Rows], object]) -> None:
        """From now on, call a function with the keys that each step evicts, and with their weights.

        It is called with int64 [E], in the order of `keys`, and float32 [E, D], once for each step that evicts keys and
        in the order of the steps: in a loop, by the loop's thread some batches later, and at the latest when the loop
        ends. It may read the table. Erased keys are not reported. Each rank reports its own keys.
        """
        self._reports.listeners.append(listener)

    @property
    def reports_evictions(self) -> bool:
        """Whether anybody has called `on_evict`."""
        return bool(self._reports)

    def report_evictions(self) -> None:
        """Call the functions of `on_evict` for evictions that were not reported yet."""
        self._reports.send()

    def rollback(self) -> None:
        """Undo all planned steps that are not finished."""
        with self._lock:
            self.index.rollback()

    def _fill(self, rows: Positions, step: int) -> None:
        """Write the initial values of new rows, whose last step is `step`."""
        _, planes, D = self.storage.shape
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            block = np.empty((len(part), planes, D), np.float32)
            self.storage.initial(self._key_shape, *self._initial, self.index.keys[part], block)
            row_slots = np.empty((len(part), self.storage.row_slots.shape[1]), np.float32)
            row_slots[:] = list(self.optimizer.row_slots.values())
            self.history.stamp(row_slots, step)
            self._write_unused(part, block, row_slots)

    def _write_zeros(self, rows: Positions) -> None:
        _, planes, D = self.storage.shape
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            zeros = np.zeros((len(part), planes, D), np.float32)
            row_slots = np.zeros((len(part), self.storage.row_slots.shape[1]), np.float32)
            self._write_unused(part, zeros, row_slots)

    def _write_unused(self, rows: Positions, block: Rows, row_slots: Rows) -> None:
        """Write rows that no key has; those of a batch that is not stepped do not count as a change of the table."""
        untouched = self.untouched
        self._forget(rows)  # they may be on disk under another key
        self.write_now(rows, block, row_slots)
        self.untouched = untouched

    def _norms(self, rows: Positions) -> npt.NDArray[np.float64]:
        """Return the squares of the norms of rows' weights, float64, summed in the order of the columns."""
        found = np.zeros(len(rows), np.float64)
        for start in range(0, len(rows), _AT_ONCE):
            block, _ = self._read(rows[start : start + _AT_ONCE])
            part = found[start : start + _AT_ONCE]
            for column in range(block.shape[2]):
                part += np.square(block[:, 0, column].astype(np.float64))
        return found
