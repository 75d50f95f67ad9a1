"""A column of a table in a checkpoint, for lookups, wherever the rows are."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.files import mapped
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.keyed import keys_of
from hostdev.checkpoint.keyed_lookup import MappedKeys, get_initial_values
from hostdev.checkpoint.lookup import MappedTable
from hostdev.checkpoint.ranges import LOCATION, WEIGHTS, parse_range
from hostdev.checkpoint.segment_rows import SegmentRows
from hostdev.core.ids import checked_ids, to_keys
from hostdev.core.keys import INITIAL
from hostdev.kernels.arrays import LongIds, Rows


class SegmentColumn:
    """A column of a table whose rows are in segments, with the interface of `MappedTable` or `MappedKeys`.

    Args:
        chain: A checkpoint, with its parents, whose entry of the table has segments.
        name: The table.
        column: "weights" or the name of a state column.
    """

    def __init__(self, chain: Chain, name: str, column: str = WEIGHTS) -> None:
        newest = chain[-1]
        about = newest.manifest.table(name)
        self._segments, self._column = SegmentRows(newest.path, about), column
        self._places: Any = (MappedTable if about.keys is None else MappedKeys)(chain, name, LOCATION)
        self.is_by_key, self.name, self.rows = about.keys is not None, name, self._places.rows
        self.dim = 1 if column in about.row_slots else about.dim
        self._own: LongIds = np.zeros((0, 2), np.int64)  # locations and keys of out-of-vocabulary rows
        self._initial = None
        if about.keys is not None:
            self.unknown = keys_of(about).unknown
            self._own = self._find_unknown(newest.path, about)
            if about.keys.unknown_values == INITIAL:
                self._initial = get_initial_values(about, column)

    def _find_unknown(self, root: Any, about: Any) -> LongIds:
        found = []
        for file in about.files:
            if (count := len(self.unknown) - file.start) > 0:
                path = root / file.file
                rows = parse_range(path, mapped(path), about, file, self._segments)
                assert rows.keys is not None and rows.locations is not None
                found.append(np.stack([rows.locations[:count], rows.keys.keys[:count]], 1))
        return np.concatenate([self._own, *found])

    def lookup(self, ids: npt.ArrayLike, **options: Any) -> Rows:
        """Return a copy, float32 [N, D], of the rows `ids`; see `MappedTable.lookup` and `MappedKeys.lookup`.

        Raises:
            BrokenCheckpointError: A segment is damaged.
        """
        given = to_keys(ids, f"table {self.name!r}: keys") if self.is_by_key else checked_ids(ids, self.rows, self.name)
        bits: Rows = self._places.lookup(given, **options)
        locations, first, inverse = np.unique(bits.view(np.int64)[:, 0], return_index=True, return_inverse=True)
        if not len(locations):
            return np.empty((0, self.dim), np.float32)
        if not self.is_by_key and locations[0] == 0:  # each of these rows has values of its own
            locations, inverse = bits.view(np.int64)[:, 0], np.arange(len(bits))
            first = inverse
        keys = np.asarray(given, np.int64)[first]
        for location, key in self._own.tolist():
            keys[locations == location] = key
        out = self._segments.columns(locations, keys)[self._column].reshape(len(locations), self.dim)[inverse]
        if self._initial is not None and locations[0] == 0:
            missing = np.flatnonzero(inverse == 0)
            out[missing] = self._initial(np.asarray(given, np.int64)[missing])
        return out


Mapped = MappedTable | MappedKeys | SegmentColumn


def open_column(chain: Chain, name: str, column: str = WEIGHTS) -> Mapped:
    """Return a column of a table for lookups."""
    about = chain[-1].manifest.table(name)
    if about.segments is not None:
        return SegmentColumn(chain, name, column)
    return MappedTable(chain, name, column) if about.keys is None else MappedKeys(chain, name, column)
