"""Change tracking of a table, for incremental checkpoints; see `host.snapshot` for what they save.

`Changes` knows which rows were written since the last snapshot.
"""

from typing import Any

from hostdev.core.digest import RangeDigests, rows_per_range
from hostdev.host.snapshot import Budget, Copies, RowCopies, Snapshot
from hostdev.host.storage import Storage
from hostdev.kernels.arrays import AnyIds
from hostdev.kernels.bits import Bits, any_in_ranges, empty_bits, full_bits, mark


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

        No thread may write to the table during this call. `copies` copies the places of all rows on disk; None for a
        snapshot that copies values.

        Raises:
            RuntimeError: The last snapshot has not ended.
        """
        wanted = full_bits(self._rows) if everything else self.touched
        digests = self.known_digests() if copies is None else None  # those of rows are forgotten with the changes
        snapshot = Snapshot(copies or RowCopies(self._storage), self._rows, wanted, budget)
        self.begin_with(snapshot)
        self.digests = digests
        return snapshot

    def begin_with(self, snapshot: Snapshot) -> None:
        """Begin a snapshot that the caller has made, after which no row counts as touched; see `begin`."""
        if self._snapshot is not None:
            raise RuntimeError("the previous snapshot of this table is still being saved; wait until it ends")
        self._unsaved = []
        self._snapshot, self._touched = snapshot, empty_bits(self._rows)

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
