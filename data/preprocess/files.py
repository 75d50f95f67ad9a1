"""Tables in files: Parquet, Arrow (IPC files and streams, Feather) and delimited text, in parts of their rows."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hostdev.data.preprocess.columns import WrongValueError, check_text
from hostdev.data.preprocess.inputs import AnyInput, Input
from hostdev.data.preprocess.raw import Rejected, WrongRowError

from hostdev.core.errors import UserError

CHUNK_ROWS = 1 << 16
_FORMATS = ((b"PAR1", "Parquet"), (b"ARROW1", "an Arrow file"), (b"\xff\xff\xff\xff", "an Arrow stream"))
_PRINTED = frozenset(range(ord(" "), 256)) | set(b"\t\r\n")


class Part(NamedTuple):
    """Some rows of a file, to be parsed."""

    content: Any
    offset: int  # of their end in the file, in a unit of its own
    taken: int  # bytes of the file, about


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file.

    batch     the columns asked for
    first     rows of the file before these, malformed ones too
    rejected  malformed rows among these
    size      bytes of the file that it took, about
    skipped   the malformed rows' numbers among these, from 1
    """

    batch: pa.RecordBatch
    first: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    size: int = 0
    skipped: Sequence[int] = ()

    @property
    def lines(self) -> int:
        """Rows of the file, malformed ones too."""
        return len(self.batch) + len(self.skipped)

    def number(self, row: int) -> int:
        """Return the number in its file, from 1, of a row of this chunk, from 0."""
        number = row + 1
        for skipped in self.skipped:
            number += skipped <= number
        return self.first + number


class TableFile(Protocol):
    """A file of rows with named columns."""

    @property
    def input(self) -> AnyInput:
        """The file."""

    names: tuple[str, ...]
    most_rows: int
    """No more rows than this."""

    def type_of(self, name: str) -> pa.DataType:
        """Return a column's type."""

    def parts(self, used: Sequence[str], offset: int) -> Iterator[Part]:
        """Iterate over the rows, with the columns that are used: from the beginning (0), or where a part ended."""

    def parse(self, part: Part, used: Sequence[str]) -> Chunk:
        """Return a part's rows; several threads may call at once."""


def chunks(file: TableFile, used: Sequence[str]) -> Iterator[Chunk]:
    """Iterate over a file's rows, parsed in this thread."""
    first = 0
    for part in file.parts(used, 0):
        try:
            chunk = replace(file.parse(part, used), first=first)
        except WrongRowError as error:
            raise UserError(f"{error.file}, row {first + error.row}, {error.reason}") from None
        yield chunk
        first += chunk.lines


class ParquetTable:
    """A Parquet file."""

    def __init__(self, source: Input) -> None:
        self.input, path = source, source.path
        try:
            with pq.ParquetFile(path) as file:
                self._schema = file.schema_arrow
                self.most_rows = file.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: the Parquet file is broken ({error})") from None
        self.names = tuple(self._schema.names)

    def type_of(self, name: str) -> pa.DataType:
        """Return a column's type."""
        return self._schema.field(name).type

    def parts(self, used: Sequence[str], offset: int) -> Iterator[Part]:
        """Iterate over the rows from that of a number on."""
        path = self.input.path
        each = self.input.size / max(1, self.most_rows)
        try:
            with pq.ParquetFile(path) as file:
                ends = np.cumsum([file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)])
                first = int(np.searchsorted(ends, offset, "right"))  # the group with that row
                row = int(ends[first - 1]) if first else 0
                while first < len(ends):  # some groups at a time: the reader keeps what it has read of its groups
                    last = int(np.searchsorted(ends, row + CHUNK_ROWS)) + 1
                    for batch in file.iter_batches(
                        CHUNK_ROWS, row_groups=list(range(first, min(last, len(ends)))), columns=list(used)
                    ):
                        part = batch.slice(max(0, offset - row))
                        row += len(batch)
                        if len(part):
                            yield Part(part, row, int(len(part) * each))
                    first = last
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: the Parquet file is broken ({error})") from None

    def parse(self, part: Part, used: Sequence[str]) -> Chunk:
        """Return a part's rows; WrongRowError for text that is not UTF-8, which Arrow's reader takes for such."""
        for name, column in zip(part.content.schema.names, part.content.columns, strict=True):
            try:
                check_text(column)
            except WrongValueError as error:
                raise WrongRowError(self.input.name, error.row + 1, f"column {name!r}: {error}") from None
            except pa.ArrowInvalid as error:
                raise UserError(f"{self.input.path}: the Parquet file is broken ({error})") from None
        return Chunk(part.content, size=part.taken)


class ArrowTable:
    """An Arrow IPC file or stream; Feather version 2 is such a file."""

    most_rows = 2**62  # which only reading all of it would tell

    def __init__(self, source: Input, *, stream: bool) -> None:
        self.input, self._stream, path = source, stream, source.path
        try:
            with pa.memory_map(str(path)) as source:
                self._schema = (pa.ipc.open_stream(source) if stream else pa.ipc.open_file(source)).schema
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: the Arrow file is broken ({error})") from None
        self.names = tuple(self._schema.names)

    def type_of(self, name: str) -> pa.DataType:
        """Return a column's type."""
        return self._schema.field(name).type

    def parts(self, used: Sequence[str], offset: int) -> Iterator[Part]:
        """Iterate over the rows from that of a number on."""
        fields = [self.names.index(name) for name in used]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        row, before = 0, 0
        try:
            with pa.memory_map(str(self.input.path)) as source:
                for batch, position in self._batches(source, options):
                    each = (position - before) / max(1, len(batch))
                    before = position
                    batch, row = batch.slice(max(0, offset - row)), row + len(batch)
                    if not len(batch):
                        continue
                    batch.validate(full=True)  # it may have been made by anyone
                    for start in range(0, len(batch), CHUNK_ROWS):
                        part = batch.slice(start, CHUNK_ROWS)
                        yield Part(part, row - len(batch) + start + len(part), int(len(part) * each))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.input.path}: the Arrow file is broken ({error})") from None

    def parse(self, part: Part, used: Sequence[str]) -> Chunk:
        """Return a part's rows."""
        return Chunk(part.content, size=part.taken)

    def _batches(
        self, source: pa.MemoryMappedFile, options: pa.ipc.IpcReadOptions
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Iterate over record batches, each with the bytes of the file up to its end, about."""
        if self._stream:
            for batch in pa.ipc.open_stream(source, options=options):
                yield batch, source.tell()
            return
        reader = pa.ipc.open_file(source, options=options)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i), source.size() * (i + 1) // reader.num_record_batches


def format_of(source: AnyInput) -> str:
    """Return "Parquet", "an Arrow file", "an Arrow stream" or "text", by what a file begins with."""
    start = source.head(8)
    if start.startswith(b"FEA1"):
        raise UserError(f"{source.name}: this is Feather version 1; write it again as version 2, or as Parquet")
    found = next((name for magic, name in _FORMATS if start.startswith(magic)), "text")
    if found == "Parquet" and _goes_on_as_text(source, start):
        return "text"
    if found != "text" and not source.plain:
        raise UserError(f"{source.name}: {found} is read as a file of its own only; decompress it, or unpack it")
    return found


def _goes_on_as_text(source: AnyInput, start: bytes) -> bool:
    """Tell whether what begins as Parquet is text that begins so: no header comes next, and no magic at the end."""
    magic, _ = _FORMATS[0]
    if not _PRINTED.issuperset(start[len(magic) :]):
        return False
    if not isinstance(source, Input) or not source.plain:
        return True
    with source.path.open("rb") as file:
        file.seek(-len(magic), os.SEEK_END)
        return file.tell() == 0 or file.read() != magic
