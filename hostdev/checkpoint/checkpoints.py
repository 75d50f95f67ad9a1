"""`Checkpoints`: what a training run saves into a folder, and goes on from."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from hostdev.checkpoint import folder
from hostdev.checkpoint.device_rows import DeviceRows
from hostdev.checkpoint.folder import Checkpoint
from hostdev.checkpoint.manifest import Table
from hostdev.checkpoint.ranges import FILE_BYTES
from hostdev.checkpoint.saving import BUFFERS, Content, Item, Saving, described
from hostdev.core.errors import UserError
from hostdev.host.changes import Budget
from hostdev.kernels.bits import count_bits

COPIES_BYTES = 384 << 20  # of rows that training changes before they are saved; with the buffers less than 1 GiB
SAVING_BYTES = COPIES_BYTES + BUFFERS * FILE_BYTES  # what saving takes in all


class Checkpoints:
    """Saves the tables of a training run to a folder, whole or what has changed since the checkpoint before.

    path  the folder; made where it is not there
    keep  so many of the newest checkpoints are kept, with those that they add to
    hold  keep others from writing there until `close`, and not only while a checkpoint is written
    ranks  the processes that save together, each its part of the tables (`distributed`); all call what one calls
    """

    def __init__(self, path: Path, *, keep: int = 3, hold: bool = False, ranks: Any = None) -> None:
        self.path, self.keep, self._hold, self._ranks = path, keep, hold, ranks
        self.best_steps: list[int] = []  # the first of them that there is a checkpoint of is kept, too
        self.last: Checkpoint | None = None  # the one that the tables' changes are counted from
        self._increments = 0  # rows' bytes that those in its chain hold, the whole one left out
        self._saving: Saving | None = None
        self._channel: Any = None  # to the other ranks, for the thread that writes
        self._lock = ExitStack()
        self._locked: IO[Any] | None = None
        self.most_copied = 0  # bytes of rows that were copied aside at once
        self.copying_seconds = 0.0  # that training has spent with that

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lock(self) -> None:
        """Make the folder, and keep other processes from writing there; UserError where that cannot be."""
        if self._ranks is None:
            self._lock_it()
            return
        why = None
        if self._ranks.rank == 0:
            try:
                self._lock_it()
            except UserError as error:
                why = str(error)
        why = self._ranks.control.share(why)[0]
        if why is not None:
            raise UserError(why)

    def _lock_it(self) -> None:
        if self._locked is not None and folder.is_locked_here(self.path, self._locked):
            return
        self._unlock()  # of a folder that is gone
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path} cannot be made: {error.strerror}") from None
        self._locked = self._lock.enter_context(folder.locked(self.path))
        folder.clean(self.path)  # of who was killed; a finished run saves nothing that would do it

    def start_from(self, chain: Sequence[Checkpoint], tables: Iterable[Any]) -> None:
        """Count the tables' changes from a checkpoint that they have just been loaded from."""
        self.last = chain[-1] if chain[-1].path.parent.resolve() == self.path.resolve() else None
        self._increments = sum(
            file.rows * _row_bytes(table)
            for checkpoint in chain[1:] for table in checkpoint.manifest.tables for file in table.files
        )  # fmt: skip
        if self._ranks is not None:
            self._increments //= self._ranks.size  # of this one, about
        for table in tables:
            if hasattr(table, "note_changes"):
                table.note_changes(anew=True).since = self._token(chain[-1])

    @property
    def is_saving(self) -> bool:
        """Tell whether a checkpoint is being written still."""
        return self._saving is not None and self._saving.is_running

    def save(
        self, tables: Iterable[Any], step: int, content: Content, *, state_sha256: str | None = None
    ) -> Saving:  # fmt: skip
        """Begin to write a checkpoint of the tables as they are now, and return it; training may go on.

        Waits for the one before. Tables on a device are copied first; where they are too large for that, they are
        written before this returns, and so are all where a table's memory was handed out.

        tables  nobody writes them until this returns; host tables are up to date with their caches
        """
        self.join()
        if self._ranks is not None and self._channel is None:
            self._channel = self._ranks.channel()
        tables = sorted(tables, key=lambda table: table.name)
        budget = Budget(COPIES_BYTES)
        parent = self._parent(tables)
        items: list[Item] = []
        try:
            items += (self._item(table, budget, whole=parent is None) for table in tables)
        except BaseException:
            for item in items:
                item.stop()
                item.end(False)
            budget.close()
            raise
        waits = any(isinstance(item.source, DeviceRows) and item.source.is_live for item in items)

        def ended(saving: Saving) -> None:
            budget.close()
            self.most_copied = max(self.most_copied, budget.most)
            self.copying_seconds += budget.seconds
            if saving.checkpoint is not None:
                for table in tables:
                    if hasattr(table, "note_changes"):
                        table.changes.since = self._token(saving.checkpoint)
                written = sum(item.source.count * _row_bytes(item.table) for item in items)
                self._increments = 0 if parent is None else self._increments + written
                self.last = saving.checkpoint

        saving = self._saving = Saving(
            self.path, step, items, content, parent, keep=self.keep, best_steps=list(self.best_steps),
            state_sha256=state_sha256, on_end=ended,
            channel=self._channel,
            release=(lambda: None) if self._hold else self._unlock,
        )  # fmt: skip
        if waits:
            saving.join()
        return saving

    def _parent(self, tables: Sequence[Any]) -> Checkpoint | None:
        """Return the checkpoint to which the next one adds; None where that is to be whole."""
        known = self.last is not None and folder.is_there(self.last) and self._is_of(self.last, tables)
        whole = sum(table.rows * _row_bytes(described(table)) for table in tables)
        new = sum(self._changed_rows(table) * _row_bytes(described(table)) for table in tables) if known else 0
        votes = [[known, self._increments + new, whole]]
        if self._ranks is not None:
            votes = self._ranks.control.share(votes[0])
        adds = all(vote[0] for vote in votes) and sum(vote[1] for vote in votes) <= sum(vote[2] for vote in votes) // 2
        return self.last if adds else None

    @staticmethod
    def _is_of(last: Checkpoint, tables: Sequence[Any]) -> bool:
        """Tell whether a checkpoint is of these tables, with their rows in the same order."""
        mine = [described(table) for table in tables]
        return {(table.name, table.rows, table.order) for table in last.manifest.tables} == {
            (table.name, table.rows, table.order) for table in mine
        }

    def _item(self, table: Any, budget: Budget, *, whole: bool) -> Item:
        about = described(table)
        if not hasattr(table, "note_changes"):
            rows = DeviceRows(table, COPIES_BYTES)
            return Item(about, rows, True, rows.stop, lambda saved: None)
        whole = whole or not self._knows_changes(table)
        changes = table.note_changes()
        snapshot = changes.begin(budget, everything=whole)
        return Item(about, snapshot, whole, snapshot.end, lambda saved: changes.end(snapshot, saved=saved), table.start,
                    table.rows)  # fmt: skip

    def _knows_changes(self, table: Any) -> bool:
        """Tell whether it is known which rows of a table were written since the last checkpoint here."""
        if not hasattr(table, "note_changes") or table.changes is None or self.last is None:
            return False
        return bool(table.changes.since == self._token(self.last))

    def _changed_rows(self, table: Any) -> int:
        """Return how many rows of a table an increment would hold."""
        return count_bits(table.changes.touched) if self._knows_changes(table) else int(table.rows)

    @staticmethod
    def _token(checkpoint: Checkpoint) -> str:
        return f"{checkpoint.path.resolve()} {checkpoint.manifest.checksum}"

    def close(self) -> None:
        """Wait for what is being written, and let others write here."""
        self.join()
        self._unlock()

    def _unlock(self) -> None:
        self._locked = None
        self._lock.close()

    def join(self) -> None:
        """Wait for what is being written."""
        if self._saving is not None:
            self._saving.join()


def _row_bytes(table: Table) -> int:
    return 4 * (table.dim * (1 + len(table.slots)) + len(table.row_slots))
