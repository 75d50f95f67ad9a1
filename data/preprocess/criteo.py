"""Criteo's text format: each row is a tab-separated line with a label, 13 integers and 26 values of 8 hex digits."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data.preprocess.criteo_lines import EMPTY, HEX_DIGITS, parse_lines
from hostdev.data.preprocess.delimited import LineFile
from hostdev.data.preprocess.files import FileSource, UnparsedRows
from hostdev.data.preprocess.folders import expand
from hostdev.data.preprocess.inputs import AnyInput, open_input
from hostdev.data.preprocess.raw import RawBlock, RawRows, RejectedLines, Source, SourceLayout
from hostdev.data.preprocess.text import LONGEST
from hostdev.data.schema import Column

DENSE = 13
CATEGORICAL = 26
DENSE_NAMES = tuple(f"I{i + 1}" for i in range(DENSE))
CATEGORICAL_NAMES = tuple(f"C{i + 1}" for i in range(CATEGORICAL))
COLUMNS = ["label", *DENSE_NAMES, *CATEGORICAL_NAMES]
LAYOUT = SourceLayout(
    "label",
    DENSE_NAMES,
    tuple(Column(name, "id", name) for name in CATEGORICAL_NAMES),
    hashed=tuple(range(CATEGORICAL)),
)
BLOCK_BYTES = 1 << 25

_TO_ASCII = bytes(range(128)) + b"?" * 128
_SHORTEST_LINE = len(COLUMNS) + 1  # bytes: a label, a tab before each other column, a line end
_INTEGER, _HEX = re.compile(rb"-?[0-9]{1,18}|"), re.compile(rb"[0-9a-fA-F]{8}|")
_MISSING = dict.fromkeys(LAYOUT.spaces, EMPTY)


class _CriteoFile(LineFile):
    """A file of Criteo's text, which `CriteoText` parses."""

    names = tuple(COLUMNS)

    def __init__(self, source: AnyInput, block_bytes: int) -> None:
        self.input, self.block_bytes = source, block_bytes
        self.most_rows = source.size // _SHORTEST_LINE + 1 if source.plain else 2**62

    def too_long(self) -> UserError:
        """See `LineFile`."""
        name, size = self.input.name, LONGEST * self.block_bytes
        return UserError(f"{name}: no line end in {size} bytes; this is not Criteo text")


class CriteoSource(Source):
    """A source of rows with Criteo's columns."""

    layout = LAYOUT
    signed = False

    @property
    def format_keys(self) -> Callable[[npt.NDArray[np.int64]], pa.Array]:
        """The function that formats values as hexadecimal digits."""
        return hex_text


class CriteoText(CriteoSource, FileSource):
    """The rows of Criteo's text files, in the given order.

    Each path is a plain or compressed file, a tar or zip archive that contains train.txt, or a folder of files.

    The constructor and the reading methods raise UserError for unreadable files.
    """

    def __init__(
        self, files: Sequence[Path] = (), *, inputs: Sequence[AnyInput] | None = None, block_bytes: int | None = None
    ) -> None:
        if inputs is None:
            inputs = [open_input(file, "train.txt".__eq__) for file in expand(files)]  # picklable, unlike a lambda
        self.block_bytes = block_bytes or BLOCK_BYTES
        super().__init__([_CriteoFile(source, self.block_bytes) for source in inputs])

    def content(self, number: int, part: UnparsedRows) -> Any:
        """Return the text."""
        return part.content[0]

    def parse(self, block: RawBlock, *, hashed: bool = False) -> RawRows:
        """Parse a block's rows; their keys are the 32-bit categorical values."""
        return parse(block.content, file=block.file)

    def stamp(self) -> list[Any] | None:
        """Return each file's `inputs.InputFile.stamp`, then the block size; None if a file can be read only once."""
        stamps = super().stamp()
        return None if stamps is None else [*stamps, self.block_bytes]

    def options(self) -> dict[str, Any]:
        """Return the options that a manifest records for Criteo's text."""
        return {"preset": "criteo"}


def parse(block: bytes, *, file: str) -> RawRows:
    """Parse complete lines into rows and malformed lines; only the last line may lack a line end."""
    text = np.frombuffer(block, np.uint8)
    most = len(text) // _SHORTEST_LINE + 1
    label, numbers, keys = np.empty(most, np.uint8), np.empty((most, DENSE)), np.empty((CATEGORICAL, most), np.int64)
    odd = np.empty((1024, 3), np.int32)
    n, _, malformed = parse_lines(text, HEX_DIGITS, label, numbers, keys, odd)
    if malformed > len(odd):
        odd = np.empty((malformed, 3), np.int32)
        parse_lines(text, HEX_DIGITS, label, numbers, keys, odd)
    odd = odd[:malformed].copy()  # releases the unused capacity
    rejected = RejectedLines(file, odd[:, 2] + 1, lambda i: _reject(block[odd[i, 0] : odd[i, 1]]))
    return RawRows(label[:n].astype(np.float32), numbers[:n], keys[:, :n].T, rejected=rejected, missing=_MISSING)


def _reject(line: bytes) -> tuple[str, str]:
    """Return the reason why a line is malformed, and the line."""
    # A carriage return before the newline is part of the line end; elsewhere it is an invalid character.
    line = line.removesuffix(b"\r\n" if line.endswith(b"\r\n") else b"\n").replace(b"\r", b"\0").translate(_TO_ASCII)
    return _reason(line), line.decode()


def _reason(line: bytes) -> str:
    if (columns := line.count(b"\t") + 1) != len(COLUMNS):
        return f"{columns} columns, not {len(COLUMNS)}"
    dues = [(re.compile(rb"[01]"), "0 or 1"), *[(_INTEGER, "an integer or empty")] * DENSE]
    dues += [(_HEX, "8 hexadecimal digits or empty")] * CATEGORICAL
    return next(
        f"{name} is {value.decode()[:40]!r}, not {due}"
        for name, value, (rule, due) in zip(COLUMNS, line.split(b"\t"), dues, strict=True)
        if not rule.fullmatch(value)
    )


def hex_text(keys: npt.NDArray[np.int64]) -> pa.Array:
    """Format 32-bit values as 8 hexadecimal digits, EMPTY as an empty string."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    nibbles = (keys[:, None] >> np.arange(28, -1, -4)) & 15
    text = pa.Array.from_buffers(pa.binary(8), len(keys), [None, pa.py_buffer(digits[nibbles].tobytes())])
    return pc.if_else(pa.array(keys == EMPTY), "", text.cast(pa.binary()).cast(pa.string()))


def hex_values(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Parse a binary column [n] of values with 8 hexadecimal digits or none.

    Returns 32-bit keys, int64 [n], with EMPTY for empty texts, and a mask of malformed texts, bool [n].
    """
    lengths = np.asarray(pc.binary_length(column))
    wrong = (lengths != 8) & (lengths != 0)
    text = pc.if_else(pa.array(lengths == 8), column, b"00000000")
    text = text.combine_chunks() if isinstance(text, pa.ChunkedArray) else text
    digits = np.frombuffer(_get_bytes(text), np.uint8).reshape(-1, 8)
    nibbles = HEX_DIGITS[digits]
    wrong |= (nibbles == 255).any(axis=1)
    pairs = (nibbles[:, 0::2] << 4) | (nibbles[:, 1::2] & 15)
    values = np.ascontiguousarray(pairs).view(">u4")[:, 0].astype(np.int64)
    return np.where(lengths == 0, EMPTY, values), wrong


def hex_keys(texts: Sequence[str]) -> npt.NDArray[np.int64] | None:
    """Return the keys of Python strings, as `hex_values` does for a column, or None if one is malformed."""
    lengths = set(map(len, texts))
    if not lengths <= {0, 8}:
        return None
    try:
        digits = bytes.fromhex("".join([text or "00000000" for text in texts] if 0 in lengths else texts))
    except ValueError:
        return None
    if len(digits) != 4 * len(texts):  # `fromhex` skips whitespace
        return None
    values = np.frombuffer(digits, ">u4").astype(np.int64)
    return np.where([not text for text in texts], EMPTY, values) if 0 in lengths else values


def _get_bytes(array: pa.Array) -> Any:
    """Return the concatenated bytes of a binary array without nulls."""
    if len(array) == 0:
        return b""
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
    return memoryview(array.buffers()[2])[offsets[0] : offsets[-1]]
