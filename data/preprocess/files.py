"""Readers of table files, which yield the rows in chunks: Parquet, Arrow (IPC files and streams, Feather) and text."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core.errors import UserError
from hostdev.core.printable import printable
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import places
from hostdev.data.preprocess.columns import WrongValueError, check_text
from hostdev.data.preprocess.inputs import COMPRESSED, AnyInput, InputFile, unreadable
from hostdev.data.preprocess.raw import (
    BEGINNING,
    InputRange,
    InvalidRowError,
    RawBlock,
    RejectedLines,
    Source,
    SourcePosition,
)
from hostdev.data.preprocess.row_groups import RowGroups, RowGroupSize, open_parquet
from hostdev.data.preprocess.text import Recoded, TextLines

CHUNK_ROWS = 1 << 16
AS_WRITTEN: Mapping[str, str] = MappingProxyType({})  # `TableFile.respelled` of readers that change no text
CHUNK_VALUES = 1 << 21  # maximum list elements in a chunk
CHUNK_BYTES = 1 << 25  # maximum bytes of text in a chunk
_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc", ".csv", ".tsv", ".tab", ".txt", ".zip", *COMPRESSED)
_PART = re.compile(r"part-[0-9]+[^.]*")  # names of text files that Hadoop and Spark write
_FEATHER_1 = b"FEA1"
_FORMATS = ((b"PAR1", "Parquet"), (b"ARROW1", "an Arrow file"), (b"\xff\xff\xff\xff", "an Arrow stream"))
_PANDAS = "write it as Parquet, such as pandas.{}(...).to_parquet(...)"
_OTHERS = (
    (b"\x89HDF\r\n", "HDF5", _PANDAS.format("read_hdf")),
    (b"ORC", "ORC", _PANDAS.format("read_orc")),
    (b"\xd0\xcf\x11\xe0", "an Excel workbook", "save the sheet as CSV"),
    (b"\x93NUMPY", "a NumPy array", "write it as Parquet, such as pandas.DataFrame(...).to_parquet(...)"),
    (b"SQLite f", "a SQLite database", "write a query's rows as CSV, such as sqlite3 -csv -header FILE 'SELECT ...'"),
    *((bytes([0x80, version, 0x95]), "a pickle", _PANDAS.format("read_pickle")) for version in (4, 5)),
    *((bytes([0x80, version]), "a pickle", _PANDAS.format("read_pickle")) for version in (2, 3)),
    (b"RDX2\n", "R's .rda", "write a data frame as CSV, with write.csv"),
)
_PRINTED = frozenset(range(ord(" "), 256)) | set(b"\t\r\n")


class UnparsedRows(NamedTuple):
    """Unparsed rows of a file."""

    content: Any
    offset: int  # where the rows end in the file: a row number or a byte offset, by format
    taken: int  # approximate size of the rows in the file, in bytes


def unparsed(lines: TextLines) -> UnparsedRows:
    """Return lines as unparsed rows, whose content is the text and its offset in the input."""
    return UnparsedRows((lines.text, lines.offset - len(lines.text)), lines.offset, lines.taken)


@dataclass(frozen=True)
class Chunk:
    """Parsed rows of a file.

    Attributes:
        batch: The requested columns.
        first: Number of rows before the chunk in the file, including malformed ones.
        size: Approximate size of the rows in the file, in bytes.
        skipped: Positions of the malformed rows (`rejected`) in the chunk, from 1, int64.
    """

    batch: pa.RecordBatch
    first: int = 0
    rejected: RejectedLines = field(default_factory=RejectedLines)
    size: int = 0
    skipped: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def lines(self) -> int:
        """The number of rows, including malformed ones."""
        return len(self.batch) + len(self.skipped)

    def number(self, row: int) -> int:
        """Return the number in the file, from 1, of the chunk's row at index `row`, from 0."""
        number = row + 1
        for skipped in self.skipped.tolist():
            number += skipped <= number
        return self.first + number


class TableFile(Protocol):
    """A file of rows with named columns."""

    input: AnyInput | Recoded
    """The input that the rows are read from."""
    names: tuple[str, ...]
    most_rows: int = 2**62
    """An upper bound on the number of rows; 2^62 if nothing is known without reading the whole file."""
    lines_before: int = 0
    """The number of lines before the first row."""
    respelled: Mapping[str, str] = AS_WRITTEN
    """For columns whose texts the reader has changed, why they must not become ids."""

    def get_type(self, name: str) -> pa.DataType:
        """Return a column's type."""

    def parts(self, used: Sequence[str], offset: int) -> Iterator[UnparsedRows]:
        """Yield the `used` columns of the rows from `offset` on; `offset` is 0 or the end of a part."""

    def parse(self, part: UnparsedRows, used: Sequence[str]) -> Chunk:
        """Parse a part's rows; thread-safe. By default, the part's content is a record batch already."""
        return Chunk(part.content, size=part.taken)


class DividedFile(TableFile):
    """A file that may be divided into places that can be read alone, by several processes."""

    def looks(self) -> list[range]:
        """Return the windows of the file that `look` must see before `places` can divide it; none for most files."""
        return []

    def look(self, used: Sequence[str], windows: range) -> list[Any]:  # Any: JSON
        """Return the data about some windows that `places` needs."""
        raise NotImplementedError

    def places(self, looked: Sequence[Any]) -> tuple[list[tuple[Any, int]], UserError | None]:
        """Divide the file into places, which are JSON values; None is the whole file.

        Returns the places, each with its size in bytes, and the error that follows them, if any. `looked` has the
        results of `look` for all windows of `looks`.
        """
        return [(None, self.input.size)], None

    def parts_at(self, used: Sequence[str], place: Any) -> Iterator[UnparsedRows]:
        """Yield the rows of a place, as `parts` does."""
        return self.parts(used, 0)


class FileSource(Source):
    """The rows of several files, in the order of the files.

    Attributes:
        files: The files; `inputs` has the input of each file.
        used: Names of the columns that are read.
    """

    unit = "B"
    used: Sequence[str] = ()

    def __init__(self, files: Sequence[TableFile]) -> None:
        self.files, self.inputs = files, [file.input for file in files]
        self.total = sum(file.input.size for file in files)
        self.most_rows = sum(file.most_rows for file in files)

    def blocks(self, start: SourcePosition = BEGINNING) -> Iterator[RawBlock]:
        """See `Source`."""
        for number, file in enumerate(self.files[start.input :], start.input):
            for part in file.parts(self.used, start.offset if number == start.input else 0):
                yield self.block(number, part)

    def block(self, number: int, part: UnparsedRows) -> RawBlock:
        """Return a part of file `number` as a block."""
        name = self.files[number].input.name
        return RawBlock(self.content(number, part), name, SourcePosition(number, part.offset), part.taken)

    def content(self, number: int, part: UnparsedRows) -> Any:
        """Return the content that `parse` needs of a part of file `number`."""
        raise NotImplementedError

    def looks(self, number: int) -> list[range]:
        """See `Source`."""
        return self._divided(number).looks()

    def look(self, number: int, windows: range) -> list[Any]:
        """See `Source`."""
        return self._divided(number).look(self.used, windows)

    def ranges(self, number: int, looked: Sequence[Any]) -> tuple[list[InputRange], UserError | None]:
        """See `Source`."""
        found, error = self._divided(number).places(looked)
        return [InputRange(number, *one) for one in found], error

    def blocks_of(self, one: InputRange) -> Iterator[RawBlock]:
        """See `Source`."""
        return (self.block(one.input, part) for part in self._divided(one.input).parts_at(self.used, one.place))

    def _divided(self, number: int) -> DividedFile:
        file = self.files[number]
        assert isinstance(file, DividedFile)
        return file


def chunks(file: TableFile, used: Sequence[str]) -> Iterator[Chunk]:
    """Yield a file's rows in chunks, parsed in this thread."""
    first = 0
    for part in file.parts(used, 0):
        try:
            chunk = replace(file.parse(part, used), first=first)
        except InvalidRowError as error:
            raise UserError(f"{error.file}, row {first + error.row}, {error.reason}") from None
        yield chunk
        first += chunk.lines


def split_batch(batch: pa.RecordBatch, first: int, each: float) -> Iterator[UnparsedRows]:
    """Split a batch into parts within the chunk limits.

    `first` is the number of rows before the batch in the file, `each` the approximate bytes per row in the file.
    """
    start, kinds = 0, [arrow.classify_type(column.type) for column in batch.columns]
    lists = [i for i, kind in enumerate(kinds) if kind == "list"]
    texts = [i for i, kind in enumerate(kinds) if kind in ("list", "text")]
    while start < len(batch):
        part = batch.slice(start, CHUNK_ROWS)
        part = part.slice(0, _fitting([arrow.list_lengths(part.column(i)) for i in lists], CHUNK_VALUES, len(part)))
        part = part.slice(0, _fitting([arrow.text_lengths(part.column(i)) for i in texts], CHUNK_BYTES, len(part)))
        start += len(part)
        yield UnparsedRows(part, first + start, int(len(part) * each))


def _fitting(sizes: Sequence[npt.NDArray[np.int64]], most: int, n: int) -> int:
    """Return how many of the first n rows, at least one, have a total size of at most `most`.

    `sizes` has an array for each column: the size of its value in each row [n].
    """
    if not sizes:
        return n
    ends = np.cumsum(sum(sizes[1:], sizes[0]))
    return max(1, int(np.searchsorted(ends, most, "right")))


def _rows_at_once(size: RowGroupSize) -> int:
    """Return how many rows of a row group to decode at once: CHUNK_ROWS, or half a chunk's worth of large rows."""
    per_row = max(size.list_values / CHUNK_VALUES, size.text_bytes / CHUNK_BYTES) / max(1, size.rows)
    return CHUNK_ROWS if 2 * CHUNK_ROWS * per_row <= 1 else max(1, int(0.5 / per_row))


def _names(path: Path, schema: pa.Schema) -> tuple[str, ...]:
    """Return the column names; raise UserError if one is not UTF-8."""
    try:
        return tuple(schema.names)
    except UnicodeDecodeError as error:
        raise _no_name(path, error) from None


def _no_name(path: Path, error: UnicodeDecodeError) -> UserError:
    shown = printable(error.object.decode(errors="backslashreplace"), 80)
    return UserError(f"{path}: the column name '{shown}' is not UTF-8; rename the column")


def _is_list_of_dictionary(found: pa.DataType) -> bool:
    """Return whether a type is a list of dictionary values, which Arrow can read from only one row group at a time."""
    lists = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return any(test(found) for test in lists) and pa.types.is_dictionary(found.value_type)


@contextmanager
def _named(name: str, kind: str) -> Iterator[None]:
    """Raise UserError or TransientError, with the file's name, for errors of Arrow's reader."""
    try:
        yield
    except (UnicodeDecodeError, pa.ArrowException, OSError) as error:  # UnicodeDecodeError: of a name that is not UTF-8
        raise unreadable(name, f"the {kind} file is broken", error) from None


class GroupsRead(NamedTuple):
    """Row groups [first, last) that are read together, `rows` rows at a time; `row` rows are before them."""

    first: int
    last: int
    row: int
    rows: int


class _TypedFile(DividedFile):
    """A file that has a schema; `kind` names its format in messages."""

    input: InputFile
    kind: ClassVar[str]
    _schema: pa.Schema

    def get_type(self, name: str) -> pa.DataType:
        """Return a column's type."""
        return self._schema.field(name).type

    def _naming(self) -> AbstractContextManager[None]:
        return _named(self.input.name, self.kind)


class ParquetTable(_TypedFile):
    """A Parquet file."""

    kind = "Parquet"

    def __init__(self, source: InputFile) -> None:
        self.input, path = source, source.path
        with self._naming():
            try:
                with open_parquet(path) as file:
                    self._schema = file.schema_arrow
                    self.most_rows = file.metadata.num_rows
            except UnicodeDecodeError as error:
                raise _no_name(path, error) from None
        self.names = _names(path, self._schema)

    def parts(self, used: Sequence[str], offset: int) -> Iterator[UnparsedRows]:
        """Yield the rows, starting at row number `offset`, from 0."""
        with self._naming(), open_parquet(self.input.path) as file:
            for read in self._reads(used, offset):
                yield from self._read(file, used, read, offset)

    def looks(self) -> list[range]:
        """See `DividedFile`: a single window, for which `look` reads the sizes of all row groups."""
        return [range(0)]

    def look(self, used: Sequence[str], windows: range) -> list[Any]:
        """See `DividedFile`: the row groups that are read together, as `GroupsRead`."""
        with self._naming():
            return list(self._reads(used, 0))

    def places(self, looked: Sequence[Any]) -> tuple[list[tuple[Any, int]], UserError | None]:
        """See `DividedFile`."""
        return [(read, self.input.size // len(looked)) for read in looked], None

    def parts_at(self, used: Sequence[str], place: Any) -> Iterator[UnparsedRows]:
        """See `DividedFile`."""
        with self._naming(), open_parquet(self.input.path) as file:
            yield from self._read(file, used, GroupsRead(*place), 0)

    def _reads(self, used: Sequence[str], offset: int) -> Iterator["GroupsRead"]:
        alone = any(_is_list_of_dictionary(self.get_type(name)) for name in used)
        with RowGroups.open(self.input.path, used) as groups:
            first = int(np.searchsorted(groups.ends, offset, "right"))  # the group that contains row number `offset`
            row = int(groups.ends[first - 1]) if first else 0
            while first < len(groups.ends):  # a few groups at a time, as the reader caches all it reads
                rows = _rows_at_once(groups.size(first))
                last = first + 1
                if not alone:
                    last = min(int(np.searchsorted(groups.ends, row + rows)) + 1, len(groups.ends))
                for number in range(first, last):
                    rows = groups.rows_for_text(number, rows)
                yield GroupsRead(first, last, row, rows)
                first, row = last, int(groups.ends[last - 1])

    def _read(self, file: Any, used: Sequence[str], read: "GroupsRead", offset: int) -> Iterator[UnparsedRows]:
        each = self.input.size / max(1, self.most_rows)
        row, groups = read.row, list(range(read.first, read.last))
        for batch in file.iter_batches(read.rows, row_groups=groups, columns=list(used)):
            rest = batch.slice(max(0, offset - row))
            row += len(batch)
            yield from split_batch(rest, row - len(rest), each)

    def parse(self, part: UnparsedRows, used: Sequence[str]) -> Chunk:
        """Parse a part's rows; raise InvalidRowError for invalid UTF-8, which Arrow's reader does not check."""
        for name, column in zip(part.content.schema.names, part.content.columns, strict=True):
            try:
                check_text(column)
            except WrongValueError as error:
                raise InvalidRowError(self.input.name, error.row + 1, f"column {name!r}: {error}") from None
            except pa.ArrowInvalid as error:
                raise UserError(f"{self.input.name}: the Parquet file is broken ({error})") from None
        return Chunk(part.content, size=part.taken)


class ArrowTable(_TypedFile):
    """An Arrow IPC file or stream; Feather version 2 is such a file."""

    kind = "Arrow"

    def __init__(self, source: InputFile, *, stream: bool) -> None:
        self.input, self._stream, path = source, stream, source.path
        with self._naming(), places.open_arrow(path, mapped=True) as file:
            self._schema = (pa.ipc.open_stream(file) if stream else pa.ipc.open_file(file)).schema
        self.names = _names(path, self._schema)

    def parts(self, used: Sequence[str], offset: int) -> Iterator[UnparsedRows]:
        """Yield the rows, starting at row number `offset`, from 0."""
        return self._parts(used, offset, None)

    def places(self, looked: Sequence[Any]) -> tuple[list[tuple[Any, int]], UserError | None]:
        """See `DividedFile`; the places are the record batches of a file, and a stream is not divided."""
        if self._stream:
            return super().places(looked)
        with self._naming(), places.open_arrow(self.input.path, mapped=True) as source:
            batches = int(pa.ipc.open_file(source).num_record_batches)
        return [(batch, self.input.size // batches) for batch in range(batches)], None

    def parts_at(self, used: Sequence[str], place: Any) -> Iterator[UnparsedRows]:
        """See `DividedFile`; offsets are counted from the first row of the batch."""
        return self._parts(used, 0, place)

    def _parts(self, used: Sequence[str], offset: int, only: int | None) -> Iterator[UnparsedRows]:
        fields = [self.names.index(name) for name in used]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        row, before = 0, 0
        with self._naming(), places.open_arrow(self.input.path, mapped=True) as source:
            for batch, position in self._batches(source, options, only):
                each = (position - before) / max(1, len(batch))
                before = position
                rest = batch.slice(max(0, offset - row))
                row += len(batch)
                if len(rest):
                    rest.validate(full=True)  # the file is untrusted
                    yield from split_batch(rest, row - len(rest), each)

    def _batches(
        self, source: pa.MemoryMappedFile, options: pa.ipc.IpcReadOptions, only: int | None
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield all record batches, or only number `only` of a file, with the approximate file position of each end."""
        if self._stream:
            for batch in pa.ipc.open_stream(source, options=options):
                yield batch, source.tell()
            return
        reader = pa.ipc.open_file(source, options=options)
        for i in range(reader.num_record_batches) if only is None else [only]:
            yield reader.get_batch(i), source.size() * (i + 1) // reader.num_record_batches


def is_table(path: Path, start: bytes) -> bool:
    """Return whether a file in a folder is a table, judging by its name, or by the first bytes of Parquet and Arrow."""
    named = path.name.lower().endswith(_SUFFIXES) or (_PART.fullmatch(path.name) and b"\0" not in start)
    return bool(named) or start.startswith((_FEATHER_1, *(magic for magic, _ in _FORMATS)))


def find_format(source: AnyInput) -> str:
    """Return "Parquet", "an Arrow file", "an Arrow stream" or "text", judging by a file's first bytes.

    Raises UserError for an unsupported format, and for Parquet or Arrow that is compressed, in an archive or piped.
    """
    start = source.head(8)
    if start.startswith(_FEATHER_1):
        raise UserError(f"{source.name}: this is Feather version 1; write it again as version 2, or as Parquet")
    for magic, name, way in _OTHERS:
        if start.startswith(magic):
            raise UserError(f"{source.name}: this is {name}, which is not supported; {way}")
    if _is_tfrecord(source.head(13)):
        raise UserError(
            f"{source.name}: this is TFRecord, which is not supported; write its examples as Parquet, such as "
            "pandas.DataFrame(...).to_parquet(...)"
        )
    found = next((name for magic, name in _FORMATS if start.startswith(magic)), "text")
    if found == "Parquet" and _continues_as_text(source, start):
        return "text"
    if found != "text" and not source.plain:
        raise UserError(f"{source.name}: {found} can be read only as a plain file; decompress or unpack it")
    return found


def _is_tfrecord(start: bytes) -> bool:
    """Return whether a file starts like TFRecord: a length, a checksum (not verified), and tf.train.Example's tag."""
    return len(start) == 13 and 0 < int.from_bytes(start[:8], "little") < 1 << 32 and start[12:] == b"\n"


def _continues_as_text(source: AnyInput, start: bytes) -> bool:
    """Return whether a file with Parquet's first bytes is text: it continues printably and does not end with them."""
    magic, _ = _FORMATS[0]
    if not _PRINTED.issuperset(start[len(magic) :]):
        return False
    if not isinstance(source, InputFile) or not source.plain:
        return True
    with places.open_bytes(source.path) as file:
        file.seek(-len(magic), os.SEEK_END)
        return file.tell() == 0 or file.read() != magic
