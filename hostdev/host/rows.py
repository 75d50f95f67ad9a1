"""The rows of a host table by number: where their values are, which steps they have missed, and which were written.

A host table has a `TableRows`, and checks the ids of its callers; a table by key also has keys, to which it gives rows
(`host.table_keys`). The methods here check nothing, and notify no loop.

S and R: number of optimizer state columns with D values per row, and with one value per row.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.digest import RangeDigests, rows_per_range
from hostdev.core.history import make_history
from hostdev.host.layouts import current_columns
from hostdev.host.snapshot import Budget, Copies, RowCopies, Snapshot
from hostdev.host.storage import RowFormat, RowIds, Storage
from hostdev.kernels.arrays import AnyIds, Ids, Keys, Positions, Rows
from hostdev.kernels.bits import Bits, any_in_ranges, empty_bits, full_bits, mark
from hostdev.kernels.pool import run_tasks

_AT_ONCE = 1 << 16  # rows that are filled or read at a time


class Changes:
    """The set of a table's rows that were written since the last snapshot, one bit per row."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._rows = storage, storage.shape[0]
        self._touched = empty_bits(self._rows)  # rows written since the last snapshot
        self._unsaved: list[Bits] = []  # rows of snapshots that were not saved
        self.gone: list[Keys] = []  # for a table by key, the keys that have lost their rows since the last snapshot
        self.since: Any = None  # the checkpoint since which changes are tracked; set by the checkpoint manager
        self.digests: RangeDigests | None = None  # digests of row ranges; each is valid while it is marked `known`
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

    def before_write(self, ids: AnyIds) -> None:
        """Record that the rows `ids` [N] are about to be written; only one thread at a time may call this."""
        if self._snapshot is not None:
            self._snapshot.save_before_write(ids)
        mark(ids, self._touched)

    def before_forget(self, ids: AnyIds) -> None:
        """Let a snapshot copy the rows `ids` [N] before they are forgotten."""
        if self._snapshot is not None:
            self._snapshot.save_before_forget(ids)

    def begin(self, budget: Budget, *, everything: bool, copies: Copies | None = None) -> Snapshot:
        """Begin a snapshot: of all rows if `everything`, else of the rows written since the last saved snapshot.

        No thread may write to the table during this call. `copies` is a `LocationCopies` to copy the locations of rows
        on disk; None to copy values.

        Raises:
            RuntimeError: The last snapshot has not ended.
        """
        wanted = full_bits(self._rows) if everything else self.touched
        digests = self.known_digests() if copies is None else None  # a snapshot of locations drops them
        snapshot = Snapshot(copies or RowCopies(self._storage), self._rows, wanted, budget)
        self.begin_with(snapshot)
        self.digests = digests
        return snapshot

    def begin_with(self, snapshot: Snapshot) -> None:
        """Begin a snapshot that the caller has made, after which no row counts as touched; see `begin`."""
        if self._snapshot is not None:
            raise RuntimeError("the previous snapshot of this table is still being saved; wait until it ends")
        self._unsaved, self.gone = [], []
        self._snapshot, self._touched = snapshot, empty_bits(self._rows)

    def await_end(self) -> None:
        """Wait until all rows of the current snapshot, if any, have been read, or it is abandoned."""
        if self._snapshot is not None:
            self._snapshot.ended.wait()

    def end(self, snapshot: Snapshot, *, saved: bool) -> None:
        """End a snapshot; if it was not saved, the snapshot's rows and keys count as changed again."""
        snapshot.end()
        if not saved:
            self._unsaved.append(snapshot.wanted)  # merged later: another thread may be marking rows
            self.gone.append(snapshot.gone)
        self._snapshot = None


class TableRows:
    """The rows of a table, their step history, and the changes since the last checkpoint.

    Args:
        form: How rows are stored, and what they are initially.
        ids: The rows' ids or keys.
        storage: The storage of the rows' values.

    Attributes:
        history: The steps so far, if they also change unused rows; see `kernels.catch_up`.
        changes: The rows written since the last checkpoint; None before the first.
        untouched: Whether all rows have their initial values.
        noting: Held while rows are recorded as changed, if several threads write.
    """

    def __init__(self, form: RowFormat, ids: RowIds, storage: Storage) -> None:
        self.format, self.ids, self.storage = form, ids, storage
        self.history = make_history(form.optimizer)
        self.changes: Changes | None = None
        self.untouched = True
        self.noting: AbstractContextManager[Any] = nullcontext()

    def read(self, rows: Ids, formats: tuple[int, ...] | None = None) -> tuple[Rows, Rows]:
        """Return copies of rows [N] after the last step: float32 [N, 1 + S, D] and [N, R].

        `formats` has each plane's storage format, to which the results of missed steps are rounded; None to not round.
        """
        _, planes, D = self.storage.shape
        block = np.empty((len(rows), planes, D), np.float32)
        row_slots = np.empty((len(rows), self.storage.row_slots.shape[1]), np.float32)
        self.read_stored(rows, block, row_slots)
        self.history.bring(block, row_slots, None, formats)
        return block, row_slots

    def read_stored(self, rows: Ids, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Copy rows as they are stored, without the steps that they have missed; see `HostTable.read_rows`."""
        for source, some, at in self.storage.sources(rows, positions):
            run_tasks(source.read_tasks(some, block, row_slots, at))

    def columns(self, *, current: bool = False, formats: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Return all columns by name, as stored or, if `current`, after the last step; see `read` for `formats`."""
        if current and self.format.optimizer.catch_up is not None:
            return current_columns(self.storage, partial(self.read, formats=formats))
        return {name: self.storage.column(number) for number, name in enumerate(self.storage.names)}

    def write(self, rows: Ids, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Overwrite distinct rows; their values must be representable. See `HostTable.write_rows`."""
        for some, at in self.storage.held(rows, positions, read=self.changes is not None):  # a snapshot may copy rows
            tasks = self.storage.write_tasks(some, block, row_slots, at)
            self.note_write(some)
            run_tasks(tasks)

    def note_write(self, rows: Ids) -> None:
        """Record that rows are about to be written; a snapshot in progress first copies those it has not read."""
        self.untouched = False
        if self.changes is not None:
            with self.noting:
                self.changes.before_write(rows)

    def note_changes(self, *, anew: bool = False) -> Changes:
        """Track changes from now on and return the tracker; with `anew`, forget all earlier changes."""
        if self.changes is None or anew:
            self.changes = Changes(self.storage)
        return self.changes

    def forget_changes(self) -> None:
        """Wait until a snapshot in progress has ended, and forget the last checkpoint: the next one is full."""
        if self.changes is not None:
            self.changes.await_end()
            self.note_changes(anew=True)

    def forget(self, rows: Ids) -> None:
        """Free the memory and the disk space of rows that are no longer used."""
        self.storage.forget(rows, self.changes)

    def fill_unused(self, rows: Ids, step: int | None) -> None:
        """Overwrite rows that are not in use: with initial values whose last step is `step`, or zeros if it is None.

        `untouched` stays as it is, since the step of the batch that needs the rows may never be taken.
        """
        untouched = self.untouched
        self.forget(rows)  # records on disk may have the rows' former keys
        if step is None:
            _, planes, D = self.storage.shape
            for start in range(0, len(rows), _AT_ONCE):
                part = rows[start : start + _AT_ONCE]
                zeros = np.zeros((len(part), planes, D), np.float32)
                self.write(part, zeros, np.zeros((len(part), self.storage.row_slots.shape[1]), np.float32))
        else:
            for chosen, block, row_slots in self.format.initial(self.ids.of(rows)):
                self.history.stamp(row_slots, step)
                self.write(rows[chosen], block, row_slots)
        self.untouched = untouched

    def square_norms(self, rows: Ids) -> npt.NDArray[np.float64]:
        """Return the squares of the norms of rows' weights, float64 [N], summed in the order of the columns."""
        found = np.zeros(len(rows), np.float64)
        for start in range(0, len(rows), _AT_ONCE):
            block, _ = self.read(rows[start : start + _AT_ONCE])
            part = found[start : start + _AT_ONCE]
            for column in range(block.shape[2]):
                part += np.square(block[:, 0, column].astype(np.float64))
        return found
