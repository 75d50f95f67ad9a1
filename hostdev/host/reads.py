"""Reads of a host table: its rows as they are after the last step, and as they are stored.

S and R: number of optimizer state columns with D values per row, and with one value per row.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import check_rows, checked_ids, checked_positions
from hostdev.core.disk_storage import Disk
from hostdev.core.history import History, NoHistory
from hostdev.core.initializers import Initializer
from hostdev.core.memory import require_memory
from hostdev.core.tables import Capabilities, Owned
from hostdev.host.layouts import ReadOnlyRows
from hostdev.host.rows import TableRows
from hostdev.host.storage import RowFormat, Storage
from hostdev.kernels.arrays import Ids, Positions, Rows
from hostdev.kernels.norm import partial_squares, total
from hostdev.kernels.pool import Task, run_tasks

_NO_BLOCK = {  # why a table has no `block`, by capability
    "late": "has an optimizer that changes all rows in each step, but rows in `block` lack the steps that did not use "
    "them; use read_rows, which applies these steps",
    "on_disk": "has rows on disk; use read_rows instead of block",
    "formats": "stores weights or slots in fewer than 32 bits, and in separate arrays; use read_rows instead of block",
}


def _read_only(values: Rows) -> Rows:
    found = values.view(ReadOnlyRows)
    found.flags.writeable = False
    return found


class ReadableTable(Owned):
    """The read methods of `HostTable`."""

    start: int
    disk: Disk | None
    stored: TableRows
    _shown: Callable[[Rows], Rows] = staticmethod(_read_only)  # converts whole columns before they are returned

    def _begin_table(self, how: RowFormat, part: tuple[int, int] | None, disk: Disk | None, *, by_key: bool) -> None:
        """Set the properties of a new table."""
        self.name, self.optimizer, self.dtype, self.slots_dtype = how.name, how.optimizer, how.dtype, how.slots_dtype
        self.seed, self.part, self.disk = how.seed, part, disk
        late, ranks = how.optimizer.catch_up is not None, 1 if part is None else part[1]
        self.capabilities = Capabilities(by_key, disk is not None, late, how.planes, ranks)

    @property
    def storage(self) -> Storage:
        """The storage of the rows' values."""
        return self.stored.storage

    @property
    def history(self) -> NoHistory | History:  # type: ignore[override]
        """The steps so far, or a `NoHistory` if steps change only the rows of their batches; see `core.history`."""
        return self.stored.history

    @property
    def window(self) -> int:  # type: ignore[override]
        """Number of batches that a table on disk looks ahead; 0 for a table in memory."""
        return self.storage.window

    @property
    def rows(self) -> int:
        """Number of local rows, V; below `total_rows` if this is only one rank's part of the table."""
        return self.stored.storage.shape[0]

    @property
    def row_space(self) -> int:
        """One more than the largest row number that the table can use."""
        return self.storage.shape[0]

    @property
    def used_rows(self) -> int:
        """One more than the largest row number that the table has used."""
        return self.storage.shape[0]

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the ids in the whole table, or the keys, of the local rows [start, stop)."""
        return self.stored.ids.between(start, min(stop, self.row_space))

    def row_ids(self, ids: Ids) -> Ids:
        """Return the ids in the whole table, or the keys, of the local rows `ids`."""
        return self.stored.ids.of(ids)

    @property
    def dim(self) -> int:
        """Number of columns, D."""
        return self.stored.format.dim

    @property
    def init(self) -> Initializer:
        """The initializer of the weights."""
        return self.stored.format.init

    @property
    def block(self) -> Rows:
        """A read-only view of all rows, float32 [V, 1 + S, D]: weights, then state columns.

        Raises TypeError if rows are not stored in this form, or if the optimizer changes all rows in each step: stored
        rows then lack the steps that did not use them.
        """
        for capability, reason in _NO_BLOCK.items():
            if getattr(self.capabilities, capability):
                raise TypeError(f"table {self.name!r} {reason}")
        self._before_read()
        return _read_only(self.storage.block)  # type: ignore[attr-defined]  # of `Float32`

    @property
    def row_slots(self) -> Rows:
        """A read-only view of the per-row state, float32 [V, R]; for a table on disk, a copy."""
        self._before_read()
        return _read_only(self.storage.row_slots[:])

    @property
    def weights(self) -> Rows:
        """A read-only view of the weights, float32 [V, D]; use `writing` or `write_rows` to change them.

        While a loop is open, get a new view for each read: an older view lacks unfinished steps and cached rows. The
        result is a float32 copy if the table is on disk, has dtype="bfloat16", or has an optimizer that changes all
        rows in each step; raises UserError if there is not enough memory for the copy. For a table by key, it is a copy
        in the order of `keys`.
        """
        self._before_read()
        return self._get_columns("weights", ("weights",))["weights"]

    @property
    def slots(self) -> Mapping[str, Rows]:
        """Read-only views of the optimizer state by name, each float32 [V, D], or [V, 1] for per-row state.

        Get new views for each read, as with `weights`. With slots="bfloat16" or "8bit", the columns of D values are
        float32 copies. If the table is on disk, or has an optimizer that changes all rows in each step, all results are
        copies. For a table by key, all results are copies in the order of `keys`. Raises UserError if there is not
        enough memory for the copies.
        """
        self._before_read()
        columns = self._get_columns("slots", self.optimizer.slots)
        return MappingProxyType(columns | self._get_columns("per-row state", self.optimizer.row_slots))

    def lookup(self, ids: npt.ArrayLike, out: Rows | None = None, positions: Positions | None = None) -> Rows:
        """Return the weights of rows.

        Args:
            ids: int32 or int64 [N], each in [0, V), duplicates allowed.
            out: Output, float32 [N, D], C-contiguous, or None for a new array.
            positions: int32 [N], distinct (not checked): for each id, the row of `out` to write. `out` may then have
                more than N rows.

        Returns:
            A copy, float32 [N, D], or `out`.

        Raises:
            UserError: An id is outside the table.
            TypeError, ValueError: A dtype or shape is wrong.
        """
        ids = self._checked(ids)
        self._before_read()
        if out is None:
            out = np.empty((len(ids), self.dim), np.float32)
        positions = checked_positions(positions, len(ids), len(out), self.name)
        check_rows("out", out, (len(ids if positions is None else out), self.dim), self.name)
        self.lookup_now(ids, out, positions)
        return out

    def lookup_now(self, ids: Ids, out: Rows, positions: Positions | None = None) -> None:
        """Write what `lookup` returns to `out`, without checks and without notifying open loops."""
        clock = self.history.clock()
        for source, rows, at in self.storage.sources(ids, positions):
            run_tasks(source.lookup_tasks(rows, out, at, clock))

    def lookup_tasks(self, ids: Ids, out: Rows, positions: Positions | None = None) -> list[Task]:
        """Return the work of `lookup` as tasks, for rows that are in memory."""
        check_rows("out", out, (len(ids if positions is None else out), self.dim), self.name)
        return self.storage.lookup_tasks(ids, out, positions, self.history.clock())

    def read_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Copy rows with their optimizer state.

        Args:
            ids: int32 or int64 [N], each in [0, V).
            block: Output, float32 [N, 1 + S, D], C-contiguous: weights, then state of D values.
            row_slots: Output, float32 [N, R], C-contiguous: per-row state.
            positions: int32 [N]: for each id, the row of `block` and of `row_slots` to write, as in `lookup`.

        Raises:
            UserError, TypeError, ValueError: As for `lookup`.
        """
        ids = self._checked(ids)
        positions = checked_positions(positions, len(ids), len(block), self.name)
        self._check_whole(ids, block, row_slots, positions)
        self._before_read()
        self.stored.read_stored(ids, block, row_slots, positions)
        self.history.bring(block, row_slots, positions)

    def read_rows_tasks(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None = None) -> list[Task]:
        """Return tasks that copy rows as `read_rows` does, but as stored, without the steps that they have missed."""
        self._check_whole(ids, block, row_slots, positions)
        return self.stored.storage.read_tasks(ids, block, row_slots, positions)

    def columns(self) -> dict[str, Any]:  # Any: arrays, or columns that are widened as they are read
        """Return the stored weights and optimizer state by name; indexing by slices or row ids yields float32.

        With an optimizer that changes all rows in each step, stored rows lack the steps that did not use them.
        """
        self._before_read()
        return self._columns()

    def _columns(self, *, current: bool = False) -> dict[str, Any]:
        """Return all columns by name, as stored or, if `current`, after the last step."""
        return self.stored.columns(current=current)

    def _get_columns(self, what: str, names: Iterable[str]) -> dict[str, Rows]:
        """Return whole columns after the last step: views or copies; raise UserError if copies do not fit in memory."""
        columns = self._columns(current=True)
        chosen = [columns[name] for name in names]
        copied = [column.shape[1] for column in chosen if not isinstance(column, np.ndarray)]
        self._require_copies(what, sum(copied))
        return {name: self._shown(column[:]) for name, column in zip(names, chosen, strict=True)}

    def where(self, ids: Any) -> tuple[Rows, Any]:  # Any: all that can index an array's rows
        """Return an array of rows with optimizer state, float32 [any, 1 + S, D], and the indices of `ids` in it."""
        if self.capabilities.in_place:
            return self.storage.block, ids  # type: ignore[attr-defined]  # of `Float32`
        return self.stored.read(ids)[0], np.arange(len(ids))

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """Return the sums of squares of the weights, as `kernels.norm.partial_squares` does."""
        self._before_read()
        if self.capabilities.late:
            return partial_squares(np.ascontiguousarray(self.weights)[:, None])
        return self.storage.partial_squares()

    def sum_of_squares(self) -> float:
        """Return the sum of squares of all weights in float64, added in the order of `kernels.norm`."""
        return total(self.partial_squares())

    def _require_copies(self, what: str, width: int) -> None:
        """Raise UserError unless a float32 copy with `width` values per row fits in memory."""
        if width:
            copy = f"table {self.name!r}: a float32 copy of its {what}"
            require_memory(4 * self.rows * width, copy, "look up only the rows that you need")

    def _check_whole(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None) -> None:
        """Raise an error unless `block` and `row_slots` have the dtypes and shapes that `read_rows` describes."""
        _, planes, D = self.storage.shape
        n, R = len(ids if positions is None else block), self.storage.row_slots.shape[1]
        check_rows("block", block, (n, planes, D), self.name)
        check_rows("row_slots", row_slots, (n, R), self.name)

    def _checked(self, ids: npt.ArrayLike) -> Ids:
        return checked_ids(ids, self.rows, self.name)
