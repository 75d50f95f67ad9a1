"""The rows of a table that a search compares: those of one id space's values, or all rows. They are read in blocks."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.checkpoint.layers import Layers, open_table
from hostdev.core.errors import UserError
from hostdev.data.schema import Space
from hostdev.kernels.arrays import LongIds, Values

_BLOCK_BYTES = 4 << 20  # of weights that are read at a time
_FEW = 20_000  # names, among which similar ones are found within a fraction of a second


class NamedRows:
    """The rows of a table in a checkpoint, without out-of-vocabulary rows and those of dense columns.

    Args:
        layers: The checkpoint.
        table: The table's name.
        space: The id space whose values' rows these are, or None for all rows of the table.
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
        self._opened: Any = open_table(layers.chain, table)
        self.table, self.dim, self.is_by_key = table, about.dim, about.keys is not None
        self.space, self._space = None if space is None else space.name, space
        self.has_names, self._values = vocabulary is not None, None if vocabulary is None else vocabulary["value"]
        self._options: dict[str, str] = {}
        self._keys: LongIds | None = None
        if about.keys is not None:
            self._options = {"unknown": next(iter(about.keys.unknown), "")}  # no key of a lookup lacks a row
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
