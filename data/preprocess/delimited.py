"""Delimited text, CSV and TSV, with a header or with names given: its rows in Arrow, all columns as text."""

import codecs
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from hostdev.data.preprocess.files import Chunk
from hostdev.data.preprocess.raw import Rejected
from pyarrow import csv

from hostdev.core.errors import UserError
from hostdev.kernels.strings import scan_quotes

BLOCK_BYTES = 1 << 24
_HEADER_BYTES = 1 << 20  # of a file that are looked at for its first row
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_STAND_IN = b"\x1f"  # for a delimiter of several characters: the unit separator, which text does not have
_IN_QUOTES = 2


class DelimitedFile:
    """A text file of rows.

    columns    their names; None: the first row has them
    delimiter  between values; None: a tab in .tsv and .tab files, a comma in .csv files, else a tab if the first line
               has one, and a comma if not. One of several characters goes without quotes
    quotes     values may be in double quotes, and have delimiters and line ends in them (RFC 4180)
    """

    def __init__(
        self,
        path: Path,
        *,
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        quotes: bool = True,
    ) -> None:
        self.path = path
        self._columns: list[str] | None = None
        with path.open("rb") as file:
            start = _read(path, _opened(path, file), _HEADER_BYTES)
        if not start.strip():
            raise UserError(f"{path}: the file is empty")
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path}: the file is UTF-16; convert it to UTF-8")
        self._delimiter = (delimiter or _guess(path, start)).encode()
        self._quotes = quotes and len(self._delimiter) == 1
        self.names = self._header(start)
        if columns is not None:
            if len(columns) != len(self.names):
                raise UserError(f"{path}: the first line has {len(self.names)} values between {self._shown}, but "
                                f"--columns names {len(columns)} columns")  # fmt: skip
            self._columns, self.names = list(columns), tuple(columns)
        plain = path.suffix.lower() not in _COMPRESSED
        self.most_rows = path.stat().st_size // max(1, len(self.names)) + 1 if plain else 2**62

    @property
    def _shown(self) -> str:
        return {"\t": "tabs", ",": "commas"}.get(self._delimiter.decode(), repr(self._delimiter.decode()))

    def type_of(self, name: str) -> pa.DataType:
        """Return that everything is text."""
        return pa.string()

    def chunks(self, used: Sequence[str]) -> Iterator[Chunk]:
        """Iterate over the rows, some MiB of text at a time, with the malformed ones beside them."""
        rejected: list[Rejected] = []
        rows, numbers, before = 0, [], 0

        def wrong_columns(row: Any) -> str:
            number = row.number - (self._columns is None)  # of the row, from 1; quoted line ends do not count
            numbers.append(number)
            text = row.text.replace(_STAND_IN.decode(), self._delimiter.decode())
            reason = f"{row.actual_columns} columns, not {row.expected_columns}"
            rejected.append(Rejected(str(self.path), row.number, reason, "\\n".join(text.splitlines())))
            return "skip"

        with self.path.open("rb") as file:
            stream = self._stream(_opened(self.path, file))
            try:
                with self._reader(stream, used, wrong_columns) as reader:
                    for batch in reader:
                        position = file.tell()
                        yield Chunk(batch, rows, rejected, position - before, numbers)
                        rejected, rows, before = [], rows + len(batch), position
            except pa.ArrowInvalid as error:
                raise self._unreadable(str(error)) from None
        if stream.open_quotes:
            raise UserError(f"{self.path}, line {stream.open_quotes}: the quotes that begin here are never closed; "
                            "if quotes are ordinary characters, give --no-quotes")  # fmt: skip
        if rejected:
            yield Chunk(
                pa.RecordBatch.from_pydict({name: pa.array([], pa.string()) for name in used}), rows, rejected, 0
            )

    def _header(self, start: bytes) -> tuple[str, ...]:
        """Return the values of the first row."""
        end = start.rfind(b"\n") + 1
        if end == 0 and len(start) == _HEADER_BYTES:
            raise self._unreadable("straddling")
        lines = start[:end] if len(start) == _HEADER_BYTES else start + b"\n"
        try:
            with self._reader(self._stream(BytesIO(lines)), (), lambda row: "skip") as reader:
                return tuple(reader.schema.names)
        except pa.ArrowInvalid as error:
            raise self._unreadable(str(error)) from None

    def _stream(self, source: Any) -> "_Stream":
        return _Stream(self.path, source, self._delimiter, self._quotes)

    def _reader(self, stream: "_Stream", used: Sequence[str], on_invalid: Any) -> csv.CSVStreamingReader:
        delimiter = self._delimiter if len(self._delimiter) == 1 else _STAND_IN
        return csv.open_csv(
            pa.PythonFile(stream, mode="r"),
            read_options=csv.ReadOptions(column_names=self._columns, use_threads=False, block_size=BLOCK_BYTES),
            parse_options=csv.ParseOptions(
                delimiter=delimiter.decode(), quote_char='"' if self._quotes else False,
                newlines_in_values=self._quotes, invalid_row_handler=on_invalid,
            ),
            convert_options=csv.ConvertOptions(
                include_columns=list(used), column_types=dict.fromkeys(used, pa.string()),
                strings_can_be_null=False, check_utf8=False,
            ),
        )  # fmt: skip

    def _unreadable(self, error: str) -> UserError:
        if "straddling" in error:
            return UserError(f"{self.path}: a row is longer than {BLOCK_BYTES} bytes; are there {self._shown} "
                             "between values, and quotes as in CSV? See --delimiter and --no-quotes")  # fmt: skip
        if "Empty CSV" in error:
            return UserError(f"{self.path}: the file has no rows")
        return UserError(f"{self.path}: this is not delimited text ({error})")


def _guess(path: Path, start: bytes) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    if suffixes and suffixes[-1] in (".tsv", ".tab", ".csv"):
        return "," if suffixes[-1] == ".csv" else "\t"
    return "\t" if b"\t" in start.split(b"\n", 1)[0] else ","


def _opened(path: Path, file: BinaryIO) -> Any:
    """Return what reads a file's bytes, decompressed if its name says so."""
    codec = _COMPRESSED.get(path.suffix.lower())
    return file if codec is None else pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)


def _read(path: Path, source: Any, size: int) -> bytes:
    try:
        return bytes(source.read(size))
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: the file cannot be read ({error})") from None


class _Stream:
    """A file's bytes for Arrow's parser, looked through on the way: UTF-8, the delimiter, quotes."""

    closed = False

    def __init__(self, path: Path, source: Any, delimiter: bytes, quotes: bool) -> None:
        self._path, self._source = path, source
        self._delimiter, self._quotes = delimiter, quotes
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._held = b""  # what may be the beginning of a delimiter
        self._state = 0, 0, 0
        self._bytes = 0
        self._last = b"\n"

    @property
    def open_quotes(self) -> int:
        """The line on which quotes begin that have not been closed; 0 for none."""
        return int(self._state[2]) if self._state[0] == _IN_QUOTES else 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end."""
        while True:
            try:
                block = _read(self._path, self._source, size)
                self._decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise UserError(f"{self._path}: byte {self._bytes + error.start:,} or near is not UTF-8; "
                                "convert the file, such as with iconv -f latin1 -t utf-8") from None  # fmt: skip
            self._bytes += len(block)
            ready = self._replaced(block) if len(self._delimiter) > 1 else block
            if ready or not block:
                break
        if self._quotes:
            self._follow_quotes(ready)
        if not ready and self._last != b"\n":
            ready = b"\n"  # the last row's end, without which a row alone is not taken for one
        self._last = ready[-1:] or b"\n"
        return ready

    def _replaced(self, block: bytes) -> bytes:
        """Return what came so far with one byte for each delimiter."""
        if _STAND_IN in block:
            raise UserError(f"{self._path}: the file has the character 1F (hexadecimal), so that a delimiter of "
                            "several characters cannot be read")  # fmt: skip
        text = (self._held + block).replace(self._delimiter, _STAND_IN)
        end = text[-len(self._delimiter) + 1 :].rpartition(_STAND_IN)[2] if block else b""
        starts = (end[i:] for i in range(len(end)) if self._delimiter.startswith(end[i:]))
        self._held = next(starts, b"")
        return text[: len(text) - len(self._held)]

    def _follow_quotes(self, block: bytes) -> None:
        state, lines, opened = self._state
        if b'"' in block or state >= _IN_QUOTES:
            text = np.frombuffer(block, np.uint8)
            self._state = scan_quotes(text, self._delimiter[0], state, lines, opened)
        elif block:
            self._state = int(block[-1:] not in (self._delimiter, b"\n", b"\r")), lines + block.count(b"\n"), opened

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def close(self) -> None:
        """The file is closed by who opened it."""
