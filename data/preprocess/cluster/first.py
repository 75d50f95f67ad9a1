"""Division of a source into ranges, and the tasks of the first pass: divide an input, parse a range, write its pieces.

A range is parsed alone, with the same blocks as on one machine. A block is parsed before the number of rows before it
is known, which decides its test rows. If rows are drawn, they are written as they are, and a second task draws them and
writes the piece.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core.errors import HostdevError, UserError
from hostdev.data.preprocess.cluster.job import Files, WorkerJob
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.delimited import DelimitedFile
from hostdev.data.preprocess.files import ArrowTable, GroupsRead, ParquetTable, TableFile
from hostdev.data.preprocess.pieces import PieceFile, Survey, merge, write_lists, write_piece
from hostdev.data.preprocess.pieces import PieceFile as Lists
from hostdev.data.preprocess.raw import InvalidRowError, RawBlock, RawRows, RejectedLines, Source, SourcePosition
from hostdev.data.preprocess.sparse_text import SparseText
from hostdev.data.preprocess.synthetic import CHUNK_ROWS, Synthetic
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.text import Scan, TextRows
from hostdev.kernels.cardinality import Sample, estimate, total
from hostdev.kernels.columns import narrowed

SCANNED = 16  # windows of quoted text that a task scans
Result = dict[str, Any]
# Files: of a block's parsed rows, of its piece, and of the piece's survey.
rows_name = "rows/{}.arrow".format
piece_name = "pieces/{}.arrow".format
survey_name = "pieces/{}.survey".format


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
    """Return the arguments of the tasks "look" that an input needs: its number, and a range of windows."""
    file = _file(source, number)
    if not isinstance(file, DelimitedFile):
        return [(number, 0, 0)]
    windows = file.windows or 0
    return [(number, start, min(start + SCANNED, windows)) for start in range(0, windows, SCANNED)]


def look_at(source: Source, number: int, start: int, stop: int) -> list[Any]:
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


def find_blocks(source: Source, one: InputRange) -> Iterator[RawBlock]:
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


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error of a task as JSON, for the client to raise."""
    if isinstance(error, InvalidRowError):
        return {"kind": "row", "file": error.file, "row": error.row, "reason": error.reason}
    return {"kind": type(error).__name__, "message": str(error)}


def look(work: WorkerJob, number: int, start: int, stop: int) -> Result:
    """Return what divides an input into ranges."""
    work.check_input(number)
    return {"looked": [list(one) for one in look_at(work.source, number, start, stop)], "files": {}}


def parse(work: WorkerJob, number: int, given: list[Any], begin: int | None) -> Result:
    """Parse range `number`; `begin` is the number of rows before it if that is known.

    Returns the facts of each block, and the error that ended the range, if any.
    """
    one = InputRange(*given)
    work.check_input(one.input)
    blocks: list[Result] = []
    files: Files = {}
    error = None
    try:
        for k, block in enumerate(find_blocks(work.source, one)):
            rows = work.source.parse(block, hashed=work.hashed is not None)
            name = f"{number:06d}-{k:06d}"
            found: Result = {
                "name": name,
                "rows": len(rows),
                "rejected": len(rows.rejected),
                "first": list(rows.rejected[0]) if rows.rejected else None,
                "input": block.end.input,
                "size": block.size,
                "piece": None,
            }
            if work.draw.draws and begin is None:
                files[rows_name(name)] = work.write(rows_name(name), lambda path, rows=rows: write_rows(path, rows))  # type: ignore[misc]
            else:
                found["piece"], of_piece = _write_piece(work, name, rows, begin or 0)
                files |= of_piece
                begin = None if begin is None else begin + len(rows)
            blocks.append(found)
    except (HostdevError, InvalidRowError) as raised:
        error = describe_error(raised)
    work.check_input(one.input)
    return {"blocks": blocks, "error": error, "files": files}


def piece(work: WorkerJob, name: str, begin: int, lines: int) -> Result:
    """Write a block's parsed rows as a piece; `begin` rows are before them, and `lines` lines in their input.

    Returns an entry "missing" if the parsed rows are no longer there.
    """
    path = work.path(rows_name(name))
    if not path.is_file():
        return {"missing": True, "files": {}}
    rows = read_rows(path)
    if rows.rejected:
        rows = replace(rows, rejected=rows.rejected.after(lines))
    found, files = _write_piece(work, name, rows, begin)
    return {"piece": found, "files": files}


def _write_piece(work: WorkerJob, name: str, rows: RawRows, begin: int) -> tuple[Result, Files]:
    splits = work.draw.splits(rows.splits, len(rows), begin)
    made: dict[str, Any] = {}

    def write(path: Path) -> str:
        facts, survey = write_piece(path, rows, splits, work.job.splits, work.source.layout, work.hashed)
        made.update(facts=facts, survey=survey)
        return str(facts["checksum"])

    files = {piece_name(name): work.write(piece_name(name), write)}
    if made["survey"] is not None:
        files |= _write_survey(work, survey_name(name), made["survey"])
    return made["facts"], files


def survey(work: WorkerJob, names: list[str], out: str) -> Result:
    """Merge surveys into the file `out`; return the estimates of values, and of bytes of text, by id space."""
    merged = merge([_read_survey(work.path(name)) for name in names])
    texts = None if merged.texts is None else list(map(total, merged.texts))
    found = {"values": list(map(estimate, merged.registers)), "texts": texts}
    return {**found, "files": _write_survey(work, out, merged)}


def _write_survey(work: WorkerJob, name: str, found: Survey) -> Files:
    content: dict[str, npt.NDArray[Any]] = {"registers": found.registers.reshape(-1)}
    content["shape"] = np.array(found.registers.shape, np.int64)
    for i, sample in enumerate(found.texts or ()):
        content |= {f"keys {i}": sample.keys, f"weights {i}": sample.weights}
    return work.write_lists(name, content)


def _read_survey(path: Path) -> Survey:
    lists = Lists(path)
    registers = lists.array("registers").reshape(lists.array("shape"))
    texts = None
    if "keys 0" in lists.names:
        texts = tuple(Sample(lists.array(f"keys {i}"), lists.array(f"weights {i}")) for i in range(len(registers)))
    return Survey(registers, texts)


def write_rows(path: Path, rows: RawRows) -> str:
    """Write rows atomically; return the file's CRC-32."""
    about = {
        "shape": [list(rows.label.shape), list(rows.numbers.shape), list(rows.keys.shape)],
        "bags": len(rows.bags),
        "spaces": None if rows.texts is None else list(rows.texts),
        "missing": dict(rows.missing),
        "forms": {name: sorted(forms) for name, forms in rows.forms.items()},
    }
    content: dict[str, Any] = {"about": pa.array([json.dumps(about)])}
    content["label 0"] = np.ascontiguousarray(rows.label).reshape(-1)  # its name: `PieceFile` counts by it
    content["numbers"] = narrowed(np.ascontiguousarray(rows.numbers).reshape(-1))
    content |= {f"keys {i}": _narrow(np.ascontiguousarray(column)) for i, column in enumerate(rows.keys.T)}
    for i, (keys, lengths) in enumerate(rows.bags):
        content |= {f"bag {i}": _narrow(keys), f"lengths {i}": lengths}
    content |= {f"weights {i}": values for i, values in rows.bag_weights.items()}
    for i, texts in enumerate((rows.texts or {}).values()):
        content[f"texts {i}"] = texts
    content |= {name: value for name, value in (("weight", rows.weight), ("splits", rows.splits)) if value is not None}
    content |= rows.rejected.columns()
    return write_lists(path, content)


def read_rows(path: Path) -> RawRows:
    """Read the rows that `write_rows` wrote."""
    piece = PieceFile(path)
    about = json.loads(piece.values("about")[0].as_py())
    label, numbers, keys = about["shape"]
    columns = np.empty((keys[1], keys[0]), np.int64)
    for i, column in enumerate(columns):
        column[:] = piece.array(f"keys {i}")
    names = piece.names
    return RawRows(
        piece.array("label 0").reshape(label),
        piece.array("numbers").reshape(numbers).astype(np.float64),
        columns.T,
        tuple((piece.array(f"bag {i}").astype(np.int64), piece.array(f"lengths {i}")) for i in range(about["bags"])),
        _rejected(piece),
        piece.array("splits") if "splits" in names else None,
        texts=None
        if about["spaces"] is None
        else {space: piece.values(f"texts {i}") for i, space in enumerate(about["spaces"])},
        missing=about["missing"],
        forms={name: frozenset(forms) for name, forms in about["forms"].items()},
        weight=piece.array("weight") if "weight" in names else None,
        bag_weights={i: piece.array(f"weights {i}") for i in range(about["bags"]) if f"weights {i}" in names},
    )


def _rejected(piece: PieceFile) -> RejectedLines:
    reasons, texts = piece.values("reason"), piece.values("text")
    [file] = piece.values("file").to_pylist() or [""]
    return RejectedLines(file, piece.array("line"), lambda i: (reasons[i].as_py(), texts[i].as_py()))


def _narrow(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return integers in the smallest unsigned type that holds them; as they are if one is negative or large."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    return values if low < 0 or high >> 32 else values.astype(np.min_scalar_type(high))
