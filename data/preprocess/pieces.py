"""Parsed rows on disk, between the first and the second pass: each piece with dictionaries of its own.

A piece has the rows of one block, those for training before those for testing. A value is written as its number in the
piece's dictionary of its space, in which the training rows' values come first, in order of first occurrence, with their
uses. So values are compared with those of other pieces once a piece, and not once a row.

A piece is an Arrow file of one record, whose columns are lists: what is looked at is mapped, and nothing is copied.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core.checksums import Crc32
from hostdev.data import ragged
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.raw import Layout, Place, RawRows
from hostdev.data.preprocess.rejected import Rejected, lines_in
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.data.preprocess.writer import write_arrow
from hostdev.kernels.cardinality import Sample, draw_sample, estimate, join, make_registers, total
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
    forms     by column with ids, how its values are written (`kernels.forms`)
    """

    rows: tuple[int, int]
    positives: tuple[int, int]
    missing: tuple[tuple[int, ...], tuple[int, ...]]
    bag_values: tuple[tuple[int, ...], tuple[int, ...]]
    lines: int
    rejected: int
    end: Place
    size: int
    checksum: str
    forms: dict[str, list[int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return what the journal has."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what `as_json` gave; ValueError, TypeError or KeyError where it is not that."""
        pairs = ("rows", "positives", "missing", "bag_values", "end")
        counts = [n for name in ("rows", "positives", "end") for n in content[name]]
        counts += [n for name in ("missing", "bag_values") for each in content[name] for n in each]
        counts += [content[name] for name in ("lines", "rejected", "size")]
        if not all(type(n) is int and 0 <= n < 2**63 for n in counts) or not isinstance(content["checksum"], str):
            raise ValueError("a wrong number")
        if any(len(content[name]) != 2 for name in pairs):
            raise ValueError("a wrong number of splits")
        counted = {name: tuple(content[name]) for name in ("rows", "positives")}
        lists = {name: tuple(map(tuple, content[name])) for name in ("missing", "bag_values")}
        return cls(**{**content, **counted, **lists, "end": Place(*content["end"])})


class Piece:
    """A piece's file, mapped."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(os.fsencode(path)) as source:
            self._record = pa.ipc.open_file(source).get_batch(0)

    def array(self, name: str) -> Array:
        """Return a column of numbers."""
        values: Array = self._record[name].values.to_numpy()
        return values

    def __len__(self) -> int:
        """Return its rows."""
        return len(self._record["label"].values)

    def keys(self, space: int) -> Array | pa.LargeStringArray:
        """Return the values of the space of this number: integers or texts."""
        found = self._record[f"keys {space}"].values
        return found if pa.types.is_large_string(found.type) else found.to_numpy()

    def rejected(self) -> Iterator[Rejected]:
        """Iterate over the malformed lines."""
        return lines_in({name: self._record[name].values for name in Rejected._fields})


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
    values = [_halves(lengths, n[0]) for _, lengths in part.bags]
    ends = [n] * len(layout.ids) + values  # of each column with ids: values of the training rows, and of the others
    content: dict[str, Any] = {"label": label, "numbers": narrowed(part.numbers.ravel())}
    content |= {f"lengths {i}": lengths for i, (_, lengths) in enumerate(part.bags)}
    if hashed is not None:
        ids, bags = hashed.encode(part)
        codes = [column.astype(hashed.schema.id_type) for column in [*ids.T, *(ids for ids, _ in bags)]]
        keys = [*part.keys.T, *(keys for keys, _ in part.bags)]
        is_missing = [of == part.missing[column.space] for of, column in zip(keys, layout.columns, strict=True)]
    else:
        codes, is_missing, dictionaries = _encoded(part, layout, ends)
        content |= dictionaries
    content |= {f"codes {i}": column for i, column in enumerate(codes)}
    missing = [_halves(column, n[0]) for column in np.isnan(part.numbers).T]
    missing += [_halves(column, first) for column, (first, _) in zip(is_missing, ends, strict=True)]
    content |= rows.rejected.columns()
    facts = {
        "rows": n,
        "positives": _halves(label, n[0]),
        "missing": tuple(zip(*missing, strict=True)) if missing else ((), ()),
        "bag_values": tuple(zip(*values, strict=True)) if values else ((), ()),
        "rejected": len(rows.rejected),
        "lines": len(rows) + len(rows.rejected),
        "checksum": write_lists(path, content),
        "forms": {name: sorted(forms) for name, forms in rows.forms.items()},
    }
    return facts, None if hashed is not None else survey(Piece(path), len(layout.spaces))


@dataclass(frozen=True)
class Survey:
    """About how many values of training rows there are, and how long they are; kernels/cardinality.py has the means.

    registers  uint8 [spaces, R]
    texts      of each space's values the hashes and lengths that tell all their bytes; None where they are integers
    """

    registers: Array
    texts: tuple[Sample, ...] | None

    def with_those_of(self, other: "Survey") -> "Survey":
        """Return the survey of both."""
        registers = np.maximum(self.registers, other.registers)
        if self.texts is None or other.texts is None:
            return Survey(registers, None)
        return Survey(registers, tuple(map(join, self.texts, other.texts)))

    def values(self) -> float:
        """Return about how many values there are."""
        return sum(map(estimate, self.registers))

    def text_bytes(self) -> float | None:
        """Return about how many bytes they have; None where they are integers."""
        return None if self.texts is None else sum(map(total, self.texts))


def survey(piece: Piece, spaces: int) -> Survey:
    """Look at how many values a piece's training rows have, and at their bytes."""
    registers, texts = [], []
    for space in range(spaces):
        keys = piece.keys(space)[: len(piece.array(f"uses {space}"))]
        if isinstance(keys, pa.Array):
            offsets, data = arrow.bytes_of(keys)
            hashes = hash_texts(offsets, data)
            texts.append(draw_sample(hashes, np.diff(offsets)))
            registers.append(make_registers(hashes))
        else:
            registers.append(make_registers(keys.view(np.uint64)))
    return Survey(np.stack(registers), tuple(texts) or None)


def _encoded(
    part: RawRows, layout: Layout, ends: list[tuple[int, int]]
) -> tuple[list[Array], list[npt.NDArray[np.bool_]], dict[str, Any]]:
    """Return values as numbers in dictionaries.

    ends  how many values each column has in the training rows, and in the others

    Returns the columns' numbers, which of them stand for a missing value, and the spaces' keys and uses.
    """
    columns = [*part.keys.T, *(keys for keys, _ in part.bags)]
    codes: list[Array] = [np.empty(0)] * len(columns)
    is_missing: list[npt.NDArray[np.bool_]] = [np.empty(0, np.bool_)] * len(columns)
    dictionaries: dict[str, Any] = {}
    for number, space in enumerate(layout.spaces):
        mine = [i for i, column in enumerate(layout.columns) if column.space == space]
        keys = columns[mine[0]] if len(mine) == 1 else _in_order(part, layout, space)
        seen = id_map(keys)
        positions = seen.add(keys)
        in_training = positions[: sum(ends[i][0] for i in mine)]
        uses = np.zeros(int(in_training.max(initial=-1)) + 1, np.int64)
        tally(in_training, uses)
        found = seen.ids.astype(np.int64)
        dictionaries[f"keys {number}"] = found if part.texts is None else part.texts[space].take(pa.array(found))
        dictionaries[f"uses {number}"] = uses.astype(np.uint32)
        if len(mine) > 1:
            numbers = IdMap(np.int64, expected=len(found))
            numbers.add(found)
        for i in mine:
            of_column = positions if len(mine) == 1 else numbers.find(np.ascontiguousarray(columns[i]))
            is_missing[i] = columns[i] == part.missing[space]
            codes[i] = _narrow(of_column, len(found))
    return codes, is_missing, dictionaries


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


def _halves(values: Array, first: int) -> tuple[int, int]:
    """Return the sums of values before and from `first` on."""
    return int(values[:first].sum(dtype=np.int64)), int(values[first:].sum(dtype=np.int64))


def _narrow(codes: Array, size: int) -> Array:
    dtype = np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.uint32
    return codes.astype(dtype)


def write_lists(path: Path, content: Mapping[str, Any]) -> str:
    """Write arrays of any lengths into an Arrow file that appears when it is whole; return its CRC-32."""
    arrays = {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in content.items()}
    lists = [pa.LargeListArray.from_arrays([0, len(values)], values) for values in arrays.values()]
    record = pa.RecordBatch.from_arrays(lists, names=list(arrays))
    return write_arrow(path, record.schema, [record], Crc32)
