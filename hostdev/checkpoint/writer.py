"""Writing of a checkpoint in background threads, from snapshots of the tables, while training continues."""

import contextlib
import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import hostdev
from hostdev.checkpoint import folder
from hostdev.checkpoint.folder import Checkpoint
from hostdev.checkpoint.items import Held, Item, get_version, hold_segments, join_entries, read_rows, split_rows
from hostdev.checkpoint.keyed import OtherKeys
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import verify_some
from hostdev.checkpoint.manifest import (
    BrokenCheckpointError,
    CheckpointManifest,
    File,
    Parent,
    RangeFile,
    SegmentState,
    Table,
)
from hostdev.checkpoint.manifest import read as read_manifest
from hostdev.checkpoint.ranges import WEIGHTS, RowChunk, column_digests, has_whole_ranges, write_range
from hostdev.checkpoint.state import DENSE, DigestNames, state_digest, tensors_as_bytes
from hostdev.checkpoint.uploads import Uploads
from hostdev.core.addresses import address_of
from hostdev.core.checksums import HashedFile
from hostdev.core.digest import Digests, RangeDigests
from hostdev.core.errors import RankError, UserError, in_words
from hostdev.core.workers import Workers, run_in_thread
from hostdev.distributed.world import LocalChannel
from hostdev.kernels.arrays import Rows
from hostdev.kernels.pool import start_helpers

_Written = tuple[RangeFile, dict[str, Digests]]  # a file, and the digests of its ranges by column

_ALONE = LocalChannel()
_PIECE = 1 << 22  # bytes of a file that are copied at once
_NICE = 19
_WRITERS = 2  # threads; each hashes and writes a file
BUFFERS = _WRITERS + 1  # one per file being written, and one that is being filled


class Content(NamedTuple):
    """Values that are saved in addition to the tables.

    Attributes:
        state: A JSON-compatible dict, from `state.to_tree`.
        tensors: The tensors in `state`.
        others: Files by their names in the checkpoint; written to full checkpoints only.
        digest: For each dense array in the state's digest, its name in the digest, and its name in `tensors`.
    """

    state: dict[str, Any]
    tensors: dict[str, Tensor]
    others: dict[str, Path]
    digest: DigestNames


class AsyncWriter:
    """A writer of one checkpoint in background threads, as returned by `Runtime.save`.

    Attributes:
        range_digests: Digests of the saved rows, by table, if they were computed: for a full checkpoint of one process
            whose `state_sha256` was not known.

    Args:
        path: The folder of checkpoints.
        step: The training step.
        items: The tables.
        content: Values other than the tables.
        parent: The parent of an incremental checkpoint, or None for a full checkpoint.
        keep: Number of newest checkpoints to keep; 0 keeps all.
        best_steps: Steps in order of preference; the checkpoint of the first step that has one is also kept.
        state_sha256: Digest of the state, if known.
        on_end: Called with this writer when writing has ended, even after an error.
        channel: Connects the processes that write this checkpoint, each its own rows.
        release: Called last, to unlock the folder.
        held: As for `hold_segments`.
        uploads: The uploads of the folder's checkpoints to a store; None if the folder has no store.
    """

    def __init__(
        self,
        path: Path,
        step: int,
        items: Sequence[Item],
        content: Content,
        parent: Checkpoint | None,
        *,
        keep: int = 0,
        best_steps: Sequence[int] = (),
        state_sha256: str | None,
        on_end: Callable[["AsyncWriter"], None] = lambda writer: None,
        channel: LocalChannel = _ALONE,
        release: Callable[[], None] = lambda: None,
        held: Held | None = None,
        uploads: Uploads | None = None,
    ) -> None:
        self._path, self._step, self._items, self._content = path, step, items, content
        self._parent, self._keep, self._state_sha256, self._on_end = parent, keep, state_sha256, on_end
        self._release, self._channel, self._best_steps, self._held = release, channel, best_steps, held or {}
        self._needs_digest = channel.ranks == 1 and parent is None and state_sha256 is None
        self._needs_digest &= all(item.table.segments is None for item in items)  # a digest would need all segments
        self._hashes_rows = self._needs_digest and all(has_whole_ranges(item.table) for item in items)
        self.range_digests: dict[str, RangeDigests] = {}
        self.checkpoint: Checkpoint | None = None
        self.error: BaseException | None = None
        self.is_reported = False  # whether the outcome was reported to a caller
        self._uploads, self._upload = uploads, 0
        start_helpers()  # now, since threads that the writer's thread starts have its low priority
        self._ended = run_in_thread("hostdev-checkpoint", self._run)

    @property
    def path(self) -> Path | None:
        """The checkpoint's own folder, or None while it is being written and after a failure."""
        return None if self.checkpoint is None else self.checkpoint.path

    @property
    def is_running(self) -> bool:
        """Whether the checkpoint is being written."""
        return not self._ended.done()

    def join(self) -> None:
        """Wait until writing has ended, without raising its error."""
        wait([self._ended])

    def wait(self) -> Checkpoint:
        """Wait until the checkpoint is written, and uploaded if the folder has a store; return the checkpoint.

        Raises:
            Exception: The error that ended the writing, such as OSError.
            StoreError: The upload has failed.
        """
        self.join()
        self.is_reported = True
        if self.error is not None:
            raise self.error
        self._ended.result()
        if self._upload and self._uploads is not None:
            self._uploads.require(self._upload)
        assert self.checkpoint is not None
        return self.checkpoint

    def take_failure(self) -> str | None:
        """Return a message about a failure that was not reported yet, or None; a failure is returned only once."""
        if self.is_running or self.error is None or self.is_reported:
            return self._take_upload_failure()
        self.is_reported = True
        why = in_words(self.error)
        where = "" if str(self._path) in why else f" to {self._path}"
        return f"the checkpoint of step {self._step:,} was not saved{where}: {why}"

    @property
    def is_uploading(self) -> bool:
        """Whether the checkpoint is being written, or is not uploaded yet."""
        return self.is_running or (self._uploads is not None and not self._uploads.is_done(self._upload))

    def _take_upload_failure(self) -> str | None:
        uploads = self._uploads
        if self.is_uploading or self.is_reported or uploads is None or uploads.failure is None or not self._upload:
            return None
        self.is_reported = True
        return f"the checkpoint of step {self._step:,} was not uploaded: {uploads.failure}"

    def await_upload(self) -> None:
        """Wait until the checkpoint is uploaded, if the folder has a store, or until that has failed."""
        self.join()
        if self._uploads is not None:
            self._uploads.wait(self._upload)

    def _run(self) -> None:
        try:
            self._save()
        finally:
            self._release()
            del self._items, self._content, self._on_end, self._release  # an ended writer holds no tables

    def _save(self) -> None:
        try:
            _lower_priority()
            self.checkpoint = self._write_all(self._channel)
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self._path)
            self.error = error
        finally:
            for item in self._items:
                try:
                    item.source.end()
                    item.end(self.checkpoint is not None)
                except Exception as error:  # the other items must end, too, since training waits for them
                    self.error = self.error or error
            self._on_end(self)
        if self.checkpoint is not None and self._channel.rank == 0:
            try:
                folder.clean(self._path)
                if self._keep:
                    folder.prune(self._path, self._keep, self._best_steps)
            except OSError:
                pass  # the next checkpoint's clean-up tries again
            if self._uploads is not None:
                self._upload = self._uploads.notify()

    def _write_all(self, channel: LocalChannel) -> Checkpoint:
        """Write a checkpoint: each process writes its rows, and rank 0 writes all else."""
        partial: Path | None = None

        def begin() -> list[str]:
            name = folder.new_name(self._path, self._step)
            return [name, str(folder.begin(self._path, name))]

        try:
            name, where = _agree(channel, begin if channel.rank == 0 else None)[0]
            partial = Path(where)

            def write() -> list[tuple[dict[str, Any], int]]:
                more = "" if address_of(self._path) is None else ", so set HOSTDEV_STORE_CACHE to a shared folder"
                if not partial.is_dir():
                    raise UserError(f"{partial} is missing: all hosts must share the checkpoint folder{more}")
                tables = zip(self._write_tables(partial), self._items, strict=True)
                return [(asdict(table), item.first) for table, item in tables]

            written = _agree(channel, write)
            parts = [[found[number] for found in written] for number in range(len(self._items))]
            tables = [join_entries(item.table, part) for item, part in zip(self._items, parts, strict=True)]

            others = [item.source.other_keys for item in self._items]
            _agree(channel, lambda: [keys() for keys in others] and None)  # if this fails in one process, all raise
            files = [_gather_files(keys(), channel) for keys in others]

            def commit() -> None:
                folder.commit(partial, name, self._write(partial, tables, files))

            _agree(channel, commit if channel.rank == 0 else None)
        except BaseException:
            if channel.rank == 0 and partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        path = self._path / name
        return Checkpoint(path, read_manifest(path))

    def _write(self, partial: Path, tables: list[Table], files: Sequence[dict[str, bytes]]) -> CheckpointManifest:
        others = []
        for number, each in enumerate(files):
            others += [_write(partial, f"tables/{number}/{name}", [data]) for name, data in each.items()]
        if self._content.tensors:
            others.append(_write(partial, DENSE, [tensors_as_bytes(self._content.tensors)]))
        for name, source in self._content.others.items() if self._parent is None else ():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as file:
                others.append(_write(partial, name, iter(lambda: file.read(_PIECE), b"")))
        last = self._parent
        parent = None if last is None else Parent(name=last.name, sha256=last.manifest.checksum)
        content = CheckpointManifest(
            step=self._step,
            serial=folder.new_serial(self._path),
            parent=parent,
            tables=tables,
            others=others,
            state={**self._content.state, "digest": [list(names) for names in self._content.digest]},
            state_sha256=self._state_sha256,
            version=get_version(tables),
            versions={"hostdev": hostdev.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if self._needs_digest:  # read from the files, unless rows were hashed while they were written
            layers, known = Layers([Checkpoint(partial, content)]), self.range_digests or None
            digest = state_digest(layers, self._content.digest, self._content.tensors, known=known)
            content = replace(content, state_sha256=digest)
        parents = [] if self._parent is None else folder.read_chain(self._parent.path)
        try:
            verify_some([*parents, Checkpoint(partial, content)])
        except BrokenCheckpointError as error:
            raise BrokenCheckpointError(f"{error}; the new checkpoint would build on it") from None
        return content

    def _prefix(self, number: int) -> str:
        """Return the beginning of the names of this process's files of a table."""
        return f"tables/{number}/{'' if self._channel.ranks == 1 else f'{self._channel.rank}-'}"

    def _write_tables(self, partial: Path) -> list[Table]:
        found: list[list[Future[_Written]]] = []
        segments: list[SegmentState | None] = []
        buffers: SimpleQueue[Rows] = SimpleQueue()
        for _ in range(BUFFERS):
            buffers.put(np.empty(0, np.float32))
        with Workers(_WRITERS, "hostdev-checkpoint", _lower_priority) as pool:
            for number, item in enumerate(self._items):
                (partial / "tables" / str(number)).mkdir(parents=True, exist_ok=True)
                first = item.first
                written: list[Future[_Written]] = []
                found.append(written)
                for start, stop, ids in split_rows(item):
                    buffer = buffers.get()
                    _raise_first_error(written)
                    buffer, rows = read_rows(item, buffer, start, stop, ids)
                    if first:
                        start, stop, ids = start + first, stop + first, None if ids is None else ids + first
                        rows = RowChunk(start, ids, *rows[2:])
                    name = f"{self._prefix(number)}{len(written):06d}.arrow"
                    release = functools.partial(buffers.put, buffer)
                    what = partial, name, item.table, start, stop, rows
                    written.append(pool.submit(functools.partial(self._write_range, *what, release=release)))
                segments.append(hold_segments(partial, self._prefix(number), item, self._held))
                item.source.end()
            results = [[file.result() for file in written] for written in found]
        tables = [
            replace(item.table, files=[file for file, _ in written], segments=held)
            for item, written, held in zip(self._items, results, segments, strict=True)
        ]
        if self._hashes_rows:
            self.range_digests = {
                table.name: _join_digests([digests for _, digests in written])
                for table, written in zip(tables, results, strict=True)
            }
        return tables

    def _write_range(self, *what: Any, release: Callable[[], None]) -> _Written:
        """Write a file of rows with `write_range`, then release the buffer; return the file's entry and digests."""
        try:
            digests = column_digests(what[2], what[5]) if self._hashes_rows else {}
            return write_range(*what), digests
        finally:
            release()


def _join_digests(files: list[dict[str, Digests]]) -> RangeDigests:
    """Return the digests of all ranges of a table, by joining those of the table's files, given in order."""
    by_column = {name: np.concatenate([digests[name] for digests in files]) for name in files[0]}
    return RangeDigests(by_column, np.ones(len(by_column[WEIGHTS]), np.bool_))


def _gather_files(keys: Sequence[Any] | None, channel: LocalChannel) -> dict[str, bytes]:
    """Return the content of the files of keys that have no row; the first process gets the keys of all processes."""
    return {} if keys is None else OtherKeys(*map(channel.gather_first, keys)).files()


def _agree(channel: LocalChannel, work: Callable[[], Any] | None) -> list[Any]:
    """Call `work`, unless it is None; return all processes' results, by rank. If one process fails, raise in all."""
    error: BaseException | None = None
    found = None
    try:
        found = work() if work is not None else None
    except BaseException as caught:
        error = caught
    told = channel.share([None if error is None else in_words(error), found])
    if error is not None:
        raise error
    for rank, (why, _) in enumerate(told):
        if why is not None:
            raise RankError(f"rank {rank}: {why}")
    return [each for _, each in told]


def _lower_priority() -> None:
    """Lower this thread's priority, so that training gets the processors first."""
    if sys.platform == "linux":  # on other systems, a priority applies to the whole process
        with contextlib.suppress(OSError):  # the system may not permit it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _raise_first_error(written: list[Future[_Written]]) -> None:
    for file in written:
        if file.done():
            file.result()


def _write(root: Path, name: str, pieces: Iterable[bytes]) -> File:
    """Write a new file and sync it to disk."""
    file = HashedFile(root / name)
    try:
        for piece in pieces:
            file.write(piece)
        return File(file=name, sha256=file.finish(), bytes=file.bytes)
    finally:
        file.close()
