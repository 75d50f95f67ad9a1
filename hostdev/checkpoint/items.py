"""The content of a checkpoint that is being written: its tables, and the rows of each file.

S and R: number of optimizer state columns with D values per row, and with one value per row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.manifest import (
    KEYED_VERSION,
    SEGMENT_VERSION,
    VERSION,
    Numbering,
    RangeFile,
    SegmentEntry,
    SegmentState,
    Table,
)
from hostdev.checkpoint.ranges import SPREAD, WEIGHTS, RowChunk, rows_per_file
from hostdev.core.keys import KeyColumns
from hostdev.core.optimizers import hyperparameters
from hostdev.core.outputs import sync_folder
from hostdev.core.table_dtypes import FP32
from hostdev.host.disk.segments import SegmentFile, link_or_copy, try_link
from hostdev.kernels.arrays import LongIds, Rows

Held = Mapping[tuple[int, str], Path]  # paths of segments, by size and checksum
FROM_FIRST = [Numbering(first_row=0, first_segment=0)]


class TableSnapshot(Protocol):
    """A table's rows at one moment; `host.snapshot.Snapshot` implements it. One thread reads the ranges in order."""

    count: int  # number of rows to save

    def rows_between(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the rows in [first, last) to save, ascending."""

    def read(self, first: int, last: int, ids: npt.NDArray[np.int64] | None, columns: Rows, row_columns: Rows) -> None:
        """Copy rows in [first, last) to the outputs.

        Args:
            first: The first row of the range.
            last: The end of the range.
            ids: The rows to copy, int64 [N], ascending, or None for all N = last - first rows.
            columns: Output, float32 [1 + S, N, D]: weights, then optimizer state.
            row_columns: Output, float32 [R, N]: per-row optimizer state.
        """

    def locate(self, first: int, last: int, out: LongIds) -> None:
        """Write the locations of the rows [first, last) to `out`; only for a table whose entry has segments."""

    def finish(self, hold: Callable[[SegmentFile], str]) -> list[tuple[str, SegmentFile]]:
        """Call `hold` for each segment that has rows; see `host.snapshot.LocationCopies.finish`."""

    def key_columns(self, first: int, last: int) -> KeyColumns | None:
        """Return the keys of the rows [first, last) of a table by key, or None."""

    def other_keys(self) -> Sequence[npt.NDArray[Any]] | None:
        """Return the fields of `keyed.OtherKeys` of a table by key, or None; the first call takes time."""

    def end(self) -> None:
        """Free memory, as all rows have been read; may be called again."""


class FullSource:
    """The methods of a `TableSnapshot` that has all rows of a table by row, in memory or in files."""

    count: int

    def rows_between(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return all rows in [first, last)."""
        return np.arange(first, last)

    def locate(self, first: int, last: int, out: LongIds) -> None:
        """Raise NotImplementedError: these rows are not in segments."""
        raise NotImplementedError

    def finish(self, hold: Callable[[SegmentFile], str]) -> list[tuple[str, SegmentFile]]:
        """Raise NotImplementedError: these rows are not in segments."""
        raise NotImplementedError

    def key_columns(self, first: int, last: int) -> KeyColumns | None:
        """See `TableSnapshot`."""
        return None

    def other_keys(self) -> Sequence[npt.NDArray[Any]] | None:
        """See `TableSnapshot`."""
        return None

    def end(self) -> None:
        """See `TableSnapshot`."""


class Item(NamedTuple):
    """A table to save, or this process's part of a table; `end(saved)` is called when writing has ended."""

    table: Table
    source: TableSnapshot
    full: bool  # whether all rows are saved
    end: Callable[[bool], None] = lambda saved: None
    first: int = 0  # position of the part's first row among all rows
    rows: int | None = None  # rows of the part, or None for all rows of the table
    cuts: Sequence[int] = ()  # rows at which a file must begin


def split_rows(item: Item) -> Iterator[tuple[int, int, LongIds | None]]:
    """Yield (start, stop, ids) for each file: its row range, and the rows in it to save (None for all)."""
    V, most = item.table.rows if item.rows is None else item.rows, rows_per_file(item.table)
    if item.full:
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


def read_rows(item: Item, buffer: Rows, start: int, stop: int, ids: LongIds | None) -> tuple[Rows, RowChunk]:
    """Return a buffer, which is `buffer` if that is large enough, and the rows of a file in it."""
    table, N = item.table, stop - start if ids is None else len(ids)
    keys = item.source.key_columns(start, stop)
    if table.segments is not None:
        locations = np.empty(N, np.int64)
        item.source.locate(start, stop, locations)
        return buffer, RowChunk(start, None, {}, {}, keys, locations)
    buffer, columns, row_columns = _get_columns(buffer, table, N)
    item.source.read(start, stop, ids, columns, row_columns)
    vectors = dict(zip((WEIGHTS, *table.slots), columns, strict=True))
    return buffer, RowChunk(start, ids, vectors, dict(zip(table.row_slots, row_columns, strict=True)), keys)


def _get_columns(buffer: Rows, table: Table, N: int) -> tuple[Rows, Rows, Rows]:
    """Return a buffer that is large enough for N rows, and views of the rows' columns in it."""
    S, R, D = 1 + len(table.slots), len(table.row_slots), table.dim
    if buffer.size < N * (S * D + R):
        buffer = np.empty(N * (S * D + R), np.float32)
    vectors = N * S * D
    return buffer, buffer[:vectors].reshape(S, N, D), buffer[vectors : vectors + N * R].reshape(R, N)


def hold_segments(partial: Path, prefix: str, item: Item, held: Held) -> SegmentState | None:
    """Hold the segments that a table's rows are in, by hard links if possible; return their entry in the manifest.

    Args:
        partial: The checkpoint's folder.
        prefix: The beginning of the files' names.
        item: The table.
        held: Segments of the last checkpoint. They are linked if possible; so if the table is on another file system,
            only the segments that the last checkpoint lacks are copied.
    """
    if item.table.segments is None:
        return None

    def hold(file: SegmentFile) -> str:
        name = f"{prefix}{file.path.name}"
        before = held.get((file.nbytes, file.sha256))
        if not (before is not None and try_link(before, partial / name)):
            link_or_copy(file.path, partial / name)
        return name

    entries = [
        SegmentEntry(file=name, bytes=file.nbytes, sha256=file.sha256, number=file.number)
        for name, file in item.source.finish(hold)
    ]
    sync_folder((partial / prefix).parent)
    return replace(item.table.segments, files=entries)


def join_entries(table: Table, parts: list[tuple[dict[str, Any], int]]) -> Table:
    """Return the entry of a table that several processes have written; `parts`: each one's entry and first row."""
    files = [RangeFile(**file) for found, _ in parts for file in found["files"]]
    if table.segments is None:
        return replace(table, files=files)
    segments: list[SegmentEntry] = []
    numbering: list[Numbering] = []
    for found, first in parts:
        if not numbering or first > numbering[-1].first_row:  # a process may have no rows
            numbering.append(Numbering(first_row=first, first_segment=len(segments)))
        else:
            assert not segments[numbering[-1].first_segment :]
        segments += [SegmentEntry(**file) for file in found["segments"]["files"]]
    return replace(table, files=files, segments=replace(table.segments, files=segments, numbering=numbering))


def get_version(tables: Sequence[Table]) -> int:
    """Return the oldest format version that can hold these tables."""
    if any(table.segments is not None or table.whole for table in tables):
        return SEGMENT_VERSION
    return VERSION if all(table.keys is None for table in tables) else KEYED_VERSION


def describe_table(table: Any) -> Table:
    """Return a table's entry in the manifest; `CheckpointManager` completes that of a table by key."""
    optimizer = table.optimizer
    is_rounded = (table.dtype, table.slots_dtype) != (FP32, FP32)
    return Table(
        name=table.name,
        rows=table.total_rows,
        dim=table.dim,
        optimizer=type(optimizer).__name__,
        hyperparameters=hyperparameters(optimizer),
        slots=list(optimizer.slots),
        row_slots=list(optimizer.row_slots),
        step=table.step,
        dtype=table.dtype,
        slots_dtype=table.slots_dtype,
        seed=table.seed if is_rounded else None,
        order="ids" if table.part is None else SPREAD,
        history=table.history.packed(),
    )


class DeviceRows(FullSource):
    """A `TableSnapshot` of the current rows of a device table.

    Args:
        table: A `DeviceTable`.
        at_once: Maximum bytes to copy. A larger table is not copied, so it must not change until the checkpoint is
            written.
    """

    def __init__(self, table: Any, at_once: int) -> None:
        self.count = int(table.rows)
        self._block, self._row_slots = table.block, table.row_slots
        size = self._block.nbytes + self._row_slots.nbytes
        self.is_live = size > at_once
        if not self.is_live:
            self._block = self._block.to("cpu", copy=True)
            self._row_slots = self._row_slots.to("cpu", copy=True)

    def read(self, first: int, last: int, ids: npt.NDArray[np.int64] | None, columns: Rows, row_columns: Rows) -> None:
        """See `TableSnapshot`."""
        assert ids is None
        np.copyto(columns, self._block[first:last].cpu().numpy().transpose(1, 0, 2))
        np.copyto(row_columns, self._row_slots[first:last].cpu().numpy().T)

    def end(self) -> None:
        """Free the copies."""
        self._block, self._row_slots = self._block[:0], self._row_slots[:0]
