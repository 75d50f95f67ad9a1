"""The second pass: learn scaling and vocabulary from the training rows, assign ids, and build shards."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event

import numpy as np
import numpy.typing as npt

from hostdev.core.progress import bar
from hostdev.core.workers import Workers
from hostdev.data import ragged
from hostdev.data.preprocess.dense import Scaling
from hostdev.data.preprocess.pieces import Facts, PieceFile, write_lists
from hostdev.data.preprocess.raw import SourceLayout
from hostdev.data.preprocess.scaling import ByColumn
from hostdev.data.preprocess.vocabulary import Vocabulary
from hostdev.data.rows import Piece
from hostdev.data.schema import Schema
from hostdev.kernels.arrays import Array
from hostdev.kernels.columns import place_column

_SOME = 20  # `apart` and `squeezed` ignore columns with fewer values
_NEARLY_ALL = 0.999  # share of a column's numbers


def get_numbers(piece: PieceFile, columns: int) -> npt.NDArray[np.float64]:
    """Return the numeric columns of a piece, float64 [n, columns]."""
    return piece.array("numbers").reshape(len(piece), columns).astype(np.float64)


def learn(
    paths: Sequence[Path],
    facts: Sequence[Facts],
    layout: SourceLayout,
    scaling: Scaling,
    vocabulary: Vocabulary | None,
    workers: Workers,
) -> None:
    """Update scaling and vocabulary with all training rows, in order.

    One task updates the scaling; one task per id space updates the vocabulary.
    """
    kinds = 1 + (len(layout.spaces) if vocabulary is not None else 0)
    stop = Event()  # set on Ctrl-C or an error in one task; tasks then end after their current piece
    with bar(len(paths) * kinds, "counting", "pieces") as progress:

        def known() -> Iterator[npt.NDArray[np.float64]]:
            for path, fact in zip(paths, facts, strict=True):
                if stop.is_set():
                    return
                yield get_numbers(PieceFile(path), len(layout.dense))[: fact.rows[0]]

        def numbers() -> None:
            if isinstance(scaling, ByColumn):
                scaling.find_limits(known)
            for path, fact in zip(paths, facts, strict=True):
                if stop.is_set():
                    return
                scaling.observe(get_numbers(PieceFile(path), len(layout.dense))[: fact.rows[0]])
                progress.update()

        def values(space: int) -> None:
            assert vocabulary is not None
            for path in paths:
                if stop.is_set():
                    return
                piece = PieceFile(path)
                uses = piece.array(f"uses {space}")
                vocabulary.count(space, piece.keys(space)[: len(uses)], uses)
                progress.update()

        tasks = [workers.submit(numbers)]
        if vocabulary is not None:
            tasks += [workers.submit(lambda space=space: values(space)) for space in range(len(layout.spaces))]  # type: ignore[misc]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            stop.set()
            raise


def number(paths: Sequence[Path], vocabulary: Vocabulary, workers: Workers) -> list[str]:
    """Write the ids of each piece's values to a file next to the piece; return the CRC-32 of each file."""

    def ids(path: Path) -> str:
        piece, schema = PieceFile(path), vocabulary.schema
        found = {
            f"ids {space}": vocabulary.ids(space, piece.keys(space)).astype(schema.id_type)
            for space in range(len(schema.spaces))
        }
        return write_lists(ids_path(path), found)

    tasks: list[Future[str]] = [workers.submit(lambda path=path: ids(path)) for path in paths]  # type: ignore[misc]
    return [task.result() for task in tasks]


def ids_path(path: Path) -> Path:
    """Return the path of the file with the ids of a piece's values."""
    return path.with_suffix(".ids")


@dataclass(frozen=True)
class RowRange:
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


def build_shard(
    ranges: Sequence[RowRange],
    split: int,
    paths: Sequence[Path] | Mapping[int, Path],
    counts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    schema: Schema,
    layout: SourceLayout,
    scaling: Scaling,
    *,
    hashed: bool,
) -> Piece:
    """Build the rows of a shard, with ids and scaled numbers; `counts` has each piece's number of rows by split."""
    n, columns = sum(one.stop - one.start for one in ranges), len(layout.ids)
    several = bool(layout.targets.more)
    label = np.empty((n, len(layout.labels)), np.float32)
    weight = None if layout.targets.weight is None else np.empty(n, np.float32)
    dense = np.empty((n, len(layout.dense)), np.float32)
    ids = np.empty((n, columns), schema.id_type)
    bags: list[list[tuple[Array, Array]]] = [[] for _ in layout.bags]
    bag_weights: dict[str, list[Array]] = {bag.name: [] for bag in layout.bags if bag.weighted}
    spaces = {space: number for number, space in enumerate(layout.spaces)}
    done = 0
    for one in ranges:
        path = paths[one.piece]
        piece, known = PieceFile(path), None if hashed else PieceFile(ids_path(path))
        before = sum(counts[one.piece][:split])
        rows = slice(before + one.start, before + one.stop)
        here = slice(done, done + one.stop - one.start)
        for i, values in enumerate(piece.labels(len(layout.labels))):
            label[here, i] = values[rows]
        if weight is not None:
            weight[here] = piece.array("weight")[rows]
        dense[here] = scaling.transform(get_numbers(piece, len(layout.dense))[rows])
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
    return Piece(label if several else label[:, 0], dense, ids, found, weight, weights)


def out_of_vocabulary(rows: Piece, schema: Schema) -> tuple[list[int], list[int]]:
    """Return the number of out-of-vocabulary ids in each column of the schema, and the number of all ids in each."""
    n, columns = rows.ids.shape
    unknown = np.flatnonzero(rows.ids.ravel() < schema.first_value)  # in one pass over the rows
    bags = [values for values, _ in rows.bags.values()]
    out = [*np.bincount(unknown % columns, minlength=columns).tolist()] if columns else []
    out += [int(np.count_nonzero(values < schema.first_value)) for values in bags]
    return out, [n] * columns + [len(values) for values in bags]


def apart(rows: Piece, schema: Schema) -> list[str]:
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


def squeezed(rows: Piece, names: Sequence[str], mode: str) -> list[str]:
    """Return the numeric columns where outliers push nearly all other scaled numbers close to 0."""
    least = {"max": 0.01, "standard": 0.1}.get(mode, 0.0)  # logarithms limit outliers
    found = []
    for name, numbers in zip(names, np.abs(rows.dense).T, strict=True):
        known = numbers[numbers > 0]  # a missing number is 0
        if len(known) >= _SOME and np.quantile(known, _NEARLY_ALL) < least:
            found.append(name)
    return found
