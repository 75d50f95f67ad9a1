"""Parsed rows on disk between the first and the second pass, in pieces with their own dictionaries.

A piece holds the rows of one block, split by split, training rows first. It has a dictionary for each id space and
stores each value as an index into that dictionary. A dictionary begins with the values of training rows, in order of
first occurrence; the piece also has their counts. A value is therefore looked up in the vocabulary once per piece, not
once per row.

A piece is an Arrow file with a single row, in which each column holds one list. Readers map the file without copying.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core.checksums import Crc32, HashedFile
from hostdev.core.errors import naming
from hostdev.core.json_files import parse
from hostdev.core.outputs import replacing
from hostdev.data import ragged
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.raw import RawRows, Rejected, RejectedLines, SourceLayout, SourcePosition
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.data.schema import columns_of
from hostdev.kernels.arrays import Array
from hostdev.kernels.cardinality import Sample, draw_sample, estimate, join, make_registers, total
from hostdev.kernels.columns import narrowed
from hostdev.kernels.counter import key64, uniform
from hostdev.kernels.strings import hash_texts
from hostdev.kernels.unique import IdMap, id_map, tally


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Statistics of a piece, kept outside the piece's file.

    Attributes:
        rows: Number of rows by split.
        labels: Sums of the labels' values by split and label.
        missing: Number of missing values by split and column, numeric columns first.
        bag_values: Number of values by split and bag.
        lines: Number of input rows, including malformed ones.
        rejected: Number of malformed input rows.
        end: Position in the source after the piece's rows.
        size: Size of the piece's rows in the source, in the source's `unit`.
        checksum: CRC-32 of the piece's file.
        forms: For each column with ids, the forms in which its values are written (`preprocess.forms`).
    """

    rows: tuple[int, ...]
    labels: tuple[tuple[float, ...], ...]
    missing: tuple[tuple[int, ...], ...]
    bag_values: tuple[tuple[int, ...], ...]
    lines: int
    rejected: int
    end: SourcePosition
    size: int
    checksum: str
    forms: dict[str, list[int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the entry that the journal stores."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Parse the result of `as_json`; raise ValueError if it is malformed."""
        facts = parse(cls, content, "piece")
        by_split = facts.missing, facts.bag_values, facts.labels
        counts = [*facts.rows, *facts.end, facts.lines, facts.rejected, facts.size]
        counts += [count for counts_by_split in by_split[:2] for split in counts_by_split for count in split]
        if min(counts) < 0 or any(abs(total) >= 2.0**63 for split in facts.labels for total in split):
            raise ValueError("a count or a sum of labels is invalid")
        if {len(values) for values in by_split} != {len(facts.rows)}:
            raise ValueError("the fields have different numbers of splits")
        return facts


class PieceFile:
    """A piece's file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(os.fsencode(path)) as source:
            self._record = pa.ipc.open_file(source).get_batch(0)

    @property
    def names(self) -> list[str]:
        """The names of all columns."""
        return list(self._record.schema.names)

    def values(self, name: str) -> pa.Array:
        """Return the column `name` of the piece."""
        return self._record[name].values

    def array(self, name: str) -> Array:
        """Return the column `name` of the piece, which must hold numbers."""
        values: Array = self.values(name).to_numpy()
        return values

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._record["label 0"].values)

    def keys(self, space: int) -> Array | pa.LargeStringArray:
        """Return the values of id space number `space`: integers or texts."""
        return self.keys_of(f"keys {space}")

    def keys_of(self, name: str) -> Array | pa.LargeStringArray:
        """Return the column `name` of the piece: integers or texts."""
        found = self.values(name)
        return found if pa.types.is_large_string(found.type) else found.to_numpy()

    def rejected(self) -> RejectedLines:
        """Return the malformed lines."""
        return RejectedLines.from_columns({name: self._record[name].values for name in Rejected._fields})


class SplitDraw:
    """Draws rows for testing and validation by seed and row number.

    Args:
        fractions: The shares of rows for testing and for validation; None to draw none.
    """

    def __init__(self, seed: int, fractions: tuple[float | None, float | None]) -> None:
        self._key, (self._test, self._validation) = key64(seed, "test split"), fractions

    @property
    def draws(self) -> bool:
        """Whether a fraction is set, so that row numbers decide splits."""
        return self._test is not None or self._validation is not None

    def splits(self, given: npt.NDArray[np.uint8] | None, n: int, begin: int) -> npt.NDArray[np.uint8]:
        """Return the index of the split of each of n rows, uint8 [n]; `begin` is the number of preceding rows.

        `given` has the splits that the source itself assigns; only its training rows are drawn for other splits. The
        validation fraction does not change which rows are test rows.
        """
        splits = np.zeros(n, np.uint8) if given is None else given
        if not self.draws:
            return splits
        drawn = uniform(self._key, np.arange(begin, begin + n, dtype=np.uint64))
        test = self._test or 0.0
        found = (drawn < test) * np.uint8(1)
        if self._validation is not None:
            found[(drawn >= test) & (drawn < test + self._validation)] = 2
        return np.where(splits == 0, found, splits)


def write_piece(
    path: Path,
    rows: RawRows,
    splits: npt.NDArray[np.uint8],
    count: int,
    layout: SourceLayout,
    hashed: HashBuckets | None,
) -> "tuple[dict[str, Any], Survey | None]":
    """Write rows as a piece.

    Args:
        splits: The index of each row's split, uint8 [n].
        count: Number of splits.
        hashed: Turns keys into ids; if it is None, keys are counted for a vocabulary.

    Returns:
        The fields of Facts except `end` and `size`, and a survey of the values (None if they are hashed).
    """
    order = np.argsort(splits, kind="stable")
    part = (rows if hashed is None else replace(rows, keys=rows.keys[:, :0])).take(order)
    n = tuple(np.bincount(splits, minlength=count).tolist())
    labels = [
        column.astype(np.uint8) if name not in layout.targets.numeric else column
        for name, column in zip(layout.labels, columns_of(part.label), strict=True)
    ]
    values = [_sums(lengths, n) for _, lengths in part.bags]
    ends = [n] * len(layout.ids) + values  # for each column with ids, the number of values in each split
    content: dict[str, Any] = {f"label {i}": np.ascontiguousarray(column) for i, column in enumerate(labels)}
    content["numbers"] = narrowed(part.numbers.ravel())
    if part.weight is not None:
        content["weight"] = part.weight
    content |= {f"lengths {i}": lengths for i, (_, lengths) in enumerate(part.bags)}
    content |= {f"weights {i}": values for i, values in part.bag_weights.items()}
    if hashed is not None:
        ids, lacking = hashed.encode(rows.keys, order, [part.missing[column.space] for column in layout.ids])
        content["ids"] = ids.reshape(-1)
        is_missing = list(lacking)
        for i, ((keys, _), column) in enumerate(zip(part.bags, layout.bags, strict=True), len(layout.ids)):
            content[f"codes {i}"] = hashed.ids_of(keys, i).astype(hashed.schema.id_type)
            is_missing.append(keys == part.missing[column.space])
    else:
        codes, is_missing, dictionaries = _encoded(part, layout, ends)
        content |= dictionaries | {f"codes {i}": column for i, column in enumerate(codes)}
    missing = [_sums(column, n) for column in np.isnan(part.numbers).T]
    missing += [_sums(column, mine) for column, mine in zip(is_missing, ends, strict=True)]
    content |= rows.rejected.columns()
    facts = {
        "rows": n,
        "labels": tuple(zip(*(_sums(column, n) for column in labels), strict=True)),
        "missing": tuple(zip(*missing, strict=True)) if missing else ((),) * count,
        "bag_values": tuple(zip(*values, strict=True)) if values else ((),) * count,
        "rejected": len(rows.rejected),
        "lines": len(rows) + len(rows.rejected),
        "checksum": write_lists(path, content),
        "forms": {name: sorted(forms) for name, forms in rows.forms.items()},
    }
    return facts, None if hashed is not None else survey(PieceFile(path), len(layout.spaces))


@dataclass(frozen=True)
class Survey:
    """Estimates of the number and length of the distinct values in training rows (see kernels/cardinality.py).

    `registers` is uint8 [id spaces, R], the estimator's registers.
    `texts` has, for each id space, hashes and lengths of a sample of its values, to estimate the bytes of all values;
    None if the values are integers.
    """

    registers: Array
    texts: tuple[Sample, ...] | None

    def values(self) -> float:
        """Estimate the number of distinct values."""
        return sum(map(estimate, self.registers))

    def text_bytes(self) -> float | None:
        """Estimate the total bytes of the distinct values, or return None if they are integers."""
        return None if self.texts is None else sum(map(total, self.texts))


def merge(surveys: Sequence[Survey]) -> Survey:
    """Merge one or more surveys, all of texts or all of integers."""
    registers = np.maximum.reduce([one.registers for one in surveys])
    texts = [one.texts for one in surveys if one.texts is not None]
    return Survey(registers, tuple(map(join, *texts)) if len(texts) == len(surveys) else None)


def survey(piece: PieceFile, spaces: int) -> Survey:
    """Survey the values in a piece's training rows."""
    keys = [piece.keys(space)[: len(piece.array(f"uses {space}"))] for space in range(spaces)]
    return survey_values([[one] for one in keys], texts=isinstance(keys[0], pa.Array))


def survey_values(by_space: Iterable[Iterable[Any]], *, texts: bool) -> Survey:
    """Survey distinct values, given by id space in chunks; `texts` is false if they are integers."""
    registers, samples = [], []
    for chunks in by_space:
        hashes, lengths = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for keys in chunks:
            if texts:
                offsets, data = arrow.get_buffers(keys)
                lengths.append(np.diff(offsets).astype(np.int64))
            hashes.append(hash_texts(offsets, data) if texts else keys.view(np.uint64))
        registers.append(make_registers(np.concatenate(hashes)))
        if texts:
            samples.append(draw_sample(np.concatenate(hashes), np.concatenate(lengths)))
    return Survey(np.stack(registers), tuple(samples) or None)


def _encoded(
    part: RawRows, layout: SourceLayout, ends: list[tuple[int, ...]]
) -> tuple[list[Array], list[npt.NDArray[np.bool_]], dict[str, Any]]:
    """Encode values as dictionary indices.

    `ends` has, for each column, the number of its values in each split, training first.
    Returns each column's indices and its mask of missing values, and the keys and occurrence counts of the id spaces.
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
            numbered = positions if len(mine) == 1 else numbers.find(np.ascontiguousarray(columns[i]))
            is_missing[i] = columns[i] == part.missing[space]
            codes[i] = numbered.astype(np.min_scalar_type(max(0, len(found) - 1)))
    return codes, is_missing, dictionaries


def _in_order(rows: RawRows, layout: SourceLayout, space: str) -> npt.NDArray[np.int64]:
    """Return an id space's keys, row by row, in column order within a row."""
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


def _sums(values: Array, lengths: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the sums over consecutive segments of these lengths: floats for float values, otherwise integers."""
    edges, kind = np.cumsum([0, *lengths]).tolist(), np.float64 if values.dtype.kind == "f" else np.int64
    return tuple(values[a:b].sum(dtype=kind).item() for a, b in pairwise(edges))


def write_lists(path: Path, content: Mapping[str, Any]) -> str:
    """Write arrays, which may differ in length, to an Arrow file atomically; return the file's CRC-32."""
    arrays = {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in content.items()}
    lists = [pa.LargeListArray.from_arrays([0, len(values)], values) for values in arrays.values()]
    record = pa.RecordBatch.from_arrays(lists, names=list(arrays))
    return write_arrow(path, record.schema, [record], Crc32)


def write_arrow(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], digest: Callable[[], Any]) -> str:
    """Write an Arrow file atomically; return its checksum."""
    with naming(path), replacing(path) as partial, closing(HashedFile(partial, digest)) as file:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return file.finish(to_disk=False)
