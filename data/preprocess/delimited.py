"""Delimited text (CSV, TSV) with a header or given column names, read into Arrow with all columns as text."""

import codecs
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from hostdev.core.errors import UserError
from hostdev.data.preprocess.files import Chunk, DividedFile, UnparsedRows, unparsed
from hostdev.data.preprocess.inputs import COMPRESSED, HEAD_BYTES, AnyInput
from hostdev.data.preprocess.naming import short
from hostdev.data.preprocess.raw import InvalidRowError, RejectedLines
from hostdev.data.preprocess.text import (
    LONGEST,
    Recoded,
    Scan,
    TextRows,
    chain,
    recode,
    scan_windows,
    text_windows,
    unclosed,
    whole_lines,
    window_lines,
)
from hostdev.kernels.strings import IN_QUOTES, scan_quotes

BLOCK_BYTES = 1 << 24
MOST_COLUMNS = 1 << 16
_USUAL = {"\t": "tab", ";": "';'", "|": "'|'", ",": ","}  # usual delimiters, as typed after --delimiter
_SHOWN = 120  # maximum characters of a header in a message
_MANY_LINES = 20  # a quoted value with at least so many line ends may have swallowed rows after an unclosed quote
_ROWLIKE = 0.8  # it is an error if at least this share of the value's lines have as many delimiters as a row
_SCANNED = 16  # maximum windows that one call of `look` scans
_STAND_IN = b"\x1f"  # replaces a delimiter of several characters: the unit separator, unusual in text


class LineFile(DividedFile):
    """A text file whose rows are whole lines; an uncompressed one can be read window by window.

    Attributes:
        block_bytes: Size of a window in bytes.
    """

    block_bytes: int

    def get_type(self, name: str) -> pa.DataType:
        """Return the type of every column: text."""
        return pa.string()

    def parts(self, used: Sequence[str], offset: int) -> Iterator[UnparsedRows]:
        """Yield the text from byte `offset` on, some MiB of whole lines at a time."""
        return map(unparsed, whole_lines(self.input, offset, self.block_bytes, self.too_long))

    def places(self, looked: Sequence[Any]) -> tuple[list[tuple[Any, int]], UserError | None]:
        """See `DividedFile`; the places of an uncompressed file are the numbers of its windows."""
        return (text_windows(self.input, self.block_bytes), None) if self.input.plain else super().places(looked)

    def parts_at(self, used: Sequence[str], place: Any) -> Iterator[UnparsedRows]:
        """See `DividedFile`."""
        if place is None:
            return self.parts(used, 0)
        return map(unparsed, window_lines(self.input, place, self.block_bytes, self.too_long))

    def too_long(self) -> UserError:
        """Return the error for a line of more than `LONGEST` blocks."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How a delimited text file is written.

    Attributes:
        columns: The column names, or None to read them from the first row.
        delimiter: The separator of values. If it has several characters, quotes are ordinary characters. None selects
            it by the file's suffix: a tab for .tsv and .tab, a comma for .csv; for other suffixes, a tab if the first
            line has one, else a comma.
        quotes: Whether values in double quotes may contain delimiters and line ends (RFC 4180).
        encoding: The text's encoding, as a Python codec name.
        skipped_lines: Number of lines to skip before the header, or before the first row if there is no header.

    Raises UserError for repeated or no column names, an empty delimiter, or a negative number of skipped lines.
    """

    columns: tuple[str, ...] | None = None
    delimiter: str | None = None
    quotes: bool = True
    encoding: str = "utf-8"
    skipped_lines: int = 0

    def __post_init__(self) -> None:
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise UserError("--columns has the same name twice; give each column a different name")
        for name in ("delimiter", "columns"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise UserError(f"--{name} is empty")
        if self.skipped_lines < 0:
            raise UserError(f"--skip-lines must be at least 0, not {self.skipped_lines}")

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the format of a data set's text files, from the manifest's entry `options`."""
        given = {one.name: options[one.name] for one in fields(cls) if options.get(one.name) is not None}
        if "columns" in given:
            given["columns"] = tuple(given["columns"])
        return cls(**given)


class DelimitedFile(LineFile):
    """A delimited text file."""

    def __init__(self, source: AnyInput, how: TextFormat) -> None:
        columns = how.columns
        self.input = recode(source, encoding=how.encoding, skipped_lines=how.skipped_lines, head=HEAD_BYTES)
        text = self.input
        self._columns: list[str] | None = None
        self.block_bytes = BLOCK_BYTES
        self.lines_before = how.skipped_lines + (columns is None)
        start = text.head(HEAD_BYTES)
        if not start.strip():
            raise UserError(f"{text.name}: the file is empty")
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{text.name}: the file is UTF-16; give --encoding utf-16")
        self._delimiter = (how.delimiter or _guess(text.path, start)).encode()
        self._quotes = how.quotes and len(self._delimiter) == 1
        self.names = self._header(start)
        if columns is not None:
            if len(columns) != len(self.names):
                hint = f"; give --delimiter {other}" if (other := self.other_delimiter) else ""
                raise UserError(
                    f"{text.name}: the first line has {len(self.names)} values separated by {self.shown}, "
                    f"but --columns names {len(columns)} columns{hint}"
                )
            _refuse_header(text, columns, self.names)
            self._columns, self.names = list(columns), tuple(columns)
        self.most_rows = text.size // max(1, len(self.names)) + 1 if text.plain else 2**62

    @property
    def shown(self) -> str:
        """The delimiter, as messages name it."""
        return {"\t": "tabs", ",": "commas"}.get(self._delimiter.decode(), repr(self._delimiter.decode()))

    @property
    def other_delimiter(self) -> str | None:
        """A usual delimiter in the first line, as --delimiter takes it, if the line has only one value.

        None if the line has several values or no usual delimiter.
        """
        if len(self.names) > 1:
            return None
        return next((shown for text, shown in _USUAL.items() if text in self.names[0]), None)

    def parts(self, used: Sequence[str], offset: int) -> Iterator[UnparsedRows]:
        """See `LineFile`; a row may have several lines if quotes are allowed."""
        if not self._quotes:
            yield from super().parts(used, offset)
            return
        ends = _RowEnds(self.input, self._delimiter, offset)
        for lines in whole_lines(self.input, offset, self.block_bytes, self.too_long, ends.last):
            if lines.is_last:
                ends.check_closed()
            yield unparsed(lines)

    def looks(self) -> list[range]:
        """See `DividedFile`; quoted text needs all windows, as where rows end in one depends on those before it."""
        windows = -(-self.input.size // self.block_bytes) if self._quotes and self.input.plain else 0
        return [range(start, min(start + _SCANNED, windows)) for start in range(0, windows, _SCANNED)]

    def look(self, used: Sequence[str], windows: range) -> list[Any]:
        """See `DividedFile`."""
        return scan_windows(self.input, self._delimiter, self.block_bytes, windows)

    def places(self, looked: Sequence[Any]) -> tuple[list[tuple[Any, int]], UserError | None]:
        """See `DividedFile`; the places of uncompressed quoted text are the `TextRows` of its windows."""
        if not self._quotes or not self.input.plain:
            return super().places(looked)
        scans = [[Scan(*one) for one in by_state] for by_state in looked]
        rows, error = chain(scans, self.input.size, self.block_bytes, self.too_long, self.input.name)
        return [(list(one), one.end - one.begin) for one in rows], error

    def parts_at(self, used: Sequence[str], place: Any) -> Iterator[UnparsedRows]:
        """See `DividedFile`."""
        if not isinstance(place, list | tuple):
            yield from super().parts_at(used, place)
            return
        rows = TextRows(*place)
        with self.input.open() as stream:
            stream.skip(rows.begin)
            text = stream.read(rows.end - rows.begin)
        yield UnparsedRows((text, rows.begin), rows.end, len(text))

    def parse(self, part: UnparsedRows, used: Sequence[str]) -> Chunk:
        """Parse a part into rows and malformed lines."""
        text, offset = part.content
        named = self._columns is None and offset == 0  # whether the part begins with the header
        wrong = _WrongRows()
        self._check_encoding(text, offset)
        names = None if named else list(self._columns or self.names)
        try:
            table = self._read(self._plain(text), names, used, wrong.add)
        except pa.ArrowInvalid as error:
            raise self._unreadable(str(error)) from None
        [batch] = table.combine_chunks().to_batches() or [_no_rows(used)]
        numbers = wrong.numbers()
        delimiter, expected = self._delimiter.decode(), len(self.names)

        def look(i: int) -> tuple[str, str]:
            shown = wrong.text(i).replace(_STAND_IN.decode(), delimiter)
            return f"{wrong.columns[i]} columns, not {expected}", "\\n".join(shown.splitlines())

        numbers = numbers - named  # the parser counts the header as a row
        chunk = Chunk(batch, 0, RejectedLines(self.input.name, numbers + self.lines_before, look), part.taken, numbers)
        chunk = self._without_headers(chunk) if self._columns is None else chunk
        if self._quotes and text.count(b"\n") - chunk.lines - named >= _MANY_LINES:
            self._refuse_swallowed(text, wrong, chunk, int(named))
        return chunk

    def _without_headers(self, chunk: Chunk) -> Chunk:
        """Move rows that repeat the header, as in concatenated files, to the malformed lines."""
        batch = chunk.batch
        again = pc.equal(batch.column(0), batch.schema.names[0])
        for name, column in (
            zip(batch.schema.names[1:], batch.columns[1:], strict=True) if pc.any(again).as_py() else ()
        ):
            again = pc.and_(again, pc.equal(column, name))
        places = np.flatnonzero(again.to_numpy(zero_copy_only=False))
        if not len(places):
            return chunk
        numbers = np.array([chunk.number(place) for place in places.tolist()], np.int64)
        header = self._delimiter.decode().join(self.names)
        aside = RejectedLines(self.input.name, numbers + self.lines_before, lambda i: ("a repeated header", header))
        skipped = np.sort(np.concatenate([chunk.skipped, numbers]))
        return Chunk(batch.filter(pc.invert(again)), 0, chunk.rejected.merge(aside), chunk.size, skipped)

    def _refuse_swallowed(self, text: bytes, wrong: "_WrongRows", chunk: Chunk, header: int) -> None:
        """Raise InvalidRowError if a quoted value has many lines that look like rows, as after an unclosed quote."""
        delimiter = self._delimiter.decode() if len(self._delimiter) == 1 else _STAND_IN.decode()
        columns = [str(i) for i in range(len(self.names))]
        found = [(number - header, wrong.text(i)) for i, number in enumerate(wrong.numbers().tolist())]
        for column in self._read(self._plain(text), columns, columns, lambda row: "skip").columns:
            long = pc.greater_equal(pc.count_substring(column, "\n"), _MANY_LINES).to_numpy()
            found += [(chunk.number(row - header), column[row].as_py()) for row in np.flatnonzero(long).tolist()]
        for row, value in found:
            lines = value.split("\n")[1:-1]
            rows = sum(line.count(delimiter) == len(columns) - 1 for line in lines)
            if len(columns) > 1 and len(lines) >= _MANY_LINES - 1 and rows >= _ROWLIKE * len(lines):
                raise InvalidRowError(
                    self.input.name,
                    row,
                    f"a quoted value spans {len(lines) + 1:,} lines, most of which look like rows; it begins with "
                    f"{short(value.partition(chr(10))[0], 60)!r}; close its quotes, or give --no-quotes if quotes are "
                    "ordinary characters",
                )

    def _header(self, start: bytes) -> tuple[str, ...]:
        """Return the values of the first row."""
        end = start.rfind(b"\n") + 1
        if end == 0 and len(start) == HEAD_BYTES:
            raise self.too_long(HEAD_BYTES)
        lines = start[:end] if len(start) == HEAD_BYTES else start + b"\n"
        self._check_encoding(lines, 0)
        values = lines.partition(b"\n")[0].count(self._delimiter) + 1
        if values > MOST_COLUMNS:  # Arrow's parser needs some KiB for each value
            raise UserError(
                f"{self.input.name}: the first line has {values:,} values separated by {self.shown}, more than "
                f"{MOST_COLUMNS:,}; check --delimiter"
            )
        try:
            return tuple(self._read(self._plain(lines), None, None, lambda row: "skip").schema.names)
        except pa.ArrowInvalid as error:
            raise self._unreadable(str(error)) from None

    def _check_encoding(self, text: bytes, offset: int) -> None:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.input.name}: byte {offset + error.start:,} or a byte near it is not UTF-8; "
                "give the file's encoding, such as --encoding latin-1"
            ) from None

    def _plain(self, text: bytes) -> bytes:
        """Return text for Arrow's parser, with single-byte delimiters and a final line end."""
        if len(self._delimiter) > 1:
            if _STAND_IN in text:
                raise UserError(
                    f"{self.input.name}: the file contains the character 1F (hexadecimal), which must not "
                    "occur if the delimiter has several characters; remove that character"
                )
            text = text.replace(self._delimiter, _STAND_IN)
        return text if text.endswith(b"\n") else text + b"\n"  # Arrow ignores a single row without a line end

    def _read(self, text: bytes, names: list[str] | None, used: Sequence[str] | None, on_invalid: Any) -> pa.Table:
        delimiter = self._delimiter if len(self._delimiter) == 1 else _STAND_IN
        return csv.read_csv(
            BytesIO(text),
            read_options=csv.ReadOptions(column_names=names, use_threads=False, block_size=len(text) + 1),
            parse_options=csv.ParseOptions(
                delimiter=delimiter.decode(),
                quote_char='"' if self._quotes else False,
                newlines_in_values=self._quotes,
                invalid_row_handler=on_invalid,
            ),
            convert_options=csv.ConvertOptions(
                include_columns=list(used or ()),
                column_types=dict.fromkeys(used or (), pa.string()),
                strings_can_be_null=False,
                check_utf8=False,
            ),
        )

    def too_long(self, most: int | None = None) -> UserError:
        """Return the error for a row of more than `most` bytes (default: `LONGEST` blocks)."""
        most = LONGEST * self.block_bytes if most is None else most
        return UserError(
            f"{self.input.name}: a row is longer than {most} bytes; check that {self.shown} separate its values "
            "and that quotes are paired, as in CSV; if not, give --delimiter or --no-quotes"
        )

    def _unreadable(self, error: str) -> UserError:
        if "Empty CSV" in error:
            return UserError(f"{self.input.name}: the file has no rows")
        return UserError(f"{self.input.name}: this is not delimited text ({short(error, 200)})")


def _refuse_header(source: AnyInput | Recoded, columns: Sequence[str], first: Sequence[str]) -> None:
    """Raise UserError if the first row seems a header: at least half of its values equal their names in --columns."""
    same = sum(name.strip().lower() == value.strip().lower() for name, value in zip(columns, first, strict=True))
    if 2 * same >= len(columns):
        raise UserError(
            f"{source.name}: the first row is a header with the names that --columns gives "
            f"({', '.join(first)[:_SHOWN]}); leave --columns out"
        )


def _guess(path: Path, start: bytes) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    if suffixes and suffixes[-1] in (".tsv", ".tab", ".csv"):
        return "," if suffixes[-1] == ".csv" else "\t"
    return "\t" if b"\t" in start.split(b"\n", 1)[0] else ","


def _no_rows(used: Sequence[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array([], pa.string()) for name in used})


class _WrongRows:
    """Collects the rows with too few or too many values; `columns` has the number of values of each row, int32."""

    def __init__(self) -> None:
        self._numbers, self.columns = array("q"), array("i")
        self._text, self._ends = bytearray(), array("q", [0])

    def add(self, row: csv.InvalidRow) -> str:
        """Record a row and make the parser skip it."""
        self._numbers.append(row.number)
        self.columns.append(row.actual_columns)
        self._text += row.text.encode()
        self._ends.append(len(self._text))
        return "skip"

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the rows' numbers, from 1. The header is counted; empty lines and line ends in quotes are not."""
        return np.asarray(memoryview(self._numbers))

    def text(self, i: int) -> str:
        """Return the original text of recorded row `i`."""
        return self._text[self._ends[i] : self._ends[i + 1]].decode()


class _RowEnds:
    """Finds row ends in chunks of quoted text; the first chunk is at `offset` in the input, where a row begins."""

    def __init__(self, source: AnyInput | Recoded, delimiter: bytes, offset: int) -> None:
        self._source, self._delimiter, self._offset = source, delimiter, offset
        self._state = 0, 0, 0  # `state`, `lines` and `opened` of `scan_quotes`

    def last(self, piece: bytes) -> int:
        """Return the length of the next chunk up to and including its last row end; 0 if it has none."""
        state, lines, opened = self._state
        if state < IN_QUOTES and b'"' not in piece:
            plain = piece[-1:] not in (self._delimiter, b"\n", b"\r")
            self._state = int(plain), lines + piece.count(b"\n"), opened
            return piece.rfind(b"\n") + 1
        *after, end = scan_quotes(np.frombuffer(piece, np.uint8), self._delimiter[0], state, lines, opened)
        self._state = after[0], after[1], after[2]
        return int(end)

    def check_closed(self) -> None:
        """Raise UserError if quotes are still open at the end of the text."""
        state, _, opened = self._state
        if state != IN_QUOTES:
            return
        before = 0
        if self._offset:
            with self._source.open() as stream:
                before = sum(piece.count(b"\n") for piece in stream.pieces(self._offset))
        raise unclosed(self._source.name, before + opened)
