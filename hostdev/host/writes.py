"""Writes of a host table: by the program (`writing`, `write_rows`) and by the optimizer; and snapshots of its rows.

S and R: number of optimizer state columns with D values per row, and with one value per row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import check_rows, checked_positions, require_finite
from hostdev.core.launched import require_alone
from hostdev.core.memory import require_memory
from hostdev.core.table_dtypes import TableStep
from hostdev.core.tables import ColumnCopies
from hostdev.host.reads import ReadableTable
from hostdev.host.snapshot import Budget, Copies, Snapshot
from hostdev.kernels.arrays import Ids, Positions, Rows
from hostdev.kernels.pool import Task

_PART_BYTES = 1 << 24  # bytes compared or written at a time


class Writing(ColumnCopies):
    """The copies that `HostTable.writing` yields.

    Args:
        table: The table's name, for errors.
        columns: The table's weights and optimizer state by name, each indexed by slices or row ids.
        ids: int32 or int64 [N], all different, or None for all rows.
        rows: V, the number of rows of the table.
    """

    def __init__(self, table: str, columns: Mapping[str, Any], ids: npt.NDArray[Any] | None, rows: int) -> None:
        super().__init__(table, columns)
        self._columns, self._ids = columns, ids
        self._rows = rows if ids is None else len(ids)

    def _copied(self, name: str) -> Rows:
        column = self._columns[name]
        what = f"table {self.table!r}: a copy of {name} for writing"
        require_memory(4 * self._rows * column.shape[1], what, "write fewer rows at a time, with writing(ids)")
        return np.array(column[:] if self._ids is None else column[self._ids], np.float32)

    def changed(self) -> npt.NDArray[np.int64]:
        """Return which rows of the copies differ from the table, as row numbers in the copies, ascending.

        Raises:
            ValueError: A row that differs has a value that is not finite.
        """
        found = []
        width = sum(values.shape[1] for values in self._held.values())
        step = max(1, _PART_BYTES // (4 * max(1, width)))
        for start in range(0, self._rows if self._held else 0, step):
            stop = min(self._rows, start + step)
            differs = np.zeros(stop - start, np.bool_)
            for name, values in self._held.items():
                there = self._columns[name][slice(start, stop) if self._ids is None else self._ids[start:stop]]
                differs |= (np.ascontiguousarray(there).view(np.int32) != values[start:stop].view(np.int32)).any(1)
            rows = np.flatnonzero(differs) + start
            ids = rows if self._ids is None else self._ids[rows]
            require_finite(self.table, ids, *(values[rows] for values in self._held.values()))
            found.append(rows)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def require_exact(
        self, changed: npt.NDArray[np.int64], planes: Sequence[str], check: Callable[[int, Rows], None]
    ) -> None:
        """Call `check`, which is `Storage.require_exact`, with the changed rows of each plane that has a copy."""
        for plane, name in enumerate(planes):
            held = self._held.get(name)
            step = max(1, _PART_BYTES // held[:1].nbytes) if held is not None else 1
            for start in range(0, len(changed) if held is not None else 0, step):
                assert held is not None
                check(plane, held[changed[start : start + step]])

    def parts(self, changed: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield the changed rows in chunks, each as row numbers in the copies and ids in the table."""
        width = sum(column.shape[1] for column in self._columns.values())
        step = max(1, _PART_BYTES // (4 * width))
        for start in range(0, len(changed), step):
            rows = changed[start : start + step]
            yield rows, rows if self._ids is None else self._ids[rows]

    def put(self, name: str, rows: npt.NDArray[np.int64], out: Rows) -> None:
        """If there is a copy of the column `name`, write its rows `rows` to `out`."""
        if name in self._held:
            out[...] = self._held[name][rows]


class WritableTable(ReadableTable):
    """The methods of `HostTable` that write rows, and that record which rows were written."""

    may_train: bool  # if False, `_require_alone` checks that no other process trains a copy

    @contextmanager
    def writing(self, ids: npt.ArrayLike | None = None) -> Iterator[Writing]:
        """Edit copies of weights and optimizer state; at the end of the `with` block, write changed rows to the table.

        ::

            with table.writing() as w:  # all rows; or writing(ids), for large tables
                w.weights *= 0.5
                w.slots["m"][:] = 0

        `w.weights` is float32 [V, D], and `w.slots[name]` is [V, D], or [V, 1] for per-row state; with `ids`, the first
        dimension is N instead of V. Each copy is made when it is first used. If the block or a check of its
        values raises an error, the table is unchanged.

        Args:
            ids: int32 or int64 [N], each in [0, V), all different, or None for all rows.

        Raises:
            ValueError: Values are not finite or not representable in the table's dtypes, ids repeat, or the table is
                written by other means inside the `with` block.
            UserError: An id is outside the table, or there is not enough memory for the copies.
        """
        chosen = self._to_edit(ids)
        if chosen is not None and len(np.unique(chosen)) < len(chosen):
            raise ValueError(f"table {self.name!r}: the ids of writing() must be all different")
        self._before_write()
        columns = self.stored.columns(current=True, formats=self.capabilities.formats)
        one = Writing(self.name, columns, chosen, self.rows)
        self._is_writing = True
        try:
            yield one
            changed = one.changed()
            one.require_exact(changed, ("weights", *self.optimizer.slots), self.storage.require_exact)
        finally:
            one.end()
            self._is_writing = False
        if len(changed):
            self._write_changed(one, changed)
            self._after_write(changed if chosen is None else chosen[changed])

    def _to_edit(self, ids: npt.ArrayLike | None) -> Ids | None:
        """Return the rows to edit, or None for all rows in order."""
        return None if ids is None else self._checked(ids)

    def _write_changed(self, one: Writing, changed: npt.NDArray[np.int64]) -> None:
        for numbers, ids in one.parts(changed):
            block, row_slots = self.stored.read(ids, self.capabilities.formats)
            for number, name in enumerate(("weights", *self.optimizer.slots)):
                one.put(name, numbers, block[:, number])
            for number, name in enumerate(self.optimizer.row_slots):
                one.put(name, numbers, row_slots[:, number : number + 1])
            self.stored.write(ids, block, row_slots)

    def write_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Overwrite rows and their state with arrays shaped as in `read_rows`; the ids must be unique (not checked).

        Raises:
            UserError, TypeError: As for `lookup`.
            ValueError: As for `lookup`, or values are not finite or not representable in the table's dtypes. In these
                cases, nothing is written.
        """
        ids = self._checked(ids)
        positions = checked_positions(positions, len(ids), len(block), self.name)
        self._check_values(ids, block, row_slots, positions)
        self._before_write()
        self.stored.write(ids, block, row_slots, positions)
        self._after_write(ids)

    def _check_values(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None) -> None:
        """Raise an error unless `write_rows` can write these values."""
        self._check_whole(ids, block, row_slots, positions)
        mine = (block, row_slots) if positions is None else (block[positions], row_slots[positions])
        require_finite(self.name, ids, *mine)
        self.history.require_steps(self.name, ids, mine[1])
        for plane in range(mine[0].shape[1]):
            self.storage.require_exact(plane, mine[0][:, plane])

    def write_rows_tasks(
        self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None = None
    ) -> list[Task]:
        """Return the work of `write_rows` as tasks; the table's dtypes must be able to represent all values.

        This is not checked.
        """
        self._check_whole(ids, block, row_slots, positions)
        tasks = self.stored.storage.write_tasks(ids, block, row_slots, positions)
        self.stored.note_write(ids)
        return tasks

    def _require_alone(self) -> None:
        """Raise UserError if this is one of several processes that are not joined: their copies would diverge."""
        if not self.may_train:
            require_alone(
                f"the training of table {self.name!r}", "give HostTable part=ranks.part(), and Runtime ranks=ranks"
            )
            self.may_train = True

    def update_tasks(
        self, ids: Ids, grads: Rows, step: TableStep | None = None, positions: Positions | None = None
    ) -> list[Task]:
        """Return the work of `update` as tasks; if `step` is None, this call begins a new step and counts it."""
        check_rows("grads", grads, (len(ids if positions is None else grads), self.dim), self.name)
        step = step or self.begin_step()
        self.stored.note_write(ids)
        return self.stored.storage.update_tasks(ids, grads, step, positions)

    def close(self) -> None:
        """Remove the files of a table on disk, whose rows are then lost; for other tables, this has no effect.

        This also happens when the table is freed, or the program ends.
        """
        self.storage.close(self.stored.changes)

    def begin_snapshot(self, budget: Budget, *, everything: bool, copies: Copies | None = None) -> Snapshot:
        """Begin a snapshot of all rows, or of those written since the last saved one; see `host.rows.Changes`.

        `copies` is a `LocationCopies` to copy the locations of rows on disk; None to copy values.
        """
        return self.stored.note_changes().begin(budget, everything=everything, copies=copies)
