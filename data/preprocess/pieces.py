"""Parsed rows on disk, between the first and the second pass: each piece with dictionaries of its own.

A piece has the rows of one block, those for training before those for testing. A value is written as its number in the
piece's dictionary of its space, in which the training rows' values come first, in order of first occurrence, with their
uses. So values are compared with those of other pieces once a piece, and not once a row.

A piece is an Arrow file of one record, whose columns are lists: what is looked at is mapped, and nothing is copied.
"""

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data import ragged
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.raw import Layout, Place, RawRows, Rejected
from hostdev.data.preprocess.vocabulary import HashBuckets

from hostdev.core.errors import naming
from hostdev.kernels.cardinality import estimate, registers_of
from hostdev.kernels.columns import narrowed
from hostdev.kernels.strings import hash_texts
from hostdev.kernels.unique import IdMap, id_map, tally

Array = npt.NDArray[Any]

SPLITS = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a piece without reading it.

    rows, positives, bag_values, missing  by split; the last two by column, `missing` of the numeric ones first
    lines     rows of the input, malformed ones too
    rejected  malformed ones
    end       where the next piece's rows begin
    size      in the source's units
    checksum  CRC-32 of the file
    """

    rows: tuple[int, int]
    positives: tuple[int, int]
    missing: tuple[tuple[int, ...], tuple[int, ...]]
    bag_values: tuple[tuple[int, ...], tuple[int, ...]]
    lines: int
    rejected: int
    end: Place
    size: int
    checksum: int

    def as_json(self) -> dict[str, Any]:
        """Return what the journal has."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what `as_json` gave."""
        pairs = {name: tuple(content[name]) for name in ("rows", "positives")}
        lists = {name: tuple(map(tuple, content[name])) for name in ("missing", "bag_values")}
        return cls(**{**content, **pairs, **lists, "end": Place(*content["end"])})


class Piece:
    """A piece's file, mapped."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as source:
            self._record = pa.ipc.open_file(source).get_batch(0)

    def array(self, name: str) -> Array:
        """Return a column of numbers."""
        values: Array = self._record[name].values.to_numpy()
        return values

    def texts(self, name: str) -> pa.LargeStringArray:
        """Return a column of text."""
        return self._record[name].values

    def keys(self, space: int) -> Array | pa.LargeStringArray:
        """Return the values of the space of this number: integers or texts."""
        found = self.texts(f"keys {space}")
        return found if pa.types.is_large_string(found.type) else found.to_numpy()

    def rejected(self) -> list[Rejected]:
        """Return the malformed lines."""
        columns = (self._record[name].values.to_pylist() for name in ("file", "line", "reason", "text"))
        return [Rejected(*line) for line in zip(*columns, strict=True)]


def write_piece(
    path: Path, rows: RawRows, test: npt.NDArray[np.bool_], layout: Layout, hashed: HashBuckets | None
) -> "tuple[dict[str, Any], Survey | None]":
    """Write rows, of which some are for testing, as a piece.

    hashed  what turns keys into ids; None: they are to be counted

    Returns what Facts has of it, and a survey of its values; None where these are hashed.
    """
    part = rows.take(np.concatenate([np.flatnonzero(~test), np.flatnonzero(test)]))
    n = int(len(test) - np.count_nonzero(test)), int(np.count_nonzero(test))
    label = part.label.astype(np.uint8)
    content: dict[str, Any] = {"label": label, "numbers": narrowed(part.numbers.ravel())}
    missing = [[int(np.isnan(some).sum()) for some in (column[: n[0]], column[n[0] :])] for column in part.numbers.T]
    for i, (_, lengths) in enumerate(part.bags):
        content[f"lengths {i}"] = lengths
    values = [_halves(lengths, n[0]) for _, lengths in part.bags]
    if hashed is not None:
        ids, bags = hashed.encode(part)
        dtype = np.int32 if hashed.schema.rows <= 2**31 else np.int64
        columns = [*ids.T, *(ids for ids, _ in bags)]
        content |= {f"codes {i}": column.astype(dtype) for i, column in enumerate(columns)}
        keys = [*part.keys.T, *(keys for keys, _ in part.bags)]
        none = [part.missing[column.space] for column in layout.columns]
        missing += [_missing(*one) for one in zip(keys, none, _ends(layout, n, values), strict=True)]
    else:
        _encode(part, layout, n, values, content, missing)
    lines = [asdict(line) for line in rows.rejected]
    for name, kind in (("file", pa.large_string()), ("line", pa.int64()), ("reason", pa.large_string())):
        content[name] = pa.array([line[name] for line in lines], kind)
    texts = [line["text"].encode(errors="replace").decode() for line in lines]
    content["text"] = pa.array(texts, pa.large_string())
    facts = {
        "rows": n,
        "positives": _halves(label, n[0]),
        "missing": tuple(zip(*missing, strict=True)) if missing else ((), ()),
        "bag_values": tuple(zip(*values, strict=True)) if values else ((), ()),
        "rejected": len(lines),
        "lines": len(rows) + len(lines),
        "checksum": write_lists(path, content),
    }
    return facts, None if hashed is not None else survey(Piece(path), len(layout.spaces))


@dataclass(frozen=True)
class Survey:
    """About how many values of training rows there are.

    registers    uint8 [spaces, R], of kernels/cardinality.py
    texts        of how many the lengths are known, which may be the same ones in several pieces
    their_bytes  of these
    """

    registers: Array
    texts: int
    their_bytes: int

    def with_those_of(self, other: "Survey") -> "Survey":
        """Return the survey of both."""
        registers = np.maximum(self.registers, other.registers)
        return Survey(registers, self.texts + other.texts, self.their_bytes + other.their_bytes)

    def values(self) -> float:
        """Return about how many values there are."""
        return sum(map(estimate, self.registers))

    def text_bytes(self) -> float | None:
        """Return about how many bytes they have; None where they are integers."""
        return self.values() * self.their_bytes / self.texts if self.texts else None


def survey(piece: Piece, spaces: int) -> Survey:
    """Look at how many values a piece's training rows have."""
    registers, texts, their_bytes = [], 0, 0
    for space in range(spaces):
        keys = piece.keys(space)[: len(piece.array(f"uses {space}"))]
        if isinstance(keys, pa.Array):
            offsets, data = arrow.bytes_of(keys)
            texts, their_bytes = texts + len(keys), their_bytes + int(offsets[-1] - offsets[0])
            registers.append(registers_of(hash_texts(offsets, data)))
        else:
            registers.append(registers_of(keys.view(np.uint64)))
    return Survey(np.stack(registers), texts, their_bytes)


def _encode(
    part: RawRows, layout: Layout, n: tuple[int, int], values: list[tuple[int, int]], content: dict[str, Any],
    missing: list[list[int]],
) -> None:  # fmt: skip
    """Write values as numbers in dictionaries: add the columns' codes, and the spaces' keys and uses, to `content`."""
    of_column: dict[str, Array] = {}
    ends = dict(zip((column.name for column in layout.columns), _ends(layout, n, values), strict=True))
    for number, space in enumerate(layout.spaces):
        columns = {
            column.name: part.keys[:, i] for i, column in enumerate(layout.ids) if column.space == space
        } | {column.name: part.bags[i][0] for i, column in enumerate(layout.bags) if column.space == space}  # fmt: skip
        keys = next(iter(columns.values())) if len(columns) == 1 else _in_order(part, layout, space)
        seen = id_map(keys)
        codes = seen.add(keys)
        in_training = sum(ends[name][0] for name in columns)
        known = int(codes[:in_training].max(initial=-1)) + 1
        uses = np.zeros(known, np.int64)
        tally(codes[:in_training], uses)
        if len(columns) == 1:
            of_column |= dict.fromkeys(columns, codes)
        else:
            numbers = IdMap(np.int64, expected=len(seen.ids))
            numbers.add(seen.ids)
            of_column |= {name: numbers.find(np.ascontiguousarray(column)) for name, column in columns.items()}
        found = seen.ids.astype(np.int64)
        content[f"keys {number}"] = found if part.texts is None else part.texts[space].take(pa.array(found))
        content[f"uses {number}"] = uses.astype(np.uint32)
        none = np.flatnonzero(found == part.missing[space])
        code = int(none[0]) if len(none) else -1
        missing_of = {name: _missing(of_column[name], code, ends[name]) for name in columns}
        of_column |= {name: _narrow(of_column[name], len(found)) for name in columns}
        content |= {f"missing of {name}": counts for name, counts in missing_of.items()}
    for i, column in enumerate(layout.columns):
        content[f"codes {i}"] = of_column[column.name]
        missing.append(content.pop(f"missing of {column.name}"))


def _in_order(rows: RawRows, layout: Layout, space: str) -> npt.NDArray[np.int64]:
    """Return the keys that rows have in a space, row by row, in the order of the columns."""
    ones = [i for i, column in enumerate(layout.ids) if column.space == space]
    bags = [bag for bag, column in zip(rows.bags, layout.bags, strict=True) if column.space == space]
    lengths = np.sum([bag[1] for bag in bags], axis=0, dtype=np.int64) + np.full(len(rows), len(ones))
    place = ragged.offsets_of(lengths)[:-1]  # where each row's next key goes
    keys = np.empty(int(lengths.sum()), np.int64)
    for i in ones:
        keys[place] = rows.keys[:, i]
        place = place + 1
    for values, count in bags:
        keys[ragged.places_of(place, count)] = values
        place = place + count
    return keys


def _ends(layout: Layout, n: tuple[int, int], values: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return how many values each column has in the training rows, and in those for testing."""
    return [n] * len(layout.ids) + values


def _missing(codes: Array, code: int, ends: tuple[int, int]) -> list[int]:
    """Return how many values of the training rows, and of those for testing, are missing."""
    return [int(np.count_nonzero(some == code)) for some in (codes[: ends[0]], codes[ends[0] :])]


def _halves(values: Array, first: int) -> tuple[int, int]:
    """Return the sums of values before and from `first` on."""
    return int(values[:first].sum(dtype=np.int64)), int(values[first:].sum(dtype=np.int64))


def _narrow(codes: Array, size: int) -> Array:
    dtype = np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.uint32
    return codes.astype(dtype)


class _Summed:
    """A file that adds up a checksum of what is written."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file, self.checksum = file, 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.checksum = zlib.crc32(view, self.checksum)
        self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def write_lists(path: Path, content: Mapping[str, Any]) -> int:
    """Write arrays of any lengths into an Arrow file that appears when it is whole; return its CRC-32."""
    arrays = {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in content.items()}
    lists = [pa.LargeListArray.from_arrays([0, len(values)], values) for values in arrays.values()]
    record = pa.RecordBatch.from_arrays(lists, names=list(arrays))
    partial = path.with_suffix(".partial")
    with naming(path), partial.open("wb") as file:
        summed = _Summed(file)
        with pa.ipc.new_file(pa.PythonFile(summed, mode="w"), record.schema) as writer:
            writer.write_batch(record)
    partial.replace(path)
    return summed.checksum


def checksum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
