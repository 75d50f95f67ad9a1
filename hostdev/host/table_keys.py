"""The keys of a table by key: which row each has, and how the steps that the pipeline plans ahead change this.

`KeyIndex` decides which keys have a row. `TableKeys` also gives new rows their values, and provides the values that
keys without a row read. Row numbers are private.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import INITIAL, SHARED, ZEROS, KeyColumns
from hostdev.host.committed_keys import CommittedKeys, KeySnapshot, gone_since
from hostdev.host.key_index import KeyIndex
from hostdev.host.key_plan import EvictionReports, GuestRows, KeyCount, PlannedKeys, Total
from hostdev.host.rows import TableRows
from hostdev.host.snapshot import Budget, Copies, RowCopies
from hostdev.kernels.arrays import Ids, Keys, Positions
from hostdev.kernels.counter import key64
from hostdev.kernels.key_directory import EMPTY
from hostdev.kernels.shards import owners_of


class TableKeys:
    """The keys of a table.

    Args:
        rows: The table's rows.
        index: The index of the keys' rows, still without keys.
        unknown: What keys without a row read, one of `core.keys.UNKNOWN`.
        part: (rank, ranks) if this rank has only the keys that it owns, else None.

    Attributes:
        lock: Held while the index is read or changed.
        counts: A list to which each finished step appends its numbers of keys; None to record none.
        reports: Evictions, for `KeyTable.on_evict`.
    """

    def __init__(self, rows: TableRows, index: KeyIndex, unknown: str, part: tuple[int, int] | None) -> None:
        self._rows, self.unknown, self._part = rows, unknown, part
        self.lock = threading.RLock()
        self.reports = EvictionReports()
        self.counts: list[KeyCount] | None = None
        self.unknown_rows: Mapping[str, int] = {}
        self.begin(index)

    def begin(self, index: KeyIndex) -> None:
        """Begin with an index without keys; give each name of an out-of-vocabulary row a new row in it."""
        names = ["", *self.unknown_rows]
        self.index, self._first_step = index, 0  # `_first_step`: the table's step count when the index was at step 0
        self.unknown_rows = {}
        self.use_unknown(names)

    @property
    def is_first(self) -> bool:
        """Whether this process has the out-of-vocabulary rows."""
        return self._part is None or self._part[0] == 0

    def owns(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which keys, int64 [N], this rank owns, bool [N]; a key's owner depends only on the number of ranks."""
        if self._part is None:
            return np.ones(len(keys), np.bool_)
        rank, ranks = self._part
        found: npt.NDArray[np.bool_] = owners_of(keys, ranks) == rank
        return found

    def committed(self) -> CommittedKeys:
        """Return the table's keys after its last finished step, with their rows."""
        with self.lock:
            return self.index.committed()

    def unknown_row(self, name: str = "") -> int:
        """Return the out-of-vocabulary row `name`, which keys without a row use; make it if there is none.

        The first rank has these rows; others return EMPTY. If such keys read zeros, there is one row of zeros, which no
        step updates; if they read their own initial values, there is one row, which nothing reads.
        """
        if not self.is_first:
            return EMPTY
        if self.unknown != SHARED:
            name = ""
        with self.lock:
            if name not in self.unknown_rows:
                key = np.array([key64(0, "out of vocabulary", name)], np.uint64).view(np.int64)
                row = self.index.take_row(int(key[0]))
                self.unknown_rows = dict(sorted({**self.unknown_rows, name: row}.items()))
                self._fill(np.array([row], np.int32), self._rows.history.steps)
            return self.unknown_rows[name]

    def use_unknown(self, names: Iterable[str]) -> None:
        """Make the rows of `unknown_row` for these names."""
        for name in dict.fromkeys(names):
            self.unknown_row(name)

    def _fill(self, rows: Positions, step: int) -> None:
        """Write the values that keys without a row read: zeros, or initial values whose last step is `step`."""
        self._rows.fill_unused(rows, None if self.unknown == ZEROS else step)

    def are_unused(self, rows: Ids) -> npt.NDArray[np.bool_]:
        """Return which rows [N] no key and no feature uses after the last planned step, bool [N]."""
        with self.lock:
            found: npt.NDArray[np.bool_] = self.index.are_unused(rows) & ~np.isin(rows, [*self.unknown_rows.values()])
            return found

    def find_rows(self, keys: Keys) -> Positions:
        """Return the rows of keys [N] after the last finished step, int32 [N]; EMPTY for a key without a row."""
        with self.lock:
            return self.index.find_committed(keys)

    def find_or_guest(self, keys: Keys) -> tuple[Positions, GuestRows | None]:
        """Return the rows of distinct keys [U] as `find_rows` does, for a batch that only reads.

        If keys without a row read their own initial values, they get rows for this batch, which must keep a reference
        to the second result while it uses them.
        """
        rows = self.find_rows(keys)
        strangers = np.flatnonzero(rows == EMPTY)
        if self.unknown != INITIAL or not len(strangers):
            return rows, None
        with self.lock:
            guests = self.index.take_guests(keys[strangers])
            rows[strangers] = guests
            self._fill(guests, self._rows.history.steps)
            return rows, GuestRows(guests, self.index.returned)

    def plan(
        self, keys: Keys, uses: npt.NDArray[np.int32], *, may_read: bool, total: Total | None = None
    ) -> PlannedKeys:
        """Plan the next step, see `KeyIndex.plan`, and initialize the rows of new keys.

        `may_read` is whether all earlier steps are finished, with all rows on the host.
        """
        with self.lock:
            if not self.index.unfinished:
                self._first_step = self._rows.history.steps - self.index.step
            planned = self.index.plan(keys, uses, self._rows.square_norms if may_read else None, total)
            try:
                before = self._first_step + self.index.step + self.index.unfinished - 1
                self._rows.fill_unused(planned.rows[planned.new], before)
                self._fill(planned.guests, before)
            except BaseException:
                self.index.rollback(self.index.unfinished - 1)
                raise
            return planned

    def commit(self) -> tuple[Positions, Positions]:
        """Finish the first planned step; return the rows that it evicted, and those that were for this step alone.

        `retire` makes the former free, and `release` the latter.
        """
        with self.lock:
            evicted, guests, counts = self.index.commit()
            if self.counts is not None:
                self.counts.append(counts)
            if self._rows.changes is not None and len(evicted):
                self._rows.changes.gone.append(self.index.keys[evicted])
            return evicted, guests

    def rollback(self) -> None:
        """Undo all planned steps that are not finished."""
        with self.lock:
            self.index.rollback()

    def release(self, rows: Positions) -> None:
        """Make rows free that were for one step alone; the caller no longer uses them."""
        self._rows.forget(rows)
        with self.lock:
            self.index.release(rows)

    def retire(self, rows: Positions) -> None:
        """Add a step's evictions to `reports`, and make the evicted rows free; the caller no longer uses them."""
        if self.reports:
            self.reports.add(self.index.keys[rows], lambda at: np.ascontiguousarray(self._rows.read(rows[at])[0][:, 0]))
        self.release(rows)

    def erase(self, keys: Keys) -> None:
        """Forget keys, and write zeros to their rows; see `KeyTable.erase`."""
        rows = self.index.erase(keys)
        self._rows.fill_unused(rows, None)
        self._rows.forget(rows)
        if len(keys):  # even if none has a row now: records of a key's former row may be on disk
            self._rows.storage.taint()
        self.index.keys[rows] = 0
        self.index.release(rows)

    def place(self, keys: Keys, last: npt.NDArray[np.uint32], uses: npt.NDArray[np.uint32]) -> Positions:
        """Return the rows of distinct keys; keys without a row get one, with their last steps and uses."""
        rows = self.index.find(keys)
        new = np.flatnonzero(rows == EMPTY)
        rows[new] = self.index.add(keys[new], last[new], uses[new])
        return rows

    def place_saved(self, names: Sequence[str], found: KeyColumns) -> tuple[Positions, Any]:
        """Give keys [N] of a checkpoint rows; the first ones have the out-of-vocabulary rows `names`.

        Return this rank's rows, int32 [any], and an index that selects their keys from arrays [N].
        """
        mine = self.owns(found.keys)
        mine[: len(names)] = self.is_first
        own = [self.unknown_row(name) for name in names if self.is_first]
        keys = found.at(len(names) + np.flatnonzero(mine[len(names) :]))
        rows = self.place(*keys)
        self.index.set_uses(rows, keys.last, keys.uses)
        return np.concatenate([np.array(own, np.int32), rows]), slice(None) if mine.all() else mine

    def begin_snapshot(self, budget: Budget, *, everything: bool, copies: Copies | None) -> KeySnapshot:
        """See `HostTable.begin_snapshot`. During the call, planned steps may fill rows, but no step may be taken."""
        changes = self._rows.note_changes()
        with self.lock, self._rows.noting:
            found = self.index.committed()
            gone = gone_since(changes.gone)
            gone = gone[self.index.find_committed(gone) == EMPTY]
            changed = None if everything else changes.touched
            storage, shared = self._rows.storage, (budget, self.unknown_rows, found, changed, gone)
            snapshot = KeySnapshot(copies or RowCopies(storage), storage.shape[0], *shared)
            changes.begin_with(snapshot)
            return snapshot
