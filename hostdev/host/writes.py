"""Writes of a host table: its rows are edited, overwritten, or set to those of a checkpoint.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import check_rows, require_finite
from hostdev.core.ids import checked_positions
from hostdev.core.launched import require_alone
from hostdev.core.table_dtypes import TableStep
from hostdev.host.changes import Changes
from hostdev.host.reads import Positions, ReadableTable, Rows
from hostdev.host.snapshot import Budget, Copies, Snapshot
from hostdev.host.writing import Writing
from hostdev.kernels.arrays import Ids
from hostdev.kernels.pool import Task, run_tasks


class WritableTable(ReadableTable):
    """The methods of `HostTable` that write rows, and that record which rows were written."""

    changes: Changes | None  # tracked from the first checkpoint on
    untouched: bool  # all rows have their initial values
    may_train: bool  # if False, `_require_alone` decides

    @contextmanager
    def writing(self, ids: npt.ArrayLike | None = None) -> Iterator[Writing]:
        """Edit copies of weights and optimizer state; at the end of the `with` block, write changed rows to the table.

        ::

            with table.writing() as w:  # all rows; or writing(ids), for large tables
                w.weights *= 0.5
                w.slots["m"][:] = 0

        `w.weights` is float32 [V, D], and `w.slots[name]` is [V, D], or [V, 1] for per-row state; with `ids`, the first
        dimension is N instead of V. Each copy is made when it is first used. After any error, the table is unchanged.

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
        columns = self._current_columns(self.capabilities.formats)
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
            block, row_slots = self._read(ids, self.capabilities.formats)
            for number, name in enumerate(("weights", *self.optimizer.slots)):
                one.put(name, numbers, block[:, number])
            for number, name in enumerate(self.optimizer.row_slots):
                one.put(name, numbers, row_slots[:, number : number + 1])
            self.write_now(ids, block, row_slots)

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
        self.write_now(ids, block, row_slots, positions)
        self._after_write(ids)

    def write_now(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Do what `write_rows_tasks` does, for any distinct rows; nothing is checked."""
        for some, at in self.storage.held(ids, positions, read=self.changes is not None):  # a snapshot may copy them
            run_tasks(self.write_rows_tasks(some, block, row_slots, at))

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
        tasks = self.storage.write_tasks(ids, block, row_slots, positions)
        self._note_write(ids)
        return tasks

    def _require_alone(self) -> None:
        """Raise UserError if other processes train copies of this table, which would diverge."""
        if not self.may_train:
            require_alone(
                f"the training of table {self.name!r}", "give HostTable part=ranks.part(), and Runtime ranks=ranks"
            )
            self.may_train = True

    def _note_write(self, ids: Ids) -> None:
        """Record that rows are about to be written; a snapshot in progress first copies those it has not read."""
        self.untouched = False
        if self.changes is not None:
            self.changes.before_write(ids)

    def update_tasks(
        self, ids: Ids, grads: Rows, step: TableStep | None = None, positions: Positions | None = None
    ) -> list[Task]:
        """Return the work of `update` as tasks; if `step` is None, this call begins a new step and counts it."""
        check_rows("grads", grads, (len(ids if positions is None else grads), self.dim), self.name)
        step = step or self.begin_step()
        self._note_write(ids)
        return self.storage.update_tasks(ids, grads, step, positions)

    def close(self) -> None:
        """Remove the files of a table on disk, whose rows are then lost; for other tables, this has no effect.

        This also happens when the table is freed, or the program ends.
        """
        self.storage.close(self.changes)

    def begin_snapshot(self, budget: Budget, *, everything: bool, copies: Copies | None = None) -> Snapshot:
        """Begin a snapshot of all rows, or of those written since the last saved one; see `Changes.begin`.

        `copies` copies the places of all rows on disk; None for a snapshot that copies values.
        """
        return self.note_changes().begin(budget, everything=everything, copies=copies)

    def end_snapshot(self, changes: Changes, snapshot: Any, *, saved: bool) -> None:  # Any: of either kind
        """End a snapshot; if it was not saved, its rows count as changed again.

        `changes` is the tracker that was in use when the snapshot began.
        """
        changes.end(snapshot, saved=saved)

    def note_changes(self, *, anew: bool = False) -> Changes:
        """Track changes from now on and return the tracker; with `anew`, forget all earlier changes."""
        if self.changes is None or anew:
            self.changes = Changes(self.storage)
        return self.changes
