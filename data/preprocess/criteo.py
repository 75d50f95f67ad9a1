"""Criteo's text: label, 13 integers, 26 categoricals of 8 hex digits, tab separated, one row a line."""

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from hostdev.data.preprocess.raw import Layout, RawRows, Rejected
from hostdev.data.schema import Column
from pyarrow import csv

from hostdev.core.errors import UserError

DENSE = 13
CATEGORICAL = 26
DENSE_NAMES = tuple(f"I{i + 1}" for i in range(DENSE))
CATEGORICAL_NAMES = tuple(f"C{i + 1}" for i in range(CATEGORICAL))
COLUMNS = ["label", *DENSE_NAMES, *CATEGORICAL_NAMES]
LAYOUT = Layout(
    "label",
    DENSE_NAMES,
    tuple(Column(name, "id", name) for name in CATEGORICAL_NAMES),
    hashed=tuple(range(CATEGORICAL)),
)
EMPTY = 1 << 32  # the key of an empty categorical: one above every 32-bit value
BLOCK_BYTES = 1 << 24

_TO_ASCII = bytes(range(128)) + b"?" * 128
_SHORTEST_LINE = len(COLUMNS) + 1  # in bytes: a label, a tab before each other column, a line end
_INTEGER = r"^-?[0-9]{1,18}$"
_HEX = np.full(256, 255, np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX[np.frombuffer(_digits, np.uint8)] = np.arange(16)


class CriteoText:
    """The rows of one or more text files, in the order given."""

    layout = LAYOUT
    unit = "B"
    signed = False

    def __init__(self, files: Sequence[Path], *, block_bytes: int = BLOCK_BYTES) -> None:
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}: no such file")
            if file.stat().st_size == 0:
                raise UserError(f"{file}: the file is empty")
        self.files = list(files)
        self.total = sum(file.stat().st_size for file in files)
        self.most_rows = self.total // _SHORTEST_LINE + len(files)
        self._block_bytes = block_bytes

    def chunks(self, *, hashed: bool = False) -> Iterator[tuple[RawRows, int]]:
        """Iterate over the rows, some MiB of text at a time; the keys are the values."""
        for file, block, first_line in self.blocks():
            rows, _ = parse(block, file=str(file), first_line=first_line)
            yield rows, len(block)

    def blocks(self) -> Iterator[tuple[Path, bytes, int]]:
        """Iterate over the text in whole lines, with the file and the number of the first line, from 1."""
        for file in self.files:
            line = 1
            for block in self._blocks(file):
                yield file, block, line
                line += block.count(b"\n") + (not block.endswith(b"\n"))

    def describe(self) -> list[dict[str, Any]]:
        """Return each file's absolute path and size."""
        return [{"file": str(file.resolve()), "bytes": file.stat().st_size} for file in self.files]

    def text(self, space: str, keys: npt.NDArray[np.int64]) -> pa.Array:
        """Return hexadecimal values as text."""
        return hex_text(keys)

    def options(self) -> dict[str, Any]:
        """Return that it was Criteo's text."""
        return {"preset": "criteo"}

    def _blocks(self, file: Path) -> Iterator[bytes]:
        """Split a file after line ends."""
        with file.open("rb") as stream:
            rest = b""
            while piece := stream.read(self._block_bytes):
                end = piece.rfind(b"\n") + 1
                if end == 0 and len(rest) > self._block_bytes:
                    raise UserError(f"{file}: no line end in {len(rest) + len(piece)} bytes; this is not Criteo text")
                if end == 0:
                    rest += piece
                    continue
                yield rest + piece[:end]
                rest = piece[end:]
            if rest:
                yield rest


def parse(block: bytes, *, file: str, first_line: int) -> tuple[RawRows, int]:
    """Parse whole lines of text.

    block       lines; the last may lack its end
    first_line  its number in the file, from 1

    Returns the well-formed rows with the malformed lines beside them, and the number of lines.
    """
    # A carriage return is part of a line end or, alone, a wrong character; arrow's parser would end a line there.
    block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\0")
    if not block.isascii():  # no valid line has such bytes, and arrow's handler of wrong lines wants UTF-8
        block = block.translate(_TO_ASCII)
    rejected: list[Rejected] = []
    skipped: list[int] = []

    def wrong_columns(row: Any) -> str:
        skipped.append(row.number)
        reason = f"{row.actual_columns} columns, not {row.expected_columns}"
        rejected.append(Rejected(file, first_line + row.number - 1, reason, row.text))
        return "skip"

    table = csv.read_csv(
        BytesIO(block),
        read_options=csv.ReadOptions(column_names=COLUMNS, use_threads=False, block_size=len(block) + 1),
        parse_options=csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False, invalid_row_handler=wrong_columns
        ),
        convert_options=csv.ConvertOptions(
            column_types={name: pa.binary() for name in COLUMNS}, strings_can_be_null=False
        ),
    )
    table = table.combine_chunks()
    lines = len(table) + len(skipped)
    reasons: dict[int, str] = {}  # of the row's first wrong column, by row of the table

    label = np.asarray(pc.equal(table["label"], b"1"))
    _note(reasons, table["label"], ~np.asarray(pc.is_in(table["label"], pa.array([b"0", b"1"]))), "label", "0 or 1")
    numbers = np.zeros((len(table), DENSE))
    for i, name in enumerate(DENSE_NAMES):
        numbers[:, i], wrong = _integers(table[name])
        _note(reasons, table[name], wrong, name, "an integer or empty")
    keys = np.zeros((len(table), CATEGORICAL), np.int64)
    for i, name in enumerate(CATEGORICAL_NAMES):
        keys[:, i], wrong = hex_values(table[name])
        _note(reasons, table[name], wrong, name, "8 hexadecimal digits or empty")

    if reasons:
        rows = np.setdiff1d(np.arange(lines), np.array(skipped, np.int64) - 1)  # the line of each row of the table
        wrong_rows = table.take(pa.array(list(reasons))).to_pydict()
        for i, (row, reason) in enumerate(reasons.items()):
            text = b"\t".join(wrong_rows[name][i] for name in COLUMNS).decode(errors="replace")
            rejected.append(Rejected(file, first_line + int(rows[row]), reason, text))
    rejected.sort(key=lambda line: line.line)
    keep = np.ones(len(table), np.bool_)
    keep[list(reasons)] = False
    return RawRows(label[keep].astype(np.float32), numbers[keep], keys[keep], rejected=rejected), lines


def _note(reasons: dict[int, str], column: pa.ChunkedArray, wrong: npt.NDArray[np.bool_], name: str, due: str) -> None:
    for row in np.flatnonzero(wrong):
        value = column[int(row)].as_py().decode(errors="replace")
        reasons.setdefault(int(row), f"{name} is {value[:40]!r}, not {due}")


def hex_text(keys: npt.NDArray[np.int64]) -> pa.Array:
    """Return 32-bit values as 8 hexadecimal digits, EMPTY as no text."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    nibbles = (keys[:, None] >> np.arange(28, -1, -4)) & 15
    text = pa.Array.from_buffers(pa.binary(8), len(keys), [None, pa.py_buffer(digits[nibbles].tobytes())])
    return pc.if_else(pa.array(keys == EMPTY), "", text.cast(pa.binary()).cast(pa.string()))


def _integers(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return values (NaN where there is none) and which are malformed; each [n]."""
    missing = np.asarray(pc.equal(pc.binary_length(column), 0))
    valid = np.asarray(pc.match_substring_regex(column, _INTEGER))
    digits = pc.if_else(pa.array(valid), column, b"0").cast(pa.string())
    values = np.asarray(digits.cast(pa.int64())).astype(np.float64)
    return np.where(missing, np.nan, values), ~valid & ~missing


def hex_values(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return binary values as 32-bit keys (EMPTY where there is none) and which are malformed; each [n]."""
    lengths = np.asarray(pc.binary_length(column))
    wrong = (lengths != 8) & (lengths != 0)
    text = pc.if_else(pa.array(lengths == 8), column, b"00000000")
    text = text.combine_chunks() if isinstance(text, pa.ChunkedArray) else text
    digits = np.frombuffer(_bytes_of(text), np.uint8).reshape(-1, 8)
    nibbles = _HEX[digits]
    wrong |= (nibbles == 255).any(axis=1)
    pairs = (nibbles[:, 0::2] << 4) | (nibbles[:, 1::2] & 15)
    values = np.ascontiguousarray(pairs).view(">u4")[:, 0].astype(np.int64)
    return np.where(lengths == 0, EMPTY, values), wrong


def _bytes_of(array: pa.Array) -> Any:
    """The characters of a binary array without nulls, end to end."""
    if len(array) == 0:
        return b""
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
    return memoryview(array.buffers()[2])[offsets[0] : offsets[-1]]
