"""Tables in files: Parquet, Arrow (IPC files and streams, Feather) and delimited text, in chunks of rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from hostdev.data.preprocess.raw import Rejected

from hostdev.core.errors import UserError

CHUNK_ROWS = 1 << 16
_FORMATS = ((b"PAR1", "Parquet"), (b"ARROW1", "an Arrow file"), (b"\xff\xff\xff\xff", "an Arrow stream"))


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file.

    batch     the columns asked for
    first     well-formed rows of the file before these
    rejected  malformed rows, new since the last chunk
    size      bytes of the file that it took, about
    skipped   numbers of all malformed rows so far, from 1
    """

    batch: pa.RecordBatch
    first: int
    rejected: list[Rejected] = field(default_factory=list)
    size: int = 0
    skipped: Sequence[int] = ()

    def number(self, row: int) -> int:
        """Return the number in its file, from 1, of a row of this chunk, from 0."""
        number = self.first + row + 1
        for skipped in self.skipped:
            number += skipped <= number
        return number


class TableFile(Protocol):
    """A file of rows with named columns."""

    path: Path
    names: tuple[str, ...]
    most_rows: int
    """No more rows than this."""

    def type_of(self, name: str) -> pa.DataType:
        """Return a column's type."""

    def chunks(self, used: Sequence[str]) -> Iterator[Chunk]:
        """Iterate over the rows, with the columns that are used."""


class ParquetTable:
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
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

    def chunks(self, used: Sequence[str]) -> Iterator[Chunk]:
        """Iterate over the rows."""
        first, each = 0, self.path.stat().st_size / max(1, self.most_rows)
        try:
            with pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(CHUNK_ROWS, columns=list(used)):
                    yield Chunk(batch, first, size=int(len(batch) * each))
                    first += len(batch)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.path}: the Parquet file is broken ({error})") from None


class ArrowTable:
    """An Arrow IPC file or stream; Feather version 2 is such a file."""

    most_rows = 2**62  # which only reading all of it would tell

    def __init__(self, path: Path, *, stream: bool) -> None:
        self.path, self._stream = path, stream
        try:
            with pa.memory_map(str(path)) as source:
                self._schema = (pa.ipc.open_stream(source) if stream else pa.ipc.open_file(source)).schema
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: the Arrow file is broken ({error})") from None
        self.names = tuple(self._schema.names)

    def type_of(self, name: str) -> pa.DataType:
        """Return a column's type."""
        return self._schema.field(name).type

    def chunks(self, used: Sequence[str]) -> Iterator[Chunk]:
        """Iterate over the rows."""
        fields = [self.names.index(name) for name in used]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        first, before = 0, 0
        try:
            with pa.memory_map(str(self.path)) as source:
                for batch, position in self._batches(source, options):
                    batch.validate(full=True)  # it may have been made by anyone
                    each = (position - before) / max(1, len(batch))
                    for start in range(0, len(batch), CHUNK_ROWS):
                        part = batch.slice(start, CHUNK_ROWS)
                        yield Chunk(part, first, size=int(len(part) * each))
                        first += len(part)
                    before = position
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.path}: the Arrow file is broken ({error})") from None

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


def format_of(path: Path) -> str:
    """Return "Parquet", "an Arrow file", "an Arrow stream" or "text", by what a file begins with.

    Raises UserError where there is none, or nothing in it.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with path.open("rb") as file:
        start = file.read(8)
    if not start:
        raise UserError(f"{path}: the file is empty")
    if start.startswith(b"FEA1"):
        raise UserError(f"{path}: this is Feather version 1; write it again as version 2, or as Parquet")
    return next((name for magic, name in _FORMATS if start.startswith(magic)), "text")
