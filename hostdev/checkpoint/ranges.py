"""Files with table rows: Arrow IPC, one record batch each, with at most 64 MiB of weights and optimizer state.

Columns: `id`, int64, ascending, absent if the file has all rows of its range; for a table by key, `key`, int64,
`last_use` and `uses`, uint32; then `weights` and each optimizer state of D values per row, as lists of D float32
values; then each optimizer state of one value per row, as float32. If the rows are in segments, the column `location`,
int64 (`host.snapshot`), takes the place of weights and optimizer state.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.manifest import KEY_COLUMNS, BrokenCheckpointError, RangeFile, SegmentState, Table
from hostdev.core.checksums import HashedFile
from hostdev.core.digest import Digests, range_digests, rows_per_range
from hostdev.core.errors import raise_if_transient
from hostdev.core.keys import KeyColumns
from hostdev.host.snapshot import LOCATION_BITS
from hostdev.kernels.arrays import LongIds, Rows, scratch
from hostdev.kernels.shards import get_positions, ids_of

FILE_BYTES = 1 << 26
WEIGHTS, ID, LOCATION, KEY = "weights", "id", "location", KEY_COLUMNS[0]
SPREAD = "spread"  # a value of `Table.order`


class RowChunk(NamedTuple):
    """The rows of a file.

    Attributes:
        start: The first row of the file's range.
        ids: int64 [N], ascending, or None if the file has all rows of its range.
        columns: Columns by name, float32 [N, D]: weights first, then optimizer state.
        row_columns: Per-row optimizer state by name, float32 [N].
        keys: For a table by key, the keys [N].
        locations: int64 [N], where the rows are if they are in segments; `SegmentRows.load` then reads the columns.
    """

    start: int
    ids: LongIds | None
    columns: Mapping[str, Rows]
    row_columns: Mapping[str, Rows]
    keys: KeyColumns | None = None
    locations: LongIds | None = None

    def __len__(self) -> int:
        return len(self.columns[WEIGHTS] if self.locations is None else self.locations)


def rows_per_file(table: Table) -> int:
    """Return the maximum number of a table's rows in a file, a power of two."""
    row = 4 * (table.dim * (1 + len(table.slots)) + len(table.row_slots))
    return 1 << max(0, (FILE_BYTES // row).bit_length() - 1)


def has_whole_ranges(table: Table) -> bool:
    """Return whether a table's files in a full checkpoint hold whole ranges of `hostdev.core.digest`, in order."""
    return table.segments is None and table.order != SPREAD and rows_per_file(table) >= rows_per_range(table.dim)


def column_digests(table: Table, rows: RowChunk) -> dict[str, Digests]:
    """Return the SHA-256 of each range (`hostdev.core.digest`) of a file's rows, by column."""
    length = rows_per_range(table.dim)
    return {name: range_digests(values, length) for name, values in {**rows.columns, **rows.row_columns}.items()}


def make_schema(table: Table, *, full: bool) -> pa.Schema:
    """Return the Arrow schema of a table's files; with `full`, the files have all rows of their ranges."""
    vector = pa.list_(pa.float32(), table.dim)
    names = [(ID, pa.int64())] if not full else []
    if table.keys is not None:
        names += list(zip(KEY_COLUMNS, (pa.int64(), pa.uint32(), pa.uint32()), strict=True))
    if table.segments is not None:
        return pa.schema([*names, (LOCATION, pa.int64())])
    names += [(name, vector) for name in (WEIGHTS, *table.slots)]
    names += [(name, pa.float32()) for name in table.row_slots]
    return pa.schema(names)


def write_range(root: Path, name: str, table: Table, start: int, stop: int, rows: RowChunk) -> RangeFile:
    """Write rows in [start, stop) to the new file root/name, hash it, and sync it to disk."""
    full = rows.ids is None
    arrays = [] if full else [pa.array(rows.ids)]
    arrays += [pa.array(values) for values in rows.keys or ()]
    arrays += [
        pa.FixedSizeListArray.from_arrays(pa.array(column.ravel()), table.dim) for column in rows.columns.values()
    ]
    arrays += [pa.array(column) for column in rows.row_columns.values()]
    arrays += [] if rows.locations is None else [pa.array(rows.locations)]
    schema = make_schema(table, full=full)
    file = HashedFile(root / name)
    try:
        with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))
        checksum = file.finish()
    finally:
        file.close()
    return RangeFile(file=name, bytes=file.bytes, sha256=checksum, start=start, stop=stop, rows=len(rows))


def get_width(table: Table, column: str) -> int:
    """Return the number of float32 values of a row in a column; a location or a key, an int64, counts as two."""
    return 2 if column in (LOCATION, KEY) else 1 if column in table.row_slots else table.dim


def get_column(rows: RowChunk, column: str) -> Rows:
    """Return a column of rows, float32 [N, D], or [N] for per-row state; int64 locations and keys as [N, 2]."""
    if column in (LOCATION, KEY):
        values = rows.locations if column == LOCATION else None if rows.keys is None else rows.keys.keys
        assert values is not None
        return values.view(np.float32).reshape(-1, 2)
    return rows.columns[column] if column in rows.columns else rows.row_columns[column]


def stack_columns(table: Table, columns: Mapping[str, Rows], chosen: Any = slice(None)) -> tuple[Rows, Rows]:
    """Return chosen rows as block [n, 1 + S, D], valid until this thread calls this again, and per-row state [n, R]."""
    vectors = [columns[name][chosen] for name in (WEIGHTS, *table.slots)]
    block = scratch("checkpoint rows", (len(vectors[0]), len(vectors), table.dim))
    np.stack(vectors, axis=1, out=block)
    row_slots = np.empty((len(block), len(table.row_slots)), np.float32)
    for number, name in enumerate(table.row_slots):
        row_slots[:, number] = columns[name].reshape(-1)[chosen]
    return block, row_slots


def parse_range(path: Path, content: Any, table: Table, file: RangeFile) -> RowChunk:
    """Return the rows of a file as views of its content, a buffer such as a memory map.

    Args:
        path: The file.
        content: Its content.
        table: The table's entry in the manifest.
        file: The file's entry.

    Raises:
        BrokenCheckpointError: The rows do not match the manifest. (Kernels read them by address, without a check.)
    """
    values = file.rows * (table.dim * (1 + len(table.slots)) + len(table.row_slots))
    values = values if table.segments is None else 2 * file.rows
    if file.bytes < 4 * values:  # checked first, since a compressed file could need too much memory
        raise BrokenCheckpointError(f"{path} is broken (it is too small for {file.rows} rows)")
    try:
        reader = pa.ipc.open_file(pa.py_buffer(content))
        full = reader.schema.get_field_index(ID) < 0
        same = reader.schema.equals(make_schema(table, full=full)) and reader.num_record_batches == 1
        batch = reader.get_batch(0) if same else None
        if batch is None or len(batch) != file.rows:
            raise BrokenCheckpointError(f"{path} is broken (its content does not match the manifest)")
        batch.validate(full=True)
        if any(column.null_count or nested(column).null_count for column in batch.columns):
            raise BrokenCheckpointError(f"{path} is broken (values are missing)")
    except (pa.ArrowException, OSError) as error:
        raise_if_transient(error)
        raise BrokenCheckpointError(f"{path} is broken ({error})") from None
    ids = None if full else batch[ID].to_numpy()
    inside = file.rows == file.stop - file.start
    if ids is not None:
        inside = len(ids) > 0 and bool(file.start <= ids[0] and ids[-1] < file.stop and (ids[1:] > ids[:-1]).all())
    if not inside or not 0 <= file.start < file.stop <= table.rows:
        raise BrokenCheckpointError(f"{path} is broken (its rows do not match the range {file.start}..{file.stop - 1})")
    keys = None if table.keys is None else KeyColumns(*(batch[name].to_numpy() for name in KEY_COLUMNS))
    if table.segments is not None:
        locations = number_segments(batch[LOCATION].to_numpy(), file.start, table.segments)
        return RowChunk(file.start, None, {}, {}, keys, locations)
    columns = {
        name: batch[name].flatten().to_numpy().reshape(len(batch), table.dim) for name in (WEIGHTS, *table.slots)
    }
    return RowChunk(file.start, ids, columns, {name: batch[name].to_numpy() for name in table.row_slots}, keys)


def number_segments(locations: LongIds, start: int, state: SegmentState) -> LongIds:
    """Return a file's locations with segment numbers of the whole table; `start` is the file's first row."""
    first = [each.first_segment for each in state.numbering if each.first_row <= start][-1]
    return locations if not first else np.where(locations > 0, locations + (first << LOCATION_BITS), locations)


def nested(column: Any) -> Any:
    """Return the concatenated values of a column of lists; other columns are returned unchanged."""
    return column.flatten() if pa.types.is_fixed_size_list(column.type) else column


def require_covered(chain: Chain, name: str) -> list[tuple[int, int]]:
    """Return a table's row ranges in a chain's first checkpoint; raise BrokenCheckpointError if rows are missing."""
    found = sorted((file.start, file.stop) for file in chain[0].manifest.table(name).files)
    ends = [0, *(stop for _, stop in found)]
    is_gap = any(file.rows != file.stop - file.start for file in chain[0].manifest.table(name).files)
    if is_gap or [start for start, _ in found] != ends[:-1] or ends[-1] != chain[-1].manifest.table(name).rows:
        raise BrokenCheckpointError(f"{chain[0].path} is broken (rows of table {name!r} are missing)")
    return found


def has_local_rows(about: Table, file: RangeFile, table: Any) -> bool:
    """Return whether a file may have rows that this process holds."""
    if table.part is None or about.order != SPREAD or about.rows != table.total_rows:
        return True
    return bool(file.start < table.start + table.rows and table.start < file.stop)


def map_rows(about: Table, numbers: Any, table: Any) -> tuple[Any, Any]:
    """Return the local rows to load, and the indices of their values among the file's rows.

    Args:
        about: The table's entry in the manifest.
        numbers: The file's rows: ascending ids, or ascending positions if the rows were divided among processes.
        table: The table to load into.
    """
    part = table.part
    if about.order == SPREAD and (part is None or about.rows != table.total_rows):
        numbers = ids_of(numbers, about.rows)  # positions depend on the table's number of rows
    if part is None:
        return numbers, slice(None)
    same = about.order == SPREAD and about.rows == table.total_rows
    positions = numbers if same else get_positions(numbers, table.total_rows)
    chosen = np.flatnonzero((table.start <= positions) & (positions < table.start + table.rows))
    return positions[chosen] - table.start, chosen
