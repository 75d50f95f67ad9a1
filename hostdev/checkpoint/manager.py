"""`CheckpointManager`, which saves the checkpoints of a runtime or of the command `train` to a folder."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from hostdev.checkpoint import folder
from hostdev.checkpoint.adopting import can_locate, describe_segments, find_held
from hostdev.checkpoint.folder import Checkpoint
from hostdev.checkpoint.items import DeviceRows, Item, describe_table
from hostdev.checkpoint.keyed import make_state
from hostdev.checkpoint.manifest import BrokenCheckpointError, Table
from hostdev.checkpoint.ranges import FILE_BYTES
from hostdev.checkpoint.uploads import Uploads
from hostdev.checkpoint.writer import BUFFERS, AsyncWriter, Content
from hostdev.core.errors import StoreError, UserError
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.host.snapshot import Budget, Copies, LocationCopies
from hostdev.kernels.bits import count_bits

COPIES_BYTES = 384 << 20  # limit on the bytes of copied rows
_ERRORS = folder.FolderInUseError, StoreError, UserError  # errors of `lock`; subclasses of UserError come first
SAVING_BYTES = COPIES_BYTES + BUFFERS * FILE_BYTES  # bytes of memory for saving: copied rows and the writer's buffers


class CheckpointManager:
    """A manager that saves a training run's tables to a folder, each time as a full or an incremental checkpoint.

    Args:
        path: The folder; created if it is missing.
        keep: Number of newest checkpoints to keep, together with their parents.
        hold: Whether the folder stays locked until `close`, rather than only while a checkpoint is written.
        world: The ranks that save together, each its own rows; all must make the same calls.
    """

    def __init__(self, path: Path, *, keep: int = 3, hold: bool = False, world: World = ALONE_WORLD) -> None:
        self.path, self.keep, self._hold, self._world = path, keep, hold, world
        self.best_steps: list[int] = []  # in order of preference; see `folder.prune`
        self.last: Checkpoint | None = None  # last saved or loaded; the tables' changes are tracked since then
        self._increments = 0  # bytes of rows in the chain of `last`, not counting the full checkpoint
        self._writer: AsyncWriter | None = None
        self._untaken: AsyncWriter | None = None  # the last writer, until `take_ended` has returned it
        self._channel: Any = None  # the writer thread's channel to the other ranks
        self.uploads: Uploads | None = None  # set by `lock` if the folder has the copies of a store's checkpoints
        self._lock = ExitStack()
        self._locked: IO[Any] | None = None
        self._found_damage = False  # whether the last checkpoint was not saved, because it would build on a damaged one
        self.most_copied = 0  # peak bytes of copied rows
        self.copying_seconds = 0.0  # training time spent copying rows

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lock(self) -> None:
        """Create and lock the folder; raise UserError if that fails or another process writes there."""
        if self._world.size == 1:
            self._lock_it()
            return
        why, kind = None, 0
        if self._world.rank == 0:
            try:
                self._lock_it()
            except UserError as error:
                why, kind = str(error), next(n for n, kind in enumerate(_ERRORS) if isinstance(error, kind))
        why, kind = self._world.control.share([why, kind])[0]
        if why is not None:
            raise _ERRORS[kind](why)

    def _lock_it(self) -> None:
        if self._locked is not None and folder.is_locked_here(self.path, self._locked):
            return
        self._unlock()  # the locked folder may be gone
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path} cannot be created: {error.strerror}") from None
        self._locked = self._lock.enter_context(folder.locked(self.path))
        folder.clean(self.path)  # leftovers of killed processes; saving removes them too, but a run may never save
        try:
            self.uploads = Uploads.find(self.path)
            if self.uploads is not None:
                self._hold = True
                self.uploads.begin()
        except BaseException:
            self._unlock()
            raise

    def start_from(self, chain: Sequence[Checkpoint], tables: Iterable[Any]) -> None:
        """Track the tables' changes since the checkpoint that they were just loaded from."""
        self.last = chain[-1] if chain[-1].path.parent.resolve() == self.path.resolve() else None
        self._increments = sum(
            file.rows * _row_bytes(table)
            for checkpoint in chain[1:]
            for table in checkpoint.manifest.tables
            if table.segments is None
            for file in table.files
        )
        self._increments //= self._world.size  # this rank's share, roughly
        for table in tables:
            if table.stored is not None:
                table.stored.note_changes(anew=True).since = self._token(chain[-1])

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer is not None and self._writer.is_running

    def save(
        self, tables: Iterable[Any], step: int, content: Content, *, state_sha256: str | None = None
    ) -> AsyncWriter:
        """Start writing a checkpoint of the tables' current state; training may continue once this returns.

        This first waits until the previous checkpoint is written, and locks the folder. Device tables are copied; if a
        device table is too large to copy, this also waits until the new checkpoint is written.

        Args:
            tables: The tables. They must not change until this returns; cached rows must have been written back.
            step: The training step.
            content: Values other than the tables.
            state_sha256: Digest of the state, if known.

        Raises:
            UserError: The folder cannot be created or locked.
        """
        self.join()
        self.lock()
        if self._channel is None:
            self._channel = self._world.channel()
        tables = sorted(tables, key=lambda table: table.name)
        budget = Budget(COPIES_BYTES)
        located = self._find_located(tables)
        parent = self._parent(tables, located)
        items: list[Item] = []
        noted: dict[str, Any] = {}

        def ended(writer: AsyncWriter) -> None:
            budget.close()
            self.most_copied = max(self.most_copied, budget.most)
            self.copying_seconds += budget.seconds
            if writer.checkpoint is not None:
                for name, changes in noted.items():  # `stored.changes` may be a new object by now
                    changes.since = self._token(writer.checkpoint)
                    changes.digests = writer.range_digests.get(name, changes.digests)
                copied = [item for item in items if item.table.segments is None]
                written = sum(item.source.count * _row_bytes(item.table) for item in copied)
                self._increments = 0 if parent is None else self._increments + written
                self.last = writer.checkpoint
            self._found_damage = isinstance(writer.error, BrokenCheckpointError)
            if self._found_damage:
                self.last = None

        try:
            for number, table in enumerate(tables):
                if table.name in located:
                    items.append(self._located_item(number, table, budget))
                else:
                    items.append(self._item(number, table, budget, parent))
            noted |= {table.name: table.stored.changes for table in tables if table.stored is not None}
            writer = self._writer = self._untaken = AsyncWriter(
                self.path,
                step,
                items,
                content,
                parent,
                keep=self.keep,
                best_steps=list(self.best_steps),
                state_sha256=state_sha256,
                on_end=ended,
                channel=self._channel,
                release=(lambda: None) if self._hold else self._unlock,
                uploads=self.uploads,
                held=find_held(self.last) if located else None,
            )
        except BaseException:
            for item in items:
                item.source.end()
                item.end(False)
            budget.close()
            raise
        if any(isinstance(item.source, DeviceRows) and item.source.is_live for item in items):
            writer.join()
        return writer

    def _find_located(self, tables: Sequence[Any]) -> set[str]:
        """Return the names of the tables whose segments the next checkpoint can hold on all ranks."""
        votes = self._world.control.share([table.name for table in tables if can_locate(table)])
        return set(votes[0]).intersection(*votes[1:])

    def _parent(self, tables: Sequence[Any], located: set[str]) -> Checkpoint | None:
        """Return the parent of the next checkpoint, or None if the next checkpoint should be full.

        `located` names the tables whose rows need no parent.
        """
        known = self.last is not None and folder.still_exists(self.last) and self._is_of(self.last, tables)
        tables = [table for table in tables if table.name not in located]
        known = known and all(self._knows_changes(table) for table in tables if table.capabilities.by_key)
        full = sum(table.rows * _row_bytes(describe_table(table)) for table in tables)
        new = sum(self._changed_rows(table) * _row_bytes(describe_table(table)) for table in tables) if known else 0
        votes = self._world.control.share([known, self._increments + new, full])
        adds = all(vote[0] for vote in votes) and len(tables) > 0
        adds = adds and sum(vote[1] for vote in votes) <= sum(vote[2] for vote in votes) // 2
        return self.last if adds else None

    @staticmethod
    def _is_of(last: Checkpoint, tables: Sequence[Any]) -> bool:
        """Return whether a checkpoint has exactly these tables; tables by row must have equal row counts and orders."""
        return {_shape(table, keyed=table.keys is not None) for table in last.manifest.tables} == {
            _shape(describe_table(table), keyed=table.capabilities.by_key) for table in tables
        }

    def _located_item(self, number: int, table: Any, budget: Budget) -> Item:
        """Return the item of a table on disk, for a checkpoint that holds the table's segments."""
        about = replace(describe_table(table), segments=describe_segments(table))
        copies = LocationCopies(table.storage.tier)
        try:
            return self._begin_item(number, table, about, budget, full=True, copies=copies)
        except BaseException:
            copies.end()
            raise

    def _begin_item(
        self, number: int, table: Any, about: Table, budget: Budget, *, full: bool, copies: Copies | None = None
    ) -> Item:
        """Begin a snapshot of a table in host memory or on disk; return an item that saves it."""
        changes = table.stored.note_changes()
        rows = table.begin_snapshot(budget, everything=full, copies=copies)

        def end(saved: bool) -> None:
            changes.end(rows, saved=saved)  # `stored.changes` may be a new object by now

        if not table.capabilities.by_key:
            return Item(about, rows, full, end, table.start, table.rows)
        try:
            counts = self._world.control.share([rows.count, table.rows, rows.found.waiting_count])
        except BaseException:
            end(False)
            raise
        saved_rows, live, waiting = map(sum, zip(*counts, strict=True))
        state = make_state(table, rows, number, live, waiting)
        about = replace(about, rows=saved_rows, keys=state, seed=table.seed, order="ids")
        first = sum(count for count, *_ in counts[: self._world.rank])
        return Item(about, rows, True, end, first, rows.count)

    def _item(self, number: int, table: Any, budget: Budget, parent: Checkpoint | None) -> Item:
        about, full = describe_table(table), parent is None
        if parent is not None and parent.manifest.table(table.name).segments is not None:
            full, about = True, replace(about, whole=True)  # an increment cannot build on segments
        if table.stored is None:
            return Item(about, DeviceRows(table, COPIES_BYTES), True)
        return self._begin_item(number, table, about, budget, full=full or not self._knows_changes(table))

    def _knows_changes(self, table: Any) -> bool:
        """Return whether a table's changes are tracked since the last checkpoint in this folder."""
        if table.stored is None or table.stored.changes is None or self.last is None:
            return False
        return bool(table.stored.changes.since == self._token(self.last))

    def _changed_rows(self, table: Any) -> int:
        """Return the number of a table's rows that an increment would hold."""
        return count_bits(table.stored.changes.touched) if self._knows_changes(table) else int(table.rows)

    @staticmethod
    def _token(checkpoint: Checkpoint) -> str:
        return f"{checkpoint.path.resolve()} {checkpoint.manifest.checksum}"

    def close(self) -> None:
        """Wait until the last checkpoint is written and uploads to a store have ended, and unlock the folder."""
        self.join()
        try:
            if self.uploads is not None and self._locked is not None:
                self.uploads.wait()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        self._locked = None
        self._lock.close()

    def take_ended(self) -> AsyncWriter | None:
        """Return the last writer once it has ended, or None while it runs or if an earlier call has returned it."""
        if self.is_saving:
            return None
        ended, self._untaken = self._untaken, None
        return ended

    def must_repeat(self) -> bool:
        """Wait for the last checkpoint; return whether it was not saved, because it would build on a damaged one.

        The next checkpoint is then full. All ranks must call this.
        """
        self.join()
        return bool(self._world.control.share(self._found_damage)[0])

    def upload_counts(self) -> dict[str, int]:
        """Return the entries of summary.json about uploads to a store; {} if there is no store."""
        found = self.uploads
        return {} if found is None else {"uploaded": found.count, "failed_uploads": found.failures}

    def join(self) -> None:
        """Wait until the last checkpoint is written or has failed."""
        if self._writer is not None:
            self._writer.join()


def _shape(table: Table, *, keyed: bool) -> tuple[Any, ...]:
    return table.name, keyed or (table.rows, table.order)


def _row_bytes(table: Table) -> int:
    return 4 * (table.dim * (1 + len(table.slots)) + len(table.row_slots))
