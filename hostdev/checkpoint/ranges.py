"""Files with table rows: Arrow IPC, one record batch each, at most 64 MiB.

Columns: `id`, int64, ascending, absent if the file has all rows of its range; for a table by key, `key`, int64,
`last_use` and `uses`, uint32; then `weights` and each optimizer state
of D values per row, as lists of D float32 values; then each optimizer state of one value per row, as float32.
"""

import os
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.manifest import KEY_COLUMNS, BrokenCheckpointError, File, RangeFile, Table
from hostdev.core.checksums import HashedFile
from hostdev.core.digest import Digests, range_digests, rows_per_range
from hostdev.core.errors import raise_if_transient
from hostdev.core.keys import KeyColumns

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

FILE_BYTES = 1 << 26
WEIGHTS, ID = "weights", "id"
SPREAD = "spread"  # a value of `Table.order`
_PIECE = 1 << 22  # bytes


class RowChunk(NamedTuple):
    """The rows of a file.

    Attributes:
        start: The first row of the file's range.
        ids: int64 [N], ascending, or None if the file has all rows of its range.
        columns: Columns by name, float32 [N, D]: weights first, then optimizer state.
        row_columns: Per-row optimizer state by name, float32 [N].
        keys: For a table by key, the keys [N].
    """

    start: int
    ids: Ids | None
    columns: dict[str, Rows]
    row_columns: dict[str, Rows]
    keys: KeyColumns | None = None

    def __len__(self) -> int:
        return len(self.columns[WEIGHTS])


def rows_per_file(table: Table) -> int:
    """Return the number of a table's rows per file, a power of two."""
    row = 4 * (table.dim * (1 + len(table.slots)) + len(table.row_slots))
    return 1 << max(0, (FILE_BYTES // row).bit_length() - 1)


def has_whole_ranges(table: Table) -> bool:
    """Return whether a table's files in a full checkpoint hold whole ranges of `hostdev.core.digest`, in order."""
    return table.order != SPREAD and rows_per_file(table) >= rows_per_range(table.dim)


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
    schema = make_schema(table, full=full)
    file = HashedFile(root / name)
    try:
        with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))
        checksum = file.finish()
    finally:
        file.close()
    return RangeFile(file=name, bytes=file.bytes, sha256=checksum, start=start, stop=stop, rows=len(rows))


def parse_range(path: Path, content: Any, table: Table, file: RangeFile) -> RowChunk:
    """Return the rows of a file as views of its content, a buffer such as a memory map.

    Raises:
        BrokenCheckpointError: The rows do not match the manifest. (Kernels read them by address, without a check.)
    """
    values = file.rows * (table.dim * (1 + len(table.slots)) + len(table.row_slots))
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
        inside = _ascend(ids, file.start, file.stop)
    if not inside or not 0 <= file.start < file.stop <= table.rows:
        raise BrokenCheckpointError(f"{path} is broken (its rows do not match the range {file.start}..{file.stop - 1})")
    columns = {
        name: batch[name].flatten().to_numpy().reshape(len(batch), table.dim) for name in (WEIGHTS, *table.slots)
    }
    keys = None if table.keys is None else KeyColumns(*(batch[name].to_numpy() for name in KEY_COLUMNS))
    return RowChunk(file.start, ids, columns, {name: batch[name].to_numpy() for name in table.row_slots}, keys)


def nested(column: Any) -> Any:
    """Return the concatenated values of a column of lists; other columns are returned unchanged."""
    return column.flatten() if pa.types.is_fixed_size_list(column.type) else column


def _ascend(ids: Ids, start: int, stop: int) -> bool:
    return len(ids) > 0 and bool(start <= ids[0] and ids[-1] < stop and (ids[1:] > ids[:-1]).all())


def mapped(path: Path) -> Any:
    """Return a file's memory-mapped content; raise BrokenCheckpointError if it cannot be read."""
    try:
        with pa.memory_map(os.fsencode(path)) as file:
            return file.read_buffer()
    except OSError as error:
        raise_if_transient(error)
        raise BrokenCheckpointError(f"{path} is broken ({error})") from None


def require_covered(chain: Chain, name: str) -> list[tuple[int, int]]:
    """Return a table's row ranges in a chain's full checkpoint; raise BrokenCheckpointError if rows are missing."""
    found = sorted((file.start, file.stop) for file in chain[0].manifest.table(name).files)
    ends = [0, *(stop for _, stop in found)]
    is_gap = any(file.rows != file.stop - file.start for file in chain[0].manifest.table(name).files)
    if is_gap or [start for start, _ in found] != ends[:-1] or ends[-1] != chain[-1].manifest.table(name).rows:
        raise BrokenCheckpointError(f"{chain[0].path} is broken (rows of table {name!r} are missing)")
    return found


def check_file(path: Path, file: File, content: memoryview | None = None) -> None:
    """Read a file in chunks; raise BrokenCheckpointError unless its size and checksum match the manifest.

    Args:
        path: The file.
        file: The file's entry in the manifest.
        content: Output for the file's content, `file.bytes` bytes; if None, the file is only verified.
    """
    if wrong := _wrong(path, file, content):
        error = BrokenCheckpointError(f"{path} {wrong}")
        error.file = path
        raise error


def _wrong(path: Path, file: File, content: memoryview | None) -> str | None:
    """Return what is wrong with a file, as text that follows its path in a message, or None if it is valid."""
    digest, size = sha256(), 0
    piece = memoryview(bytearray(_PIECE)) if content is None else content
    try:
        with path.open("rb", buffering=0) as stream:
            there = os.fstat(stream.fileno()).st_size
            if there != file.bytes:
                return f"is broken (it has {there} bytes, not {file.bytes})"
            while size < there:
                start = 0 if content is None else size
                read = stream.readinto(piece[start : start + min(_PIECE, there - size)])
                if not read:
                    return f"is broken (it has {size} bytes, not {file.bytes})"
                digest.update(piece[start : start + read])
                size += read
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        raise_if_transient(error)
        return f"cannot be read ({error.strerror})"
    return None if digest.hexdigest() == file.sha256 else "is broken (its checksum is wrong)"
