"""From tables in training to files: a snapshot of each, read in order, written by threads while training goes on."""

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import hostdev
from hostdev.checkpoint import folder
from hostdev.checkpoint.folder import Checkpoint
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import File, Manifest, Parent, RangeFile, Table
from hostdev.checkpoint.manifest import read as read_manifest
from hostdev.checkpoint.ranges import SPREAD, WEIGHTS, RowsOf, rows_per_file, write_range
from hostdev.checkpoint.state import DENSE, DigestNames, state_digest
from hostdev.checkpoint.tree import tensors_as_bytes
from hostdev.core.checksums import HashedFile
from hostdev.core.errors import UserError, in_words
from hostdev.core.table_dtypes import FP32
from hostdev.core.workers import Workers

Rows = npt.NDArray[np.float32]

_PIECE = 1 << 22  # bytes
_NICE = 19
_WRITERS = 2  # hash and write a file each
BUFFERS = _WRITERS + 1  # of a file each: another one is being filled


class Source(Protocol):
    """A table's rows as of one moment; `host.changes.Snapshot` is one."""

    count: int

    def rows_between(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return which of the rows [first, last) are to be saved, ascending."""

    def read(self, first: int, last: int, ids: npt.NDArray[np.int64] | None, columns: Rows, row_columns: Rows) -> None:
        """Copy rows of [first, last) to columns [1 + S, N, D] and [R, N]; ranges come in ascending order."""


class Channel(Protocol):
    """What processes tell one another of a checkpoint that they write together; `distributed.Channel` is one."""

    rank: int

    def share(self, value: Any) -> list[Any]:
        """Return what each rank has to say, by rank."""


class Item(NamedTuple):
    """A table to be saved, or this process's part of it; `end` is called with whether it was."""

    table: Table
    source: Source
    whole: bool  # all rows
    stop: Callable[[], None]  # all rows have been read
    end: Callable[[bool], None]
    first: int = 0  # the number of its first row among all rows
    rows: int | None = None  # of the part; None: all of them
    cuts: Sequence[int] = ()  # rows with which a file is to begin


class Content(NamedTuple):
    """What is saved beside the tables.

    state     a dict that JSON can hold, of `tree.to_tree`; `tensors`, those in it
    others    files, by their names in the checkpoint; one that adds to another has them there
    digest    which tensors the state's digest has, under which names
    """

    state: dict[str, Any]
    tensors: dict[str, Tensor]
    others: dict[str, Path]
    digest: DigestNames


class Saving:
    """A checkpoint that is being written, in threads of its own."""

    def __init__(
        self,
        path: Path,
        step: int,
        items: Sequence[Item],
        content: Content,
        parent: Checkpoint | None,
        *,
        keep: int,
        best_steps: Sequence[int] = (),
        state_sha256: str | None,
        on_end: Callable[["Saving"], None],
        channel: Channel | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._step, self._items, self._content = path, step, items, content
        self._parent, self._keep, self._state_sha256, self._on_end = parent, keep, state_sha256, on_end
        self._release, self._channel, self._best_steps = release, channel, best_steps
        self.checkpoint: Checkpoint | None = None
        self.error: BaseException | None = None
        self.is_heard = False  # somebody has waited for it, and knows how it has ended
        self._thread = threading.Thread(target=self._run, name="hostdev-checkpoint", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path | None:
        """The checkpoint's own folder; None while it is being written, and where that has failed."""
        return None if self.checkpoint is None else self.checkpoint.path

    @property
    def is_running(self) -> bool:
        """Tell whether it is being written still."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end, however it ends."""
        self._thread.join()

    def wait(self) -> Checkpoint:
        """Wait for its end, and return it; raises OSError or what else it has failed with."""
        self.join()
        self.is_heard = True
        if self.error is not None:
            raise self.error
        assert self.checkpoint is not None
        return self.checkpoint

    def unheard(self) -> str | None:
        """Return, once, why it has failed where nobody has waited for it; None where it has not, or goes on."""
        if self.is_running or self.error is None or self.is_heard:
            return None
        self.is_heard = True
        why = in_words(self.error)
        where = "" if str(self._path) in why else f" to {self._path}"
        return f"the checkpoint of step {self._step:,} was not saved{where}: {why}"

    def _run(self) -> None:
        try:
            self._save()
        finally:
            self._release()
            del self._items, self._content, self._on_end, self._release  # who holds this holds no table

    def _save(self) -> None:
        partial, channel = None, self._channel
        try:
            _give_way()
            if self._channel is None:
                name = folder.new_name(self._path, self._step)
                partial = folder.begin(self._path, name)
                self.checkpoint = folder.commit(partial, name, self._write(partial, self._write_tables(partial)))
            else:
                self.checkpoint = self._save_together(self._channel)
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self._path)
            self.error = error
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            for item in self._items:
                item.stop()
                item.end(self.checkpoint is not None)
            self._on_end(self)
        if self.checkpoint is not None and (channel is None or channel.rank == 0):
            try:
                folder.clean(self._path)
                if self._keep:
                    folder.prune(self._path, self._keep, self._best_steps)
            except OSError:
                pass  # what is too much is removed after the next one

    def _save_together(self, channel: Channel) -> Checkpoint:
        """Write a checkpoint with other processes: each the files of its rows, the first one the rest."""
        partial: Path | None = None

        def begin() -> list[str]:
            name = folder.new_name(self._path, self._step)
            return [name, str(folder.begin(self._path, name))]

        try:
            name, where = _agree(channel, begin if channel.rank == 0 else None)[0]
            partial = Path(where)

            def write() -> list[list[dict[str, Any]]]:
                if not partial.is_dir():
                    raise UserError(f"{partial} is not there: all hosts are to see the folder of checkpoints")
                return [[asdict(file) for file in table.files] for table in self._write_tables(partial)]

            written = _agree(channel, write)
            tables = [
                replace(item.table, files=[RangeFile(**file) for files in written for file in files[number]])
                for number, item in enumerate(self._items)
            ]

            def commit() -> str:
                return folder.commit(partial, name, self._write(partial, tables)).manifest.to_text()

            _agree(channel, commit if channel.rank == 0 else None)
        except BaseException:
            if channel.rank == 0 and partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        path = self._path / name
        return Checkpoint(path, read_manifest(path))

    def _write(self, partial: Path, tables: list[Table]) -> Manifest:
        others = []
        if self._content.tensors:
            others.append(_write(partial, DENSE, [tensors_as_bytes(self._content.tensors)]))
        for name, source in self._content.others.items() if self._parent is None else ():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as file:
                others.append(_write(partial, name, iter(lambda: file.read(_PIECE), b"")))
        parent: Parent | None = folder.parent_of(self._parent) if self._parent is not None else None
        content = Manifest(
            step=self._step,
            serial=folder.new_serial(self._path),
            parent=parent,
            tables=tables,
            others=others,
            state={**self._content.state, "digest": [list(names) for names in self._content.digest]},
            state_sha256=self._state_sha256,
            versions={"hostdev": hostdev.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        alone = self._channel is None
        if alone and parent is None and content.state_sha256 is None:  # the files have all that it needs
            layers = Layers([Checkpoint(partial, content)])
            content = replace(content, state_sha256=state_digest(layers, self._content.digest, self._content.tensors))
        return content

    def _write_tables(self, partial: Path) -> list[Table]:
        found: list[list[Future[RangeFile]]] = []
        buffers: SimpleQueue[Rows] = SimpleQueue()
        for _ in range(BUFFERS):
            buffers.put(np.empty(0, np.float32))
        with Workers(_WRITERS, "hostdev-checkpoint", _give_way) as pool:
            for number, item in enumerate(self._items):
                (partial / "tables" / str(number)).mkdir(parents=True, exist_ok=True)
                first = item.first
                written: list[Future[RangeFile]] = []
                found.append(written)
                for start, stop, ids in _ranges(item):
                    buffer = buffers.get()
                    _raise_first(written)
                    N = stop - start if ids is None else len(ids)
                    buffer, columns, row_columns = _columns(buffer, item.table, N)
                    item.source.read(start, stop, ids, columns, row_columns)
                    table = item.table
                    rows = RowsOf(start, ids, dict(zip((WEIGHTS, *table.slots), columns, strict=True)),
                                  dict(zip(table.row_slots, row_columns, strict=True)))  # fmt: skip
                    if self._channel is not None:
                        start, stop, ids = start + first, stop + first, None if ids is None else ids + first
                        rows = RowsOf(start, ids, rows.columns, rows.row_columns)
                    piece = f"{len(written):06d}.arrow"
                    name = f"tables/{number}/{'' if self._channel is None else f'{self._channel.rank}-'}{piece}"

                    def write(
                        name: str = name, table: Table = table, start: int = start, stop: int = stop,
                        rows: RowsOf = rows, buffer: Rows = buffer,
                    ) -> RangeFile:  # fmt: skip
                        try:
                            return write_range(partial, name, table, start, stop, rows)
                        finally:
                            buffers.put(buffer)

                    written.append(pool.submit(write))
                item.stop()
            return [
                replace(item.table, files=[file.result() for file in written])
                for item, written in zip(self._items, found, strict=True)
            ]


def _agree(channel: Channel, work: Callable[[], Any] | None) -> list[Any]:
    """Do this process's part of some work, and return what each has come to; raises, in all, where one has failed."""
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
            raise UserError(f"rank {rank}: {why}")
    return [each for _, each in told]


def _give_way() -> None:
    """Let training have the cores first; this thread holds nothing that training waits for."""
    if sys.platform == "linux":  # where it is a matter of one thread
        with contextlib.suppress(OSError):  # where that is not allowed
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _raise_first(written: list[Future[RangeFile]]) -> None:
    for file in written:
        if file.done():
            file.result()


def _ranges(item: Item) -> Iterator[tuple[int, int, npt.NDArray[np.int64] | None]]:
    """Yield ranges of rows for a file each, with the rows in them that are to be saved; None for all."""
    V, most = item.table.rows if item.rows is None else item.rows, rows_per_file(item.table)
    if item.whole:
        edges = sorted({*range(0, V, most), *item.cuts, V})
        yield from ((start, stop, None) for start, stop in pairwise(edges))
        return
    step = max(64, most // 8)
    waiting: list[npt.NDArray[np.int64]] = []
    begin = have = 0
    for start in range(0, V, step):
        stop = min(V, start + step)
        ids = item.source.rows_between(start, stop)
        if have and have + len(ids) > most:
            yield begin, start, np.concatenate(waiting)
            begin, waiting, have = start, [], 0
        if len(ids):
            waiting.append(ids)
            have += len(ids)
    if have:
        yield begin, V, np.concatenate(waiting)


def _columns(buffer: Rows, table: Table, N: int) -> tuple[Rows, Rows, Rows]:
    """Return a buffer that is large enough for N rows, and their columns in it."""
    S, R, D = 1 + len(table.slots), len(table.row_slots), table.dim
    if buffer.size < N * (S * D + R):
        buffer = np.empty(N * (S * D + R), np.float32)
    vectors = N * S * D
    return buffer, buffer[:vectors].reshape(S, N, D), buffer[vectors : vectors + N * R].reshape(R, N)


def _write(root: Path, name: str, pieces: Iterable[bytes]) -> File:
    """Write a new file and bring it to the disk."""
    file = HashedFile(root / name)
    try:
        for piece in pieces:
            file.write(piece)
        return File(file=name, sha256=file.finish(), bytes=file.bytes)
    finally:
        file.close()


def described(table: Any) -> Table:
    """Return what a manifest says of a table."""
    optimizer = table.optimizer
    return Table(
        name=table.name,
        rows=table.total_rows,
        dim=table.dim,
        optimizer=type(optimizer).__name__,
        hyperparameters=asdict(optimizer),
        slots=list(optimizer.slots),
        row_slots=list(optimizer.row_slots),
        step=table.step,
        dtype=table.dtype,
        seed=table.seed if table.dtype != FP32 else None,
        order="ids" if getattr(table, "part", None) is None else SPREAD,
    )
