"""Raw rows for predictions: Criteo's text with or without labels, or any table; encoded as a data set's were."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data.batch import Batch
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.delimited import DelimitedFile
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.files import ArrowTable, ParquetTable, TableFile, format_of

from hostdev.core.errors import UserError


class Part(NamedTuple):
    """Rows of a file in order."""

    batch: Batch
    places: npt.NDArray[np.int64] | None  # of the rows among the part's lines; None: all lines are rows
    lines: int
    size: int  # bytes of the file, about


class Rows(Protocol):
    """A file's rows."""

    total: int  # bytes

    def parts(self) -> Iterator[Part]:
        """Iterate over the rows; UserError for what cannot be read."""


def rows_in(path: Path, encoding: Encoding, options: Mapping[str, Any]) -> Rows:
    """Return the rows of a file; UserError where it cannot be read.

    options  of the data set's manifest: how its files were read
    """
    found = format_of(path)
    if encoding.is_criteo and found == "text":
        return _Criteo(path, encoding)
    if found == "text":
        file: TableFile = DelimitedFile(
            path,
            columns=_columns(path, options),
            delimiter=options.get("delimiter"),
            quotes=options.get("quotes", True),
        )
    else:
        file = ParquetTable(path) if found == "Parquet" else ArrowTable(path, stream=found == "an Arrow stream")
    return _Table(file, encoding)


def _columns(path: Path, options: Mapping[str, Any]) -> list[str] | None:
    """Return the names of text without a header; without the label where a line has one value less."""
    names = options.get("columns")
    if names is None:
        return None
    first = DelimitedFile(path, delimiter=options.get("delimiter"), quotes=options.get("quotes", True)).names
    if len(first) == len(names) - 1:
        return [name for name in names if name != options["label"]]
    return list(names)


class _Criteo:
    """Criteo's text; of lines with 39 values the label is missing."""

    def __init__(self, path: Path, encoding: Encoding) -> None:
        self._text, self._encoding = CriteoText([path]), encoding
        self.total = self._text.total
        with path.open("rb") as file:
            self._labelled = file.readline().count(b"\t") >= len(criteo.COLUMNS) - 1

    def parts(self) -> Iterator[Part]:
        """Iterate over the rows, some MiB of text at a time; malformed lines have no place."""
        for file, block, first in self._text.blocks():
            size = len(block)
            if not self._labelled:
                ended = block if block.endswith(b"\n") else block + b"\n"
                block = b"0\t" + ended[:-1].replace(b"\n", b"\n0\t") + b"\n"
            rows, lines = criteo.parse(block, file=str(file), first_line=first)
            batch = self._encoding.encode_criteo(rows)
            if not self._labelled:
                batch = Batch(np.full(len(batch), np.nan, np.float32), batch.dense, batch.ids, batch.bags)
            wrong = np.array([line.line - first for line in rows.rejected], np.int64)
            places = np.delete(np.arange(lines), wrong) if len(wrong) else None
            yield Part(batch, places, lines, size)


class _Table:
    """A table; lines of text that are malformed have no place."""

    def __init__(self, file: TableFile, encoding: Encoding) -> None:
        self._file, self._encoding = file, encoding
        self.total = file.path.stat().st_size
        if missing := [name for name in encoding.columns() if name not in file.names]:
            raise UserError(f"{file.path} has no column {missing[0]!r}; it has {', '.join(file.names[:30])}")
        label = encoding.schema.label
        self._used = [*encoding.columns(), *([label] if label in file.names else [])]

    def parts(self) -> Iterator[Part]:
        """Iterate over the rows."""
        done = 0
        for chunk in self._file.chunks(self._used):
            n = len(chunk.batch)
            try:
                batch = self._encoding.encode(pa.RecordBatch.from_arrays(
                    [chunk.batch.column(chunk.batch.schema.get_field_index(name)) for name in self._used],
                    names=self._used,
                ))  # fmt: skip
            except UserError as error:
                raise UserError(f"{self._file.path}, after row {chunk.first}: {error}") from None
            if not chunk.skipped:
                yield Part(batch, None, n, chunk.size)
                done += n
                continue
            numbers = np.array([chunk.number(row) for row in range(n)], np.int64) - 1 - done
            lines = max([int(numbers[-1]) + 1 if n else 0, *(number - done for number in chunk.skipped)])
            yield Part(batch, numbers, lines, chunk.size)
            done += lines
