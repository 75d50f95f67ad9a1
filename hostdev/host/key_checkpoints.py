"""The keys of a table by key, reads of its whole columns in their order, snapshots, and loading of checkpoints.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import KeyArrays, KeyColumns
from hostdev.host.changes import Changes
from hostdev.host.key_snapshot import KeySnapshot, gone_since
from hostdev.host.key_steps import SteppedKeys
from hostdev.host.snapshot import Budget, Copies, RowCopies
from hostdev.kernels.key_directory import EMPTY
from hostdev.kernels.key_parts import owners_of
from hostdev.kernels.norm import partial_squares

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]


class OrderedColumn:
    """A column in another order; indexing by slices or positions yields float32.

    Args:
        column: An array or a view [V, any], which rows index.
        rows: int32 [K], the rows in order.
    """

    def __init__(self, column: Any, rows: npt.NDArray[np.int32]) -> None:
        self._column, self._rows = column, rows
        self.shape = len(rows), column.shape[1]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Rows:
        found: Rows = self._column[self._rows[at]]
        return found


def columns_in_order(
    table: Any, rows: npt.NDArray[np.int32], *, after_all_steps: bool = False
) -> Mapping[str, OrderedColumn]:
    """Return the weights and optimizer state of a `HostTable` by name, in the order `rows`.

    With `after_all_steps`, they have all steps of the table; otherwise they are as they are stored.
    """
    found = table._current_columns() if after_all_steps else table._columns()
    return {name: OrderedColumn(column, rows) for name, column in found.items()}


class CheckpointedKeys(SteppedKeys):
    """The methods of a table by key that tell which keys it has, that read all its rows, or that checkpoints call."""

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
        return self._in_order("weights")

    @property
    def slots(self) -> Mapping[str, Rows]:
        """Copies of the optimizer state by name, each float32 [K, D], or [K, 1], in the order of `keys`."""
        self._before_read()
        self._require_copies("slots", self.dim * len(self.optimizer.slots))
        return {name: self._in_order(name) for name in (*self.optimizer.slots, *self.optimizer.row_slots)}

    @property
    def row_slots(self) -> Rows:
        """A copy of the per-row state, float32 [K, R], in the order of `keys`."""
        self._before_read()
        return self.storage.row_slots[self.committed().rows]

    @property
    def block(self) -> NoReturn:
        """Raise TypeError: rows are in no order that has a meaning."""
        raise TypeError(f"table {self.name!r} is a table by key, whose rows have no order; use read_rows(keys, ...)")

    def _in_order(self, name: str) -> Rows:
        found = columns_in_order(self, self.committed().rows, after_all_steps=True)[name]
        return np.ascontiguousarray(found[:])

    def columns(self) -> dict[str, Any]:  # Any: see `HostTable.columns`
        """Return stored weights and optimizer state as `HostTable.columns` does, in the order of `keys`."""
        self._before_read()
        return dict(columns_in_order(self, self.committed().rows))

    def key_arrays(self) -> KeyArrays:
        """Return the keys for a digest."""
        self._before_read()
        found = self.committed()
        arrays = found.keys, found.last, found.uses, *found.waiting, found.sketch
        return KeyArrays(found.step, list(self.unknown_rows), *arrays)

    def stored_columns(self) -> Mapping[str, OrderedColumn]:
        """Return stored weights and optimizer state: the out-of-vocabulary rows by name, then the rows of `keys`."""
        self._before_read()
        rows = np.array(list(self.unknown_rows.values()), np.int32)
        return columns_in_order(self, np.concatenate([rows, self.committed().rows]))

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
            gone = gone_since(self._gone)
            gone = gone[self.index.find_committed(gone) == EMPTY]
            changed = None if everything else changes.touched
            shared = budget, self.unknown_rows, found, changed, gone
            snapshot = KeySnapshot(copies or RowCopies(self.storage), self.storage.shape[0], *shared)
            changes.begin_with(snapshot)
            self._gone = []
            return snapshot

    def end_snapshot(self, changes: Changes, snapshot: Any, *, saved: bool) -> None:  # Any: of either kind
        """See `HostTable.end_snapshot`; the keys of a snapshot that was not saved also count as changed again."""
        if not saved and changes is self.changes:
            self._gone.append(snapshot.gone)
        changes.end(snapshot, saved=saved)

    def note_changes(self, *, anew: bool = False) -> Changes:
        """See `HostTable.note_changes`."""
        if anew:
            self._gone = []
        return super().note_changes(anew=anew)

    def load_rows(self, found: KeyColumns, block: Rows, row_slots: Rows) -> None:
        """Write rows of a checkpoint: keys [N], all different, with block [N, 1 + S, D] and row_slots [N, R].

        Keys of other ranks are left out.

        Raises:
            ValueError: As for `write_rows`.
            UserError: The table's capacity is too small.
        """
        self._check_values(found.keys, block, row_slots, None)
        if not (mine := self.owns(found.keys)).all():
            found, block, row_slots = found.at(mine), block[mine], row_slots[mine]
        with self._rekeying():
            rows = self._add(*found)
            self.index.set_uses(rows, found.last, found.uses)
            self._forget(rows)  # new ones may be on disk under another key
            self.write_now(rows, block, row_slots)

    def place_rows(self, found: KeyColumns) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """Give keys [N] of a checkpoint, all different, a row each; return these rows, and whose keys they are [N].

        Keys of other ranks are left out. The caller sets the rows' values.
        """
        mine = self.owns(found.keys)
        found = found.at(mine)
        with self._rekeying():
            rows = self._add(*found)
            self.index.set_uses(rows, found.last, found.uses)
            self._note_write(rows)
        return rows, mine

    def place_unknown(self, names: Sequence[str]) -> Positions:
        """Return the out-of-vocabulary rows of a checkpoint, if this rank has them; the caller sets their values."""
        with self._rekeying():
            rows = np.array([self.unknown_row(name) for name in names if self.is_first], np.int32)
            self._note_write(rows)
        return rows

    def load_unknown(self, names: Sequence[str], block: Rows, row_slots: Rows) -> None:
        """Write the out-of-vocabulary rows of a checkpoint, if this rank has them; arguments as for `load_rows`."""
        if not self.is_first:
            return
        rows = np.array([self.unknown_row(name) for name in names], np.int32)
        self._check_values(rows, block, row_slots, None)
        with self._rekeying():
            self.write_now(rows, block, row_slots)

    def reseed(self, seed: int) -> None:
        """Set the seed to that of a checkpoint, since it decides the values of new rows."""
        with self._rekeying():
            self.seed, self._initial = seed, (seed, self._initial[1])
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
