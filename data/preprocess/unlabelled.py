"""Raw rows for predictions: Criteo's text with or without labels, or any table; encoded as a data set's were."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data.batch import Batch
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.delimited import DelimitedFile
from hostdev.data.preprocess.encoding import Encoding, WrongRowError
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
    labelled: bool  # there is a column of labels, though some may be missing

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
            self.labelled = file.readline().count(b"\t") >= len(criteo.COLUMNS) - 1

    def parts(self) -> Iterator[Part]:
        """Iterate over the rows, some MiB of text at a time; malformed lines have no place."""
        for file, block, first in self._text.blocks():
            size = len(block)
            block, unlabelled = _with_labels(block) if self.labelled else (_labelled(block), None)
            rows, lines = criteo.parse(block, file=str(file), first_line=first)
            batch = self._encoding.encode_criteo(rows)
            wrong = np.array([line.line - first for line in rows.rejected], np.int64)
            places = np.delete(np.arange(lines), wrong)
            without = np.isin(places, unlabelled) if unlabelled is not None else np.ones(len(places), np.bool_)
            label = np.where(without, np.nan, batch.label).astype(np.float32)
            yield Part(replace(batch, label=label), places if len(wrong) else None, lines, size)


def _labelled(block: bytes) -> bytes:
    """Return lines without labels with one."""
    ended = block if block.endswith(b"\n") else block + b"\n"
    return b"0\t" + ended[:-1].replace(b"\n", b"\n0\t") + b"\n"


def _with_labels(block: bytes) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Return lines with a 0 for each label that is missing or none, and which lines these are, from 0."""
    text = np.frombuffer(block, np.uint8)
    starts = np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])
    starts = starts[starts + 1 < len(text)]  # a line of one character is malformed, whatever it is
    good = ((text[starts] == ord("0")) | (text[starts] == ord("1"))) & (text[starts + 1] == ord("\t"))
    wrong = np.flatnonzero(~good)
    pieces, done = [], 0
    for start in starts[wrong].tolist():
        line_end = block.find(b"\n", start)
        tab = block.find(b"\t", start, line_end if line_end >= 0 else len(block))
        pieces += [block[done:start], b"0"]
        done = tab if tab >= 0 else line_end if line_end >= 0 else len(block)
    return b"".join([*pieces, block[done:]]), wrong


class _Table:
    """A table; lines of text that are malformed, and rows with a number that cannot be read, have no place."""

    def __init__(self, file: TableFile, encoding: Encoding) -> None:
        self._file, self._encoding = file, encoding
        self.total = file.path.stat().st_size
        if missing := [name for name in encoding.columns() if name not in file.names]:
            raise UserError(f"{file.path} has no column {missing[0]!r}; it has {', '.join(file.names[:30])}")
        if twice := [name for name in encoding.columns() if file.names.count(name) > 1]:
            raise UserError(f"{file.path} has {file.names.count(twice[0])} columns of the name {twice[0]!r}")
        label = encoding.schema.label
        self.labelled = file.names.count(label) == 1
        self._used = [*encoding.columns(), *([label] if self.labelled else [])]

    def parts(self) -> Iterator[Part]:
        """Iterate over the rows."""
        done = 0
        for chunk in self._file.chunks(self._used):
            n = len(chunk.batch)
            columns = [chunk.batch.column(chunk.batch.schema.get_field_index(name)) for name in self._used]
            try:
                batch, kept = self._encoding.encode_readable(pa.RecordBatch.from_arrays(columns, names=self._used))
            except WrongRowError as error:
                raise UserError(f"{self._file.path}, row {chunk.number(error.row)}, {error.reason}") from None
            except UserError as error:
                raise UserError(f"{self._file.path}: {error}") from None
            if not chunk.skipped and len(kept) == n:
                yield Part(batch, None, n, chunk.size)
                done += n
                continue
            numbers = chunk.first + np.arange(1, n + 1)
            for skipped in chunk.skipped:
                numbers += skipped <= numbers
            numbers -= 1 + done
            lines = max([int(numbers[-1]) + 1 if n else 0, *(number - done for number in chunk.skipped)])
            yield Part(batch, numbers[kept], lines, chunk.size)
            done += lines
