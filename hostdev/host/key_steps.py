"""The steps of a table by key, which the pipeline plans ahead, and its checkpoints.

Steps also find the rows that keys without a row read. Their methods take and return row numbers, which are private.
Checkpoints read whole columns in the order of the keys, by snapshots, and are loaded again.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import INITIAL, SHARED, ZEROS, KeyArrays, KeyColumns
from hostdev.host.committed_keys import CommittedKeys, KeySnapshot, gone_since
from hostdev.host.key_index import KeyIndex
from hostdev.host.key_plan import EvictionReports, GuestRows, KeyCount, PlannedKeys, Total
from hostdev.host.snapshot import Budget, Copies, RowCopies
from hostdev.host.storage import ReadColumn
from hostdev.host.writes import WritableTable
from hostdev.kernels.arrays import Ids, Keys, Positions, Rows
from hostdev.kernels.counter import key64
from hostdev.kernels.key_directory import EMPTY
from hostdev.kernels.norm import partial_squares
from hostdev.kernels.shards import owners_of

_AT_ONCE = 1 << 16  # rows that are filled or read at a time


class SteppedKeys(WritableTable):
    """The methods of a table by key that the pipeline calls for each batch, or that read or load all rows."""

    index: KeyIndex
    _lock: threading.RLock  # held while the index is read or changed
    _noting: threading.Lock  # held while rows are recorded as changed
    unknown: str  # one of UNKNOWN
    key_counts: list[KeyCount] | None
    _unknown: dict[str, int]  # out-of-vocabulary rows by name
    _reports: EvictionReports
    _first_step: int  # the table's step count when the index was at step 0

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
                self.changes.gone.append(self.index.keys[evicted])
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
        for part, block, row_slots in self.row_format.initial(self.row_ids(rows)):
            self.history.stamp(row_slots, step)
            self._write_unused(rows[part], block, row_slots)

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

    def owns(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which keys, int64 [N], this rank owns, bool [N]; they depend on the number of ranks only."""
        if self.part is None:
            return np.ones(len(keys), np.bool_)
        rank, ranks = self.part
        found: npt.NDArray[np.bool_] = owners_of(keys, ranks) == rank
        return found

    @property
    def weights(self) -> Rows:
        """A copy of the weights, float32 [K, D], in the order of `keys`."""
        self._before_read()
        self._require_copies("weights", self.dim)
        return np.ascontiguousarray(self._in_order(self.committed().rows, current=True)["weights"][:])

    @property
    def slots(self) -> Mapping[str, Rows]:
        """Copies of the optimizer state by name, each float32 [K, D], or [K, 1], in the order of `keys`."""
        self._before_read()
        self._require_copies("slots", self.dim * len(self.optimizer.slots))
        columns = self._in_order(self.committed().rows, current=True)
        return {name: np.ascontiguousarray(column[:]) for name, column in columns.items() if name != "weights"}

    @property
    def row_slots(self) -> Rows:
        """A copy of the per-row state, float32 [K, R], in the order of `keys`."""
        self._before_read()
        return self.storage.row_slots[self.committed().rows]

    @property
    def block(self) -> NoReturn:
        """Raise TypeError: rows are in no order that has a meaning."""
        raise TypeError(f"table {self.name!r} is a table by key, whose rows have no order; use read_rows(keys, ...)")

    def _in_order(self, rows: Positions, *, current: bool = False) -> dict[str, Any]:
        """Return what `_columns` does, in the order `rows`."""
        return {
            name: ReadColumn(len(rows), column.shape[1], lambda at, column=column: column[rows[at]])  # type: ignore[misc]
            for name, column in self._columns(current=current).items()
        }

    def columns(self) -> dict[str, Any]:  # Any: see `HostTable.columns`
        """Return stored weights and optimizer state as `HostTable.columns` does, in the order of `keys`."""
        self._before_read()
        return self._in_order(self.committed().rows)

    def key_arrays(self) -> KeyArrays:
        """Return the keys for a digest."""
        self._before_read()
        found = self.committed()
        arrays = found.keys, found.last, found.uses, *found.waiting, found.sketch
        return KeyArrays(found.step, list(self.unknown_rows), *arrays)

    def stored_columns(self) -> Mapping[str, ReadColumn]:
        """Return stored weights and optimizer state: the out-of-vocabulary rows by name, then the rows of `keys`."""
        self._before_read()
        rows = np.array(list(self.unknown_rows.values()), np.int32)
        return self._in_order(np.concatenate([rows, self.committed().rows]))

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """Return the sums of squares of the weights, in the order of `keys`."""
        return partial_squares(np.ascontiguousarray(self.weights)[:, None])

    def begin_snapshot(self, budget: Budget, *, everything: bool, copies: Copies | None = None) -> KeySnapshot:
        """Begin a snapshot of all rows, or of those written since the last saved one; see `Changes.begin`.

        `copies` copies rows; None for one that copies values. Rows that are planned ahead may be filled meanwhile, but
        no step may be taken.
        """
        changes = self.note_changes()
        with self._lock, self._noting:
            found = self.index.committed()
            gone = gone_since(changes.gone)
            gone = gone[self.index.find_committed(gone) == EMPTY]
            changed = None if everything else changes.touched
            shared = budget, self.unknown_rows, found, changed, gone
            snapshot = KeySnapshot(copies or RowCopies(self.storage), self.storage.shape[0], *shared)
            changes.begin_with(snapshot)
            return snapshot

    def load_rows(self, names: Sequence[str], found: KeyColumns, block: Rows, row_slots: Rows) -> None:
        """Write rows of a checkpoint: arguments as for `place_rows`, with block [N, 1 + S, D] and row_slots [N, R].

        Raises:
            ValueError: As for `write_rows`.
            UserError: The table's capacity is too small.
        """
        self._check_values(found.keys, block, row_slots, None)
        with self._rekeying():
            rows, chosen = self._place(names, found)
            self._forget(rows)  # new ones may be on disk under another key
            self.write_now(rows, block[chosen], row_slots[chosen])

    def place_rows(self, names: Sequence[str], found: KeyColumns) -> tuple[Positions, Any]:
        """Give keys [N] of a checkpoint, all different, a row each; the first are out-of-vocabulary rows with `names`.

        Return the rows of this rank, and which of the keys have them: an index of arrays [N]. The caller sets the rows'
        values.
        """
        with self._rekeying():
            rows, chosen = self._place(names, found)
            self._note_write(rows)
        return rows, chosen

    def _place(self, names: Sequence[str], found: KeyColumns) -> tuple[Positions, Any]:
        mine = self.owns(found.keys)
        mine[: len(names)] = self.is_first
        own = [self.unknown_row(name) for name in names if self.is_first]
        keys = found.at(len(names) + np.flatnonzero(mine[len(names) :]))
        rows = self._add(*keys)
        self.index.set_uses(rows, keys.last, keys.uses)
        return np.concatenate([np.array(own, np.int32), rows]), slice(None) if mine.all() else mine

    def reseed(self, seed: int) -> None:
        """Set the seed to that of a checkpoint, since it decides the values of new rows."""
        with self._rekeying():
            self.seed, self.row_format = seed, replace(self.row_format, seed=seed)
            self.index.reseed(seed)

    def restore_keys(
        self, step: int, decays: int, waiting: Keys, counts: npt.NDArray[np.int64], sketch: npt.NDArray[np.uint32]
    ) -> None:
        """Set what a checkpoint has besides rows; see `KeyIndex.restore`. Keys of other ranks are left out."""
        mine = self.owns(waiting)
        with self._rekeying():
            self.index.restore(step, decays, waiting[mine], counts[mine])
            if len(sketch):
                self.index.restore_sketch(sketch)

    def forget(self, keys: Keys) -> None:
        """Remove keys while a checkpoint is loaded."""
        with self._rekeying():
            self.index.release(self.index.erase(keys))

    def _add(self, keys: Keys, last: npt.NDArray[np.uint32], uses: npt.NDArray[np.uint32]) -> Positions:
        """Return the rows of distinct keys; those that have none get one, with this last step and uses."""
        rows = self.index.find(keys)
        new = np.flatnonzero(rows == EMPTY)
        rows[new] = self.index.add(keys[new], last[new], uses[new])
        return rows
