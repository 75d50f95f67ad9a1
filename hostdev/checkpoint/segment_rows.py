"""Rows of a checkpoint that are in segments, read by their locations; see `host.snapshot`.

Each block that is read is verified. Segments are mapped into memory, so that rows which are read often are in the
system's page cache, which processes share.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hostdev.checkpoint.folder import Checkpoint, check_file, mapped
from hostdev.checkpoint.manifest import BrokenCheckpointError, RangeFile, SegmentState, Table
from hostdev.checkpoint.ranges import SPREAD, WEIGHTS, RowChunk, parse_range
from hostdev.core.digest import read_singly
from hostdev.core.errors import UserError
from hostdev.core.initializers import from_text
from hostdev.core.memory import available_bytes
from hostdev.core.optimizers import OPTIMIZERS
from hostdev.host.disk.readers import Planes, Read, RecordSource
from hostdev.host.disk.storage import allocate_rows, count_row_bytes
from hostdev.host.layouts import Float32, Split, fill_rows
from hostdev.host.snapshot import LOCATION_BITS, split_locations
from hostdev.host.storage import RowFormat
from hostdev.kernels.arrays import LongIds, Rows, scratch
from hostdev.kernels.disk_records import BLOCK_HEADER, DAMAGED, GOOD, Format
from hostdev.kernels.jit import address_of
from hostdev.kernels.shards import ids_of

_OPTIMIZERS: dict[str, Callable[..., Any]] = {each.__name__: each for each in OPTIMIZERS.values()}


class SegmentRows:
    """The rows in a checkpoint's segments of a table. Several threads may call `read`.

    Args:
        root: The checkpoint's folder.
        table: The table's entry in the manifest.
        all_rows: Whether all rows will be read.

    Raises:
        BrokenCheckpointError: A segment is missing, or the entry is invalid.
        UserError: The segments were written by a release with another format of records.
    """

    def __init__(self, root: Path, table: Table, *, all_rows: bool = False) -> None:
        assert table.segments is not None
        self._root, self._table, self.state = root, table, table.segments
        self.format = make_format(root, table, self.state)
        self._maps = [np.frombuffer(mapped(root / file.file), np.uint8) for file in self.state.files]
        if not (all_rows and 2 * sum(each.nbytes for each in self._maps) <= available_bytes()):
            for each in self._maps:  # the rows of a lookup or a range are scattered, so reading ahead is useless
                read_singly(each)
        row_bytes = count_row_bytes(self.format)
        records = Format.of(row_bytes, 0)
        require_format(root, table, self.state, records, row_bytes)
        tags = np.array([file.number for file in self.state.files], np.uint64) << np.uint64(32)
        addresses = np.array([int(address_of(each)) for each in self._maps], np.int64)
        files = np.full(len(tags), -1, np.int32)
        self._source = RecordSource(files, tags, records._replace(per_segment=1 << LOCATION_BITS), addresses)
        self._records = count_records(self.state)

    def read(self, locations: LongIds, ids: LongIds) -> Float32 | Split:
        """Return copies of the rows at locations [N]; ids [N] are the rows' ids in the whole table, or their keys.

        A row with location 0 gets its initial values.

        Raises:
            BrokenCheckpointError: A segment is damaged, or there is no such location.
        """
        rows = allocate_rows(self.format, np.zeros(len(locations), np.int64))
        new = np.flatnonzero(locations == 0).astype(np.int32)
        if len(new):
            fill_rows(rows, new, ids[new])
        there = np.flatnonzero(locations != 0).astype(np.int32)
        if not len(there):
            return rows
        require_locations(self._root, self._table, locations[there], self._records)
        positions = locations[there] - 1
        read = Read(self._source, positions, ids[there], there, Planes.of(rows.planes), lambda read: None)
        read.wait()
        self._require(read)
        return rows

    def _require(self, read: Read) -> None:
        kind, position, _ = map(int, read.failure)
        if kind == GOOD:
            return
        size, (number, record) = self.state.block_bytes, divmod(position, self._source.format.per_segment)
        segment, block = self._root / self.state.files[number].file, record // self._source.format.per_block
        what = "its checksum is wrong" if kind == DAMAGED else "it has rows of another place"
        begin = block * size
        raise BrokenCheckpointError(f"{segment} is broken (bytes {begin:,} to {begin + size:,}: {what})")

    def columns(self, locations: LongIds, ids: LongIds) -> dict[str, Rows]:
        """Return all columns of the rows at locations [N], float32 [N, D], or [N] for per-row state; see `read`."""
        table, n = self._table, len(locations)
        rows = self.read(locations, ids)
        found = np.empty((1 + len(table.slots), n, table.dim), np.float32)
        rows.copy_to_columns(0, n, 0, np.arange(n), found)
        found.flags.writeable = False
        named = dict(zip((WEIGHTS, *table.slots), found, strict=True))
        return named | {
            name: np.ascontiguousarray(rows.row_slots[:, number]) for number, name in enumerate(table.row_slots)
        }

    def load(self, rows: RowChunk) -> RowChunk:
        """Return the rows of a file of locations with their columns; see `read`."""
        table = self._table
        assert rows.locations is not None
        ids = np.arange(rows.start, rows.start + len(rows)) if rows.keys is None else rows.keys.keys
        found = self.columns(rows.locations, ids_of(ids, table.rows) if table.order == SPREAD else ids)
        columns = {name: found[name] for name in (WEIGHTS, *table.slots)}
        row_columns = {name: found[name] for name in table.row_slots}
        return RowChunk(rows.start, None, columns, row_columns, rows.keys, rows.locations)


def read_chunk(path: Path, table: Table, file: RangeFile, segments: SegmentRows | None, *, check: bool) -> RowChunk:
    """Return the rows of a file with their columns, which are valid until this thread reads the next file.

    Args:
        path: The file.
        table: The table's entry in the manifest.
        file: The file's entry.
        segments: The table's segments, if the file has locations in them.
        check: Whether to verify the file's checksum.

    Raises:
        BrokenCheckpointError: The file or a segment is damaged.
    """
    if check:
        content = scratch("checkpoint content", (file.bytes,), np.uint8).data
        check_file(path, file, content)
    else:
        content = mapped(path)
    rows = parse_range(path, content, table, file)
    return rows if segments is None else segments.load(rows)


def open_segments(checkpoint: Checkpoint, name: str) -> SegmentRows | None:
    """Return a `SegmentRows` to read all rows of a checkpoint's table; None if the rows are not in segments."""
    table = checkpoint.manifest.table(name)
    return None if table.segments is None else SegmentRows(checkpoint.path, table, all_rows=True)


def count_records(state: SegmentState) -> LongIds:
    """Return how many records each segment can have, int64 [segments]."""
    per_block = (state.block_bytes - BLOCK_HEADER) // state.record_bytes
    return np.array([file.bytes // state.block_bytes * per_block for file in state.files], np.int64)


def require_locations(root: Path, table: Table, locations: LongIds, records: LongIds) -> None:
    """Raise BrokenCheckpointError unless all locations [N], none of them 0, exist; segment i has records[i] records."""
    segments, numbers = split_locations(locations)
    wrong = (locations < 0) | (segments >= len(records))
    if wrong.any() or (numbers >= records[segments]).any():
        raise BrokenCheckpointError(
            f"{root} is broken (table {table.name!r} has rows in segments that do not have them)"
        )


def make_format(root: Path, table: Table, state: SegmentState) -> RowFormat:
    """Return the format of a table's rows; raise BrokenCheckpointError if the manifest's entry does not define one."""
    try:
        optimizer: Any = _OPTIMIZERS[table.optimizer](**table.arguments)
        init = from_text(state.init)
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpointError(f"{root} is broken (table {table.name!r}: {error})"[:480]) from None
    if [*optimizer.slots] != table.slots or [*optimizer.row_slots] != table.row_slots:
        raise BrokenCheckpointError(f"{root} is broken (table {table.name!r} has other state than its optimizer)")
    return RowFormat(table.name, table.dim, optimizer, table.dtype, table.slots_dtype, state.seed, init)


def require_format(root: Path, table: Table, state: SegmentState, records: Format, row_bytes: int) -> None:
    """Raise UserError unless a table's segments have records of this format."""
    wanted = row_bytes, records.record_bytes, records.block_bytes
    if (state.row_bytes, state.record_bytes, state.block_bytes) != wanted:
        raise UserError(
            f"{root}: the segments of table {table.name!r} have records of {state.record_bytes:,} bytes, and this "
            f"hostdev release reads records of {records.record_bytes:,} bytes; use the release that has written them"
        )
