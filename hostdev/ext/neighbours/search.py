"""The rows of a table that a search compares, read in blocks, and exact search for nearest rows, in float64.

An `OpenedCheckpoint` has a checkpoint's tables, and the data set's columns, to whose values the rows belong.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.layers import Layers, SavedRows
from hostdev.checkpoint.manifest import Table
from hostdev.checkpoint.remote import newest
from hostdev.core.errors import UserError
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.stored import StoredVocabulary
from hostdev.data.schema import Column, Space
from hostdev.ext.checkpoints.export import read_vocabulary
from hostdev.ext.predict.opening import open_checkpoint, reading
from hostdev.kernels.arrays import LongIds, Values

_BLOCK_BYTES = 4 << 20  # bytes of weights that are read at a time
_FEW = 20_000  # maximum number of rows whose names are searched for similar ones; takes a fraction of a second
Scores = npt.NDArray[np.float64]


class NamedRows:
    """The rows of a table in a checkpoint, either those of an id space or all.

    An id space has no out-of-vocabulary rows, and no rows of dense columns. All rows of a table by key are those of its
    keys.

    Args:
        layers: The checkpoint.
        table: The table's name.
        space: The id space to whose values the rows belong, or None for all rows of the table.
        vocabulary: The data set's vocabulary (`read_vocabulary`), or None if rows have no names.

    Attributes:
        table: The table's name.
        space: The name of the id space, or None.
        dim: Number of values per row.
        is_by_key: Whether ids are keys of a table by key.
        has_names: Whether `names` returns the values of ids.
    """

    def __init__(self, layers: Layers, table: str, space: Space | None, vocabulary: pa.Table | None) -> None:
        about = layers.manifest.table(table)
        self._opened = SavedRows(layers.chain, table)
        self.table, self.dim, self.is_by_key = table, about.dim, about.keys is not None
        self.space, self._space = None if space is None else space.name, space
        self.has_names, self._values = vocabulary is not None, None if vocabulary is None else vocabulary["value"]
        self._options: dict[str, str] = {}
        self._keys: LongIds | None = None
        if about.keys is not None:
            self._options = {"unknown": next(iter(about.keys.unknown), "")}  # unused: all keys of lookups have rows
            keys = layers.merged(table).columns.keys
            self._keys = keys if space is None else keys[space.has(keys)]
            self._segments = [(0, len(self._keys))]
        else:
            self._segments = [(0, about.rows)] if space is None else list(space.segments)
        self._rows_per_block = max(1, _BLOCK_BYTES // (4 * about.dim))

    def __len__(self) -> int:
        return sum(size for _, size in self._segments)

    def has(self, number: int) -> bool:
        """Return whether one of the rows has this id or key."""
        if self._keys is not None:
            return bool((self._keys == number).any())
        return any(first <= number < first + size for first, size in self._segments)

    def blocks(self) -> Iterator[tuple[LongIds, Values]]:
        """Yield all rows in order: ids int64 [n], weights float32 [n, dim]. A block has 4 MiB of weights at most."""
        for first, size in self._segments:
            for begin in range(first, first + size, self._rows_per_block):
                end = min(begin + self._rows_per_block, first + size)
                ids = np.arange(begin, end) if self._keys is None else self._keys[begin:end]
                yield ids, self.lookup(ids)

    def lookup(self, ids: LongIds) -> Values:
        """Return the weights of ids or keys [N] that have a row, float32 [N, dim]."""
        found: Values = self._opened.lookup(ids, **self._options)
        return found

    def pick(self, count: int) -> LongIds:
        """Return the ids of at most `count` rows that are spread evenly, int64 [min(count, len)]."""
        positions = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64))
        if self._keys is not None:
            return self._keys[positions]
        firsts, sizes = np.array(self._segments, np.int64).T
        ends = np.cumsum(sizes)
        segment = np.searchsorted(ends, positions, "right")
        found: LongIds = firsts[segment] + positions - (ends - sizes)[segment]
        return found

    def names(self, ids: LongIds) -> pa.Array:
        """Return the values of ids [N] as text, an array of strings [N]; raise UserError if rows have no names."""
        if self._values is None:
            raise UserError(f"the rows of table {self.table!r} have no names: the checkpoint has no vocabulary")
        if self._keys is None and len(ids) and ids[-1] - ids[0] + 1 == len(ids):  # a block
            return pa.concat_arrays([pa.array([], pa.string()), *self._values.slice(ids[0], len(ids)).chunks])
        return pa.array([self._values[number].as_py() for number in ids.tolist()], pa.string())

    def find_similar(self, value: str, most: int = 3) -> list[str]:
        """Return a few of the rows' names that resemble a value; [] if rows have no names."""
        if self._values is None or self._keys is not None:
            return []
        pieces = [self._values.slice(first, size) for first, size in self._segments]
        found: list[str] = []
        for piece in pieces:
            alike = piece.filter(pc.starts_with(piece, value.strip(), ignore_case=True)) if value.strip() else piece[:0]
            found += alike.slice(0, most - len(found)).to_pylist()
        if not found and len(self) <= _FEW:
            found = get_close_matches(value, [text for piece in pieces for text in piece.to_pylist()], most)
        return found


@dataclass(frozen=True)
class OpenedCheckpoint:
    """An opened checkpoint, with the data set that it was trained on.

    Attributes:
        chain: The checkpoint and its parents.
        data: The data set's manifest; None for a checkpoint of `Runtime.save`, whose rows have no columns and names.
        data_folder: The folder of the manifest, or None.
        encoding: The data set's encoding, or None.
        why: Why this checkpoint was chosen, or "".
        notes: Lines about damaged checkpoints that were skipped.
    """

    chain: Chain
    data: Manifest | None
    data_folder: Path | None
    encoding: Encoding | None
    why: str
    notes: list[str]

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.chain[-1].path

    @cached_property
    def layers(self) -> Layers:
        """The content of the tables."""
        return Layers(self.chain)

    @cached_property
    def vocabulary(self) -> pa.Table | None:
        """The column and value of each id; None if ids are hashed, or there is no data set."""
        return None if self.data is None or self.data.vocabulary is None else read_vocabulary(self.layers)

    @cached_property
    def spaces(self) -> dict[str, Space]:
        """The id spaces by name."""
        if self.data is None:
            return {}
        schema = self.data.schema
        everything = (schema.first_value, schema.rows - schema.first_value)
        is_recorded = any((space.first, space.size) != everything for space in schema.spaces)
        if self.data.vocabulary is None or is_recorded:
            return {space.name: space for space in schema.spaces}
        assert self.data_folder is not None
        return StoredVocabulary(self.data_folder, self.data).spaces  # old manifests do not record the id spaces' ids

    def vector_tables(self) -> list[Table]:
        """Return the tables with more than one value per row; raise UserError if there are none."""
        found = [table for table in self.layers.manifest.tables if table.dim > 1]
        if not found:
            names = listed([table.name for table in self.layers.manifest.tables])
            raise UserError(f"{self.path} has no table with vectors, only with one number per row: {names}")
        return found

    def find_table(self, name: str) -> Table:
        """Return a table with vectors; raise UserError for another name."""
        tables = {table.name: table for table in self.layers.manifest.tables}
        if name not in tables:
            hint = f"; {name!r} is a column: give --column {name}" if name in self._columns else ""
            raise UserError(f"{self.path} has no table {name!r}; it has {listed(list(tables))}{hint}")
        if tables[name].dim == 1:
            with_vectors = listed([table.name for table in self.vector_tables()])
            raise UserError(
                f"table {name!r} has one number per row, and no vectors to compare; tables with vectors: {with_vectors}"
            )
        return tables[name]

    def has_columns(self, table: Table) -> bool:
        """Return whether a table's ids are those of the data set, so that each row belongs to an id space."""
        return self.data is not None and (table.keys is not None or table.rows == self.data.schema.rows)

    @property
    def _columns(self) -> dict[str, Column]:
        return {} if self.data is None else {column.name: column for column in self.data.schema.columns}

    def find_column(self, name: str) -> Column:
        """Return a column of ids; raise UserError if there is none of this name."""
        if self.data is None:
            raise UserError(
                f"--column {name}: {self.path} was written by Runtime.save, which records no columns; leave out "
                "--column, and give the number of the row or its key"
            )
        if name not in self._columns:
            raise UserError(
                f"--column {name}: the data has no column of ids {name!r}; it has {listed([*self._columns])}"
            )
        return self._columns[name]

    def require_columns(self, table: Table, option: str) -> None:
        """Raise UserError if there is a data set, and a table's rows are not those of its ids."""
        if not self.has_columns(table) and self.data is not None:
            raise UserError(
                f"{option}: table {table.name!r} has {table.rows:,} rows, which are not the data's "
                f"{self.data.schema.rows:,} ids, so only the model knows which values they are; give --of-id N"
            )

    @property
    def spaces_begin(self) -> int:
        """The first id of a value."""
        return 0 if self.data is None else self.data.schema.first_value

    def make_rows(self, table: Table, space: Space | None) -> NamedRows:
        """Return the rows of an id space, or all rows of a table."""
        return NamedRows(self.layers, table.name, space, self.vocabulary if space is not None else None)


def open_source(path: Path, which: str | None = None) -> OpenedCheckpoint:
    """Open a checkpoint, or choose one as `predict` does. `Runtime.save` may have written it.

    Raises:
        UserError: There is no checkpoint, or the choice `which` is not possible.
        BrokenCheckpointError: The checkpoint is damaged.
    """
    with reading(path):
        found = newest(path)
    state: Any = found.chain[-1].manifest.state
    if isinstance(state, dict) and "more" in state:
        opened = open_checkpoint(path, which)
        about = opened.data, opened.data_folder, opened.encoding, opened.why
        return OpenedCheckpoint(opened.chain, *about, list(opened.found.notes()))
    if which is not None:
        raise UserError(f"--which {which}: {found.chain[-1].path} was written by Runtime.save; leave out --which")
    return OpenedCheckpoint(found.chain, None, None, None, "", list(found.notes()))


class Nearest(NamedTuple):
    """The nearest rows of Q queries, the nearest first; equal scores are in the order of the rows.

    Attributes:
        ids: int64 [Q, k].
        scores: float64 [Q, k]: cosines or dot products, descending; or distances, ascending.
        not_finite: Number of rows that were left out because a value is NaN or infinite.
    """

    ids: LongIds
    scores: Scores
    not_finite: int


def score(query: Scores, weights: Scores, metric: str) -> Scores:
    """Return the scores of rows for a query, float64 [n]; the nearest row has the largest.

    Args:
        query: float64 [D].
        weights: float64 [n, D].
        metric: "cosine" (0 for a row of zeros), "dot", or "l2", whose score is the negative distance.
    """
    if metric == "l2":
        found: Scores = -np.sqrt(np.square(weights - query).sum(1))
        return found
    products: Scores = weights @ query
    if metric == "dot":
        return products
    lengths = np.sqrt(np.square(weights).sum(1)) * np.sqrt(np.square(query).sum())
    cosines = np.zeros(len(products))
    np.divide(products, lengths, out=cosines, where=lengths > 0)
    return cosines


def find_nearest(rows: NamedRows, queries: npt.NDArray[np.float32], k: int, metric: str, without: LongIds) -> Nearest:
    """Return the k nearest rows of each query.

    Args:
        rows: The rows to compare, read once.
        queries: float32 [Q, D].
        k: Number of rows to return for each query.
        metric: As in `score`.
        without: Ids of rows to leave out, int64 [any].

    Raises:
        UserError: A query has a value that is not finite, or only zeros with "cosine"; or there are fewer than k rows.
    """
    wanted = queries.astype(np.float64)
    if not np.isfinite(wanted).all():
        raise UserError("the row has a value that is not finite, so no row is near it")
    if metric == "cosine" and not wanted.any(axis=1).all():
        raise UserError("the row has only zeros, which have no direction; use --metric l2")
    ids = [np.empty(0, np.int64) for _ in wanted]
    scores = [np.empty(0) for _ in wanted]
    left_out = 0
    for numbers, weights in rows.blocks():
        kept = np.logical_and.reduce(np.isfinite(weights), axis=1)
        left_out += len(kept) - int(np.count_nonzero(kept))
        kept &= ~np.isin(numbers, without)
        numbers, block = numbers[kept], weights[kept].astype(np.float64)
        for number, query in enumerate(wanted):
            found = score(query, block, metric)
            least = scores[number][-1] if len(scores[number]) == k else -np.inf
            better = np.flatnonzero(found > least)
            joined = np.concatenate([scores[number], found[better]])
            first = np.argsort(-joined, kind="stable")[:k]
            ids[number] = np.concatenate([ids[number], numbers[better]])[first]
            scores[number] = joined[first]
    if len(scores[0]) < k:
        has = f"{len(scores[0]):,} other" if len(without) else f"{len(scores[0]):,}"
        raise UserError(f"--k {k}: there are only {has} rows{' with finite values' if left_out else ''}")
    sign = -1.0 if metric == "l2" else 1.0
    return Nearest(np.stack(ids), sign * np.stack(scores) + 0.0, left_out)
