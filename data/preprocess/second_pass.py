"""The second pass: make shards of the pieces' rows, with ids and scaled numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hostdev.core.errors import TransientError
from hostdev.core.memory import available_bytes, format_bytes
from hostdev.data import ragged
from hostdev.data.batch import ShardPiece
from hostdev.data.manifest import APART, SPLITS, SQUEEZED, UNKNOWN, shard_schema
from hostdev.data.preprocess.pieces import Facts, PieceFile, Survey, merge, write_arrow
from hostdev.data.preprocess.raw import SourceLayout
from hostdev.data.preprocess.scaling import Scaling
from hostdev.data.preprocess.vocabulary import require_memory
from hostdev.data.schema import Schema
from hostdev.kernels.arrays import Array, Numbers
from hostdev.kernels.columns import place_column

_CHECKED_AT_ONCE = 8  # pieces per memory check, since asking the system for free memory is slow
_SOME = 20  # `find_apart` and `find_squeezed` ignore columns with fewer values
MOST_VALUES = 2**31 - 1  # maximum values of a bag in a record batch: offsets are int32
_NEARLY_ALL = 0.999  # share of a column's nonzero numbers that must be close to 0 for `find_squeezed`
_OVERHEAD = 16 << 20  # bytes per thread, besides rows
_NUMBER_BYTES = 24  # per number of a piece during scaling: three float64 copies


def get_numbers(piece: PieceFile, columns: int) -> Numbers:
    """Return the numeric columns of a piece, float64 [n, columns]."""
    return piece.array("numbers").reshape(len(piece), columns).astype(np.float64)


class RowRange(NamedTuple):
    """Rows [start, stop) of one split in a piece, counted within that split."""

    piece: int
    start: int
    stop: int


def split_shards(facts: Sequence[Facts], split: int, rows_per_shard: int) -> Iterator[list[RowRange]]:
    """Iterate over the shards of a split, each as a list of row ranges, in order."""
    ends = ragged.offsets_of(np.array([fact.rows[split] for fact in facts], np.int64))
    total = int(ends[-1])
    for first in range(0, total, rows_per_shard):
        last = min(total, first + rows_per_shard)
        begin, end = int(np.searchsorted(ends, first, "right")) - 1, int(np.searchsorted(ends, last, "left"))
        ranges = (
            RowRange(piece, max(first, int(start)) - int(start), min(last, int(stop)) - int(start))
            for piece, (start, stop) in zip(range(begin, end), pairwise(ends[begin : end + 1]), strict=True)
        )
        yield [one for one in ranges if one.start < one.stop]


@dataclass(frozen=True)
class ShardOptions:
    """Settings that all shards share; `dense` is the scaling's mode; if `hashed` is true, pieces have ids already."""

    schema: Schema
    layout: SourceLayout
    scaling: Scaling
    hashed: bool
    dense: str


def build_shard(rows_of: Sequence[tuple[Path, slice]], how: ShardOptions) -> ShardPiece:
    """Build the rows of a shard, with ids and scaled numbers, from consecutive rows of pieces' files."""
    schema, layout = how.schema, how.layout
    n, columns = sum(rows.stop - rows.start for _, rows in rows_of), len(layout.ids)
    several = bool(layout.targets.more)
    label = np.empty((n, len(layout.labels)), np.float32)
    weight = None if layout.targets.weight is None else np.empty(n, np.float32)
    dense = np.empty((n, len(layout.dense)), np.float32)
    ids = np.empty((n, columns), schema.id_type)
    bags: list[list[tuple[Array, Array]]] = [[] for _ in layout.bags]
    bag_weights: dict[str, list[Array]] = {bag.name: [] for bag in layout.bags if bag.weighted}
    spaces = {space: number for number, space in enumerate(layout.spaces)}
    done = 0
    for path, rows in rows_of:
        piece, known = PieceFile(path), None if how.hashed else PieceFile(path.with_suffix(".ids"))
        here = slice(done, done + rows.stop - rows.start)
        for i in range(len(layout.labels)):
            label[here, i] = piece.array(f"label {i}")[rows]
        if weight is not None:
            weight[here] = piece.array("weight")[rows]
        dense[here] = how.scaling.transform(get_numbers(piece, len(layout.dense))[rows])
        if known is None:
            ids[here] = piece.array("ids").reshape(len(piece), columns)[rows]
        else:
            for i, column in enumerate(layout.ids):
                codes, values = piece.array(f"codes {i}")[rows], known.array(f"ids {spaces[column.space]}")
                place_column(codes, values, ids[here], i)
        for i, column in enumerate(layout.bags):
            lengths = piece.array(f"lengths {i}")
            begin, end = int(lengths[: rows.start].sum(dtype=np.int64)), int(lengths[: rows.stop].sum(dtype=np.int64))
            codes = piece.array(f"codes {columns + i}")[begin:end]
            values = codes if known is None else known.array(f"ids {spaces[column.space]}")[codes]
            bags[i].append((values.astype(schema.id_type), lengths[rows]))
            if column.weighted:
                bag_weights[column.name].append(piece.array(f"weights {i}")[begin:end])
        done = here.stop
    joined = (tuple(map(np.concatenate, zip(*bag, strict=True))) for bag in bags)
    named = zip(layout.bags, joined, strict=True)
    found = {bag.name: (values, ragged.offsets_of(lengths)) for bag, (values, lengths) in named}
    weights = {name: np.concatenate(parts) for name, parts in bag_weights.items()}
    return ShardPiece(label if several else label[:, 0], dense, ids, found, weight, weights)


def out_of_vocabulary(rows: ShardPiece, schema: Schema) -> tuple[list[int], list[int]]:
    """Return the number of out-of-vocabulary ids in each column of the schema, and the number of all ids in each."""
    n, columns = rows.ids.shape
    unknown = np.flatnonzero(rows.ids.ravel() < schema.first_value)  # in one pass over the rows
    bags = [values for values, _ in rows.bags.values()]
    out = [*np.bincount(unknown % columns, minlength=columns).tolist()] if columns else []
    out += [int(np.count_nonzero(values < schema.first_value)) for values in bags]
    return out, [n] * columns + [len(values) for values in bags]


def find_apart(rows: ShardPiece, schema: Schema) -> list[str]:
    """Return the columns that share another column's ids but have no value in common with that column."""
    ids = dict(
        zip([*schema.ids, *rows.bags], [*rows.ids.T, *(values for values, _ in rows.bags.values())], strict=True)
    )
    known = {name: np.unique(values[values >= schema.first_value]) for name, values in ids.items()}
    return [
        column.name
        for column in schema.columns
        if column.space != column.name
        and min(len(known[column.name]), len(known[column.space])) >= _SOME
        and not len(np.intersect1d(known[column.name], known[column.space], assume_unique=True))
    ]


def find_squeezed(rows: ShardPiece, names: Sequence[str], mode: str) -> list[str]:
    """Return the numeric columns where outliers push nearly all other scaled numbers close to 0."""
    least = {"max": 0.01, "standard": 0.1}.get(mode, 0.0)  # logarithms limit outliers
    found = []
    for name, numbers in zip(names, np.abs(rows.dense).T, strict=True):
        known = numbers[numbers > 0]  # a missing number is 0
        if len(known) >= _SOME and np.quantile(known, _NEARLY_ALL) < least:
            found.append(name)
    return found


def write_shard(path: Path, rows: ShardPiece, schema: Schema) -> str:
    """Write a shard atomically; return its SHA-256."""
    kinds = shard_schema(schema, schema.id_type)
    return write_arrow(path, kinds, _batches(rows, kinds), sha256)


def _batches(rows: ShardPiece, kinds: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Iterate over batches of rows; there is one batch unless a bag has more than MOST_VALUES values."""
    offsets = [begin for _, begin in rows.bags.values()]
    start, n = 0, len(rows)
    while start < n:
        stop = min([n, *(int(np.searchsorted(begin, begin[start] + MOST_VALUES, "right")) - 1 for begin in offsets)])
        label = rows.label[start:stop]
        columns = [pa.array(label) if label.ndim == 1 else _fixed_size_list(label)]
        if rows.weight is not None:
            columns.append(pa.array(rows.weight[start:stop]))
        for values in (rows.dense[start:stop], rows.ids[start:stop]):
            if values.shape[1]:
                columns.append(_fixed_size_list(values))
        for (name, (values, _)), begin in zip(rows.bags.items(), offsets, strict=True):
            part = begin[start : stop + 1]
            for each in (values, rows.bag_weights.get(name)):
                if each is not None:
                    inside = pa.array(each[part[0] : part[-1]])
                    columns.append(pa.ListArray.from_arrays(pa.array(part - part[0], pa.int32()), inside))
        yield pa.record_batch(columns, schema=kinds)
        start = stop


def _fixed_size_list(values: Array) -> pa.Array:
    """Return the rows of values [n, k] as lists."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def shard_name(split: str, number: int) -> str:
    """Return the path of a shard within its data set."""
    return f"{split}/part-{number:05d}.arrow"


def make_shard(path: Path, name: str, rows_of: Sequence[tuple[Path, slice]], how: ShardOptions) -> dict[str, Any]:
    """Write a shard to `path`; return its entry of the journal: name, rows, SHA-256 and statistics."""
    rows = build_shard(rows_of, how)
    out, uses = out_of_vocabulary(rows, how.schema)
    is_first = name == shard_name(SPLITS[0], 0)
    apart = find_apart(rows, how.schema) if is_first and not how.hashed else []
    near = find_squeezed(rows, how.schema.dense, how.dense) if is_first else []
    found = {"file": name, "rows": len(rows), "sha256": write_shard(path, rows, how.schema)}
    return found | {"out": out, "uses": uses, APART: apart, SQUEEZED: near}


def shard_statistics(
    shards: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str], *, hashed: bool
) -> dict[str, Any]:
    """Return the manifest's statistics of ids out of vocabulary, and what `find_apart` and `find_squeezed` found.

    Args:
        shards: The results of `make_shard` by split, in order.
        names: The columns with ids.
        hashed: Whether ids are hashed; then the statistics by column are left out.
    """
    out, uses = (
        {split: [sum(one[kind][i] for one in made) for i in range(len(names))] for split, made in shards.items()}
        for kind in ("out", "uses")
    )
    whole = {split: sum(out[split]) / max(1, sum(uses[split])) for split in shards}
    by_column = {
        split: {name: a / max(1, b) for name, a, b in zip(names, out[split], uses[split], strict=True)}
        for split in shards
    }
    told = {
        about: [name for made in shards.values() for one in made for name in one[about]] for about in (APART, SQUEEZED)
    }
    return {"out_of_vocabulary": whole, **({} if hashed else {UNKNOWN: by_column}), **told}


class MemoryCheck:
    """Checks during the first pass whether the second one will have enough memory.

    Args:
        threads: Number of threads; each writes one shard at a time.
        splits: Number of splits.
        free: Bytes of memory for all threads; None for what is free on this machine.
        survey: Estimates for the earlier data set's values, which will be in memory, too; None if there is none.
    """

    def __init__(
        self,
        layout: SourceLayout,
        rows_per_shard: int,
        threads: int,
        id_type: str,
        splits: int,
        free: int | None = None,
        survey: Survey | None = None,
    ) -> None:
        self._unchecked: list[Facts] = []
        self._surveys = [] if survey is None else [survey]
        self._free = free
        self._layout, self._most, self._threads = layout, rows_per_shard, threads
        self._id_bytes = np.dtype(id_type).itemsize
        self._rows, self._values, self._piece_rows = [0] * splits, [0] * splits, 0

    def add(self, facts: Facts, survey: Survey | None) -> None:
        """Add a piece's facts and survey; `check` the memory after every few pieces."""
        self._unchecked.append(facts)
        self._surveys += [survey] if survey is not None else []
        if len(self._unchecked) == _CHECKED_AT_ONCE:
            self.check()

    def check(self) -> None:
        """Raise TransientError if concurrent shards, or the distinct values of surveys, would not fit into memory."""
        facts, self._unchecked = self._unchecked, []
        for i in range(len(self._rows)):
            self._rows[i] += sum(fact.rows[i] for fact in facts)
            self._values[i] += sum(sum(fact.bag_values[i]) for fact in facts)
        self._piece_rows = max([self._piece_rows, *(sum(fact.rows) for fact in facts)])
        shard, threads, rows = max(map(self._shard, range(len(self._rows))), key=lambda found: found[0] * found[1])
        free = available_bytes() if self._free is None else self._free
        if threads * shard > free:
            held = "a thread would hold" if threads == 1 else f"{threads} threads would each hold"
            fewer = "" if threads == 1 else ", or fewer --threads"
            raise TransientError(
                f"{held} a shard of {rows:,} rows, {format_bytes(shard)}, but {format_bytes(free)} of memory are free; "
                f"give a smaller --rows-per-shard{fewer}"
            )
        if self._surveys:
            self._surveys = [merge(self._surveys)]
            require_memory(self._surveys[0].values(), self._surveys[0].text_bytes())

    def _shard(self, split: int) -> tuple[int, int, int]:
        """Return the estimated bytes of a split's shard, the number of concurrent shards, and the rows per shard.

        A bag's values are held twice: by piece and concatenated. Counting out-of-vocabulary ids takes a byte per id.
        """
        rows = min(self._rows[split], self._most)
        if rows == 0:
            return 0, 0, 0
        ids, numbers, bags = len(self._layout.ids), len(self._layout.dense), len(self._layout.bags)
        each = 4 + 4 * numbers + (self._id_bytes + 1) * ids + 16 * bags
        values = self._values[split] * rows // self._rows[split]
        piece_bytes = _NUMBER_BYTES * numbers * self._piece_rows
        threads = min(self._threads, -(-self._rows[split] // rows))
        each_value = 2 * self._id_bytes + (8 if any(bag.weighted for bag in self._layout.bags) else 0)
        return rows * each + each_value * values + piece_bytes + _OVERHEAD, threads, rows
