"""Sizes of a Parquet file's row groups, which limit how many rows are decoded at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import places

MOST_BYTES = 1 << 27  # maximum bytes of text in rows that are decoded together
_LARGE = 1 << 13  # bytes; columns with smaller chunks do not limit how many rows are decoded at a time
_BUFFER = 1 << 12  # bytes; without a buffer size, Arrow reads a column's whole chunk when only metadata is needed


class RowGroupSize(NamedTuple):
    """Size of the used columns of a row group; the other columns are not read."""

    rows: int
    list_values: int
    text_bytes: int  # decompressed but still encoded


@contextmanager
def open_parquet(path: Path, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file, whose name need not be valid UTF-8."""
    with places.open_arrow(path) as source, pq.ParquetFile(source, **options) as file:
        yield file


class RowGroups:
    """The row groups of an untrusted Parquet file, with the columns to read.

    Attributes:
        ends: For each row group, the number of rows in the file up to its end, int64.
    """

    def __init__(self, path: Path, file: pq.ParquetFile, used: Sequence[str]) -> None:
        self._path, self._file, self._used = path, file, used
        metadata = file.metadata
        self.ends = np.cumsum([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])
        inside = tuple(f"{name}." for name in used)  # a list's path has a suffix that depends on the writer
        paths = [file.schema.column(i).path for i in range(len(file.schema))]
        self._columns = {i: name for i, name in enumerate(paths) if name in used or name.startswith(inside)}
        self._last: tuple[int, list[tuple[str, pq.ColumnChunkMetaData]]] = (-1, [])

    @classmethod
    @contextmanager
    def open(cls, path: Path, used: Sequence[str]) -> Iterator["RowGroups"]:
        """Open a file; the methods of the result raise OSError or pyarrow's errors if the file is damaged."""
        with open_parquet(path, buffer_size=_BUFFER) as file:
            yield cls(path, file, used)

    def size(self, number: int) -> RowGroupSize:
        """Return the sizes of a row group."""
        columns = self._metadata(number)
        values = sum(one.num_values for name, one in columns if name not in self._used)
        text = sum(one.total_uncompressed_size for _, one in columns if one.physical_type == "BYTE_ARRAY")
        return RowGroupSize(self._file.metadata.row_group(number).num_rows, values, text)

    def rows_for_text(self, number: int, rows: int) -> int:
        """Return how many rows of a row group, at most `rows`, can be decoded at once within MOST_BYTES of text.

        Text that is stored with a dictionary can be much larger when decoded.
        """
        doubtful = [
            name
            for name, one in self._metadata(number)
            if one.has_dictionary_page and one.physical_type == "BYTE_ARRAY" and one.total_uncompressed_size > _LARGE
        ]
        if not doubtful:
            return rows
        longest = 0
        with open_parquet(self._path, read_dictionary=doubtful) as file:
            names = sorted({name.partition(".")[0] for name in doubtful})
            for batch in file.iter_batches(1, row_groups=[number], columns=names):
                longest = sum(map(_longest, batch.columns))
                break
        return max(1, min(rows, MOST_BYTES // max(1, longest)))

    def _metadata(self, number: int) -> list[tuple[str, pq.ColumnChunkMetaData]]:
        """Return the metadata of a row group's columns, each with its path in the schema."""
        if self._last[0] == number:
            return self._last[1]
        # `group.column` crashes the process if a column's metadata is damaged. Reading 0 rows checks the same metadata,
        # decodes nothing, and raises an error instead.
        for _ in self._file.reader.iter_batches(0, row_groups=[number], column_indices=list(self._columns)):
            pass
        group = self._file.metadata.row_group(number)
        if group.num_columns != len(self._file.schema):
            raise OSError(f"row group {number} has {group.num_columns} columns, not {len(self._file.schema)}")
        found = [(name, group.column(i)) for i, name in self._columns.items()]
        if [name for name, _ in found] != [column.path_in_schema for _, column in found]:
            raise OSError(f"row group {number} has different columns than the schema")
        self._last = number, found
        return found


def _longest(column: Any) -> int:
    """Return the number of bytes in the longest text of a column's dictionary, or 0 if there is none."""
    values = column
    while pa.types.is_nested(values.type) and hasattr(values, "values"):
        values = values.values
    if not pa.types.is_dictionary(values.type) or not len(values.dictionary):
        return 0
    return int(np.max(arrow.text_lengths(values.dictionary), initial=0))
