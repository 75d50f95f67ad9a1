"""Division of a source into ranges that are parsed alone, with the same blocks as on one machine."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hostdev.core.errors import UserError
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.delimited import DelimitedFile
from hostdev.data.preprocess.files import ArrowTable, GroupsRead, ParquetTable, TableFile
from hostdev.data.preprocess.quoted import Scan, TextRows
from hostdev.data.preprocess.raw import RawBlock, Source, SourcePosition
from hostdev.data.preprocess.sparse_text import SparseText
from hostdev.data.preprocess.synthetic import CHUNK_ROWS, Synthetic
from hostdev.data.preprocess.table import TableSource

SCANNED = 16  # windows of quoted text that a task scans


class InputRange(NamedTuple):
    """Consecutive blocks of one input.

    Attributes:
        input: The input's number.
        kind: "window", "rows", "groups", "batch", "chunk", or "whole" for an input that can be read only in order.
        place: Where the blocks are, by kind.
        size: In the source's unit, for the progress bar; 0 if unknown.
    """

    input: int
    kind: str
    place: Any = None
    size: int = 0


def count_inputs(source: Source) -> int:
    """Return the number of inputs of a source."""
    if isinstance(source, CriteoText):
        return len(source.inputs)
    return len(source.files) if isinstance(source, TableSource) else 1


def plan(source: Source, number: int) -> list[InputRange] | None:
    """Return the ranges of an input, or None if tasks must look at it first (`looks`)."""
    if isinstance(source, Synthetic):
        return [InputRange(0, "chunk", chunk, CHUNK_ROWS) for chunk in range(-(-source.total // CHUNK_ROWS))]
    if isinstance(source, CriteoText):
        size = source.inputs[number].size
        return _windows(number, source.windows(number), source.block_bytes) or [InputRange(number, "whole", None, size)]
    file = _file(source, number)
    whole = [InputRange(number, "whole", None, file.input.size)]
    if isinstance(file, SparseText) or (isinstance(file, DelimitedFile) and not file.is_quoted):
        windows = file.windows
        return _windows(number, windows, -(-file.input.size // (windows or 1))) or whole
    if isinstance(file, ArrowTable):
        batches = file.count_batches()
        if batches is None:
            return whole
        return [InputRange(number, "batch", batch, file.input.size // batches) for batch in range(batches)]
    if isinstance(file, ParquetTable) or (isinstance(file, DelimitedFile) and file.windows is not None):
        return None
    return whole


def _windows(number: int, windows: int | None, size: int) -> list[InputRange]:
    return [InputRange(number, "window", window, size) for window in range(windows or 0)]


def looks(source: Source, number: int) -> list[tuple[int, int, int]]:
    """Return the arguments of the tasks `look` that an input needs: its number, and a range of windows."""
    file = _file(source, number)
    if not isinstance(file, DelimitedFile):
        return [(number, 0, 0)]
    windows = file.windows or 0
    return [(number, start, min(start + SCANNED, windows)) for start in range(0, windows, SCANNED)]


def look(source: Source, number: int, start: int, stop: int) -> list[Any]:
    """Return what is needed to divide an input: scans of windows of quoted text, or the row groups read at a time."""
    file = _file(source, number)
    if isinstance(file, DelimitedFile):
        return file.scan(range(start, stop))
    assert isinstance(file, ParquetTable) and isinstance(source, TableSource)
    return file.reads(source.used)


def divide(source: Source, number: int, looked: Sequence[Any]) -> tuple[list[InputRange], UserError | None]:
    """Return the ranges of an input from the results of its tasks `look`, and the error that follows them, if any."""
    file = _file(source, number)
    if isinstance(file, DelimitedFile):
        rows, error = file.rows([[Scan(*one) for one in by_state] for by_state in looked])
        return [InputRange(number, "rows", list(one), one.end - one.begin) for one in rows], error
    reads = [GroupsRead(*one) for one in looked]
    share = file.input.size // max(1, len(reads))
    return [InputRange(number, "groups", list(one), share) for one in reads], None


def blocks(source: Source, one: InputRange) -> Iterator[RawBlock]:
    """Yield the blocks of a range."""
    if isinstance(source, Synthetic):
        n = min(CHUNK_ROWS, source.total - one.place * CHUNK_ROWS)
        yield RawBlock((one.place, n), "synthetic", SourcePosition(0, one.place + 1), n)
    elif isinstance(source, CriteoText):
        yield from source.whole(one.input) if one.kind == "whole" else source.window(one.input, one.place)
    else:
        assert isinstance(source, TableSource)
        for part in _parts(source, one):
            yield source.block(one.input, part)


def _parts(source: TableSource, one: InputRange) -> Iterator[Any]:
    file = source.files[one.input]
    if one.kind == "whole":
        yield from file.parts(source.used, 0)
    elif isinstance(file, DelimitedFile) and one.kind == "rows":
        yield file.part_at(TextRows(*one.place))
    elif isinstance(file, DelimitedFile | SparseText):
        yield from file.parts_of(one.place)
    elif isinstance(file, ParquetTable):
        yield from file.parts_of(source.used, GroupsRead(*one.place))
    else:
        assert isinstance(file, ArrowTable)
        yield from file.parts_of(source.used, one.place)


def _file(source: Source, number: int) -> TableFile:
    assert isinstance(source, TableSource)
    return source.files[number]
