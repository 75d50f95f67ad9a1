"""Rows for predictions, with or without labels: reads Criteo text or a table, and encodes it like a data set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core.errors import UserError
from hostdev.data.batch import Batch
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.delimited import DelimitedFile, TextFormat
from hostdev.data.preprocess.encoding import Encoding, WrongRowError
from hostdev.data.preprocess.files import Chunk, TableFile, chunks, find_format
from hostdev.data.preprocess.inputs import HEAD_BYTES, STANDARD_INPUT, AnyInput, open_input
from hostdev.data.preprocess.naming import about_blanks, listed
from hostdev.data.preprocess.table import open_file

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawQuery


class EncodedPart(NamedTuple):
    """Consecutive rows of a file."""

    batch: Batch
    places: npt.NDArray[np.int64] | None  # the rows' line numbers in the part, from 0; None if all lines are rows
    lines: int
    size: int  # approximate bytes that the lines take in the file
    more: pa.RecordBatch | None = None  # additional columns for all lines, null for malformed ones


class _Criteo:
    """Criteo text, without labels if its first line has at most 39 values. The attributes are those of `_Table`."""

    def __init__(self, source: AnyInput, encoding: Encoding) -> None:
        self._text, self._encoding = CriteoText(inputs=[source]), encoding
        self.computes = False
        self.total = self._text.total
        first = source.head(HEAD_BYTES).split(b"\n", 1)[0]
        self.labelled = first.count(b"\t") >= len(criteo.COLUMNS) - 1

    def parts(self) -> Iterator[EncodedPart]:
        """Iterate over the rows, some MiB of text at a time; a part's `places` omits malformed lines."""
        for block in self._text.blocks():
            text, unlabelled = _with_labels(block.content) if self.labelled else (_labelled(block.content), None)
            rows = criteo.parse(text, file=block.file)
            batch, lines = self._encoding.encode_criteo(rows), len(rows) + len(rows.rejected)
            places = np.delete(np.arange(lines), rows.rejected.numbers - 1)
            without = np.isin(places, unlabelled) if unlabelled is not None else np.ones(len(places), np.bool_)
            label = np.where(without, np.nan, batch.label).astype(np.float32)
            yield EncodedPart(replace(batch, label=label), places if len(rows.rejected) else None, lines, block.size)


def _labelled(block: bytes) -> bytes:
    """Prepend a label of 0 to each line."""
    ended = block if block.endswith(b"\n") else block + b"\n"
    return b"0\t" + ended[:-1].replace(b"\n", b"\n0\t") + b"\n"


def _with_labels(block: bytes) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Replace missing and invalid labels with 0; return the text and the numbers of the changed lines, from 0."""
    text = np.frombuffer(block, np.uint8)
    starts = np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])
    starts = starts[starts + 1 < len(text)]  # a line of one character is always malformed
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
    """The rows of a table; a part's `places` omits malformed lines and rows with an unreadable number.

    Attributes:
        total: Size of the input in bytes.
        labelled: Whether there is a label column; individual labels may be missing.
        computes: Whether a query computes the columns.
    """

    def __init__(self, file: TableFile, encoding: Encoding, more: Sequence[str], *, computes: bool = False) -> None:
        self._file, self._encoding, self._more, self.computes = file, encoding, more, computes
        self.total = file.input.size
        needed = [*encoding.columns(), *more]
        if missing := [name for name in needed if name not in file.names]:
            raise UserError(
                f"{file.input.name} has no column {missing[0]!r}; it has {listed(file.names)}"
                f"{about_blanks(missing[0], file.names)}"
            )
        if twice := [name for name in needed if file.names.count(name) > 1]:
            raise UserError(f"{file.input.name} has {file.names.count(twice[0])} columns named {twice[0]!r}; keep one")
        labels = [name for name in encoding.label_columns if file.names.count(name) == 1]
        self.labelled = bool(labels)
        self._used = list(dict.fromkeys([*encoding.columns(), *labels]))

    def parts(self) -> Iterator[EncodedPart]:
        """Iterate over the rows."""
        for chunk in chunks(self._file, list(dict.fromkeys([*self._used, *self._more]))):
            n, more = len(chunk.batch), self._further(chunk)
            columns = [chunk.batch.column(chunk.batch.schema.get_field_index(name)) for name in self._used]
            try:
                batch, kept = self._encoding.encode_readable(pa.RecordBatch.from_arrays(columns, names=self._used))
            except WrongRowError as error:
                raise UserError(f"{self._file.input.name}, row {chunk.number(error.row)}, {error.reason}") from None
            except UserError as error:
                raise UserError(f"{self._file.input.name}: {error}") from None
            if not len(chunk.skipped) and len(kept) == n:
                yield EncodedPart(batch, None, n, chunk.size, more)
                continue
            places = np.delete(np.arange(chunk.lines), chunk.skipped - 1)
            yield EncodedPart(batch, places[kept], chunk.lines, chunk.size, more)

    def _further(self, chunk: Chunk) -> pa.RecordBatch | None:
        """Return a chunk's additional columns, null for malformed lines; None without additional columns."""
        if not self._more:
            return None
        columns = [chunk.batch.column(chunk.batch.schema.get_field_index(name)) for name in self._more]
        if len(chunk.skipped):
            number = np.zeros(chunk.lines, np.int64)
            is_row = np.ones(chunk.lines, np.bool_)
            is_row[chunk.skipped - 1] = False
            number[is_row] = np.arange(len(chunk.batch))
            places = pa.array(number, mask=~is_row)
            columns = [column.take(places) for column in columns]
        return pa.RecordBatch.from_arrays(columns, names=list(self._more))


UnlabelledRows = _Criteo | _Table  # the rows of a file, encoded part by part


def rows_in(
    path: Path,
    encoding: Encoding,
    options: Mapping[str, Any],
    more: Sequence[str] = (),
    query: Callable[[], "RawQuery | None"] = lambda: None,
    *,
    raw: bool = False,
) -> UnlabelledRows:
    """Open the rows of a file; raise UserError if it is unreadable.

    Args:
        path: A file, or - for standard input.
        encoding: Turns rows into ids and numbers.
        options: The manifest's entry about how the data set's files were read.
        more: Names of additional columns to read.
        query: Returns the query that computes the columns of a file that lacks some; None if there is no query.
        raw: Whether the query computes the columns of every file.
    """
    if raw and (computing := query()) is not None:
        return _computed(path, encoding, computing, more)
    source = open_input(path)
    found = find_format(source)
    if encoding.is_criteo and found == "text":
        if more:
            raise UserError(
                f"{source.name} is Criteo text, whose columns have no names; there is no column {more[0]!r}"
            )
        return _Criteo(source, encoding)
    how = TextFormat.of_options(options)
    file = open_file(source, found, replace(how, columns=_columns(source, options)) if found == "text" else how)
    if not set(encoding.columns()) <= set(file.names) and (computing := query()) is not None:
        return _computed(path, encoding, computing, more)
    return _Table(file, encoding, more)


def _computed(path: Path, encoding: Encoding, query: "RawQuery", more: Sequence[str]) -> UnlabelledRows:
    """Open a file of raw rows, whose columns a query computes."""
    if not path.is_file():
        name = "standard input" if path == STANDARD_INPUT else path
        raise UserError(f"{name}: raw rows whose columns a query computes are read from a file on this machine")
    from hostdev.data.preprocess.query.raw_files import open_raw  # imports DuckDB

    return _Table(open_raw(path, query, [*encoding.label_columns, *more]), encoding, more, computes=True)


def _columns(source: AnyInput, options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the column names for text without a header, or None if the text has one.

    The labels, or the labels and the weight, are left out if the first line has just one value for each other column.
    """
    names = options.get("columns")
    if names is None:
        return None
    first = DelimitedFile(source, replace(TextFormat.of_options(options), columns=None)).names
    targets = options.get("targets", {})
    labels = [options["label"], *targets.get("more", ())]
    for absent in (labels, [*labels, targets.get("weight")]):
        if len(first) == len(left := tuple(name for name in names if name not in absent)):
            return left
    return tuple(names)
