"""The merged rows of a checkpoint and its parents, read from the files one range at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.columns import open_column
from hostdev.checkpoint.files import mapped
from hostdev.checkpoint.folder import Chain, chain_of_table
from hostdev.checkpoint.manifest import RangeFile, Table
from hostdev.checkpoint.merged_keys import merge_keys
from hostdev.checkpoint.ranges import SPREAD, WEIGHTS, RowChunk, parse_range, require_covered, rows_per_file
from hostdev.checkpoint.segment_rows import open_segments
from hostdev.core.keys import KeyColumns, join_columns
from hostdev.kernels.arrays import Rows


class Layers:
    """A chain's tables, read from memory-mapped files without verifying checksums; a layer is one checkpoint."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        tables = [_merged_entry(table) for table in chain[-1].manifest.tables]
        self.manifest = replace(chain[-1].manifest, tables=tables)
        self.merged = lru_cache(maxsize=None)(partial(merge_keys, chain))  # called with the name of a table by key
        self._parsed = lru_cache(maxsize=None)(self._parse)
        self._mapped = lru_cache(maxsize=None)(partial(open_column, chain))
        self._segments = lru_cache(maxsize=None)(lambda layer, name: open_segments(chain[layer], name))

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """Return the row ranges of a table's files; raise BrokenCheckpointError unless they cover the table.

        The rows of a table by key are its out-of-vocabulary rows, and then those of its keys in the order of hashes.
        """
        table = self.manifest.table(name)
        if table.keys is not None:
            step = rows_per_file(table)
            return [(start, min(start + step, table.rows)) for start in range(0, table.rows, step)]
        return require_covered(self._chain(name), name)

    def rows(self, name: str, start: int, stop: int, columns: Sequence[str] | None = None) -> RowChunk:
        """Return the rows [start, stop), one of `ranges`, in stored order, with `columns` or, for None, all columns."""
        table = self.manifest.table(name)
        wanted = [WEIGHTS, *table.slots, *table.row_slots] if columns is None else list(columns)
        if table.keys is not None:
            return self._keyed_rows(table, start, stop, wanted)
        chain = self._chain(name)
        first = len(self.chain) - len(chain)
        base = next(file for file in chain[0].manifest.table(name).files if file.start == start)
        found = {column: _column(self._rows_of(first, table, base), column) for column in wanted}
        copied = False
        for layer, checkpoint in enumerate(chain[1:], first + 1):
            for file in checkpoint.manifest.table(name).files:
                if file.stop <= start or stop <= file.start:
                    continue
                rows = self._rows_of(layer, table, file)
                ids = rows.ids if rows.ids is not None else np.arange(file.start, file.stop)
                begin, end = np.searchsorted(ids, (start, stop))
                if begin == end:
                    continue
                if not copied:
                    found = {column: values.copy() for column, values in found.items()}
                    copied = True
                for column in wanted:
                    found[column][ids[begin:end] - start] = _column(rows, column)[begin:end]
        columns_found = {column: values for column, values in found.items() if column not in table.row_slots}
        return RowChunk(
            start, None, columns_found, {column: found[column] for column in table.row_slots if column in found}
        )

    def column(self, name: str, column: str) -> Iterator[Rows]:
        """Yield a column's rows in id order, range by range: float32 [n, D], or [n, 1] for per-row state."""
        for start, stop in self.ranges(name):
            yield self.columns_of_ids(name, start, stop, [column])[column]

    def lookup(self, name: str, column: str, ids: npt.NDArray[Any]) -> Rows:
        """Return the rows `ids` of a column, float32 [N, D], or [N, 1] for per-row state."""
        found: Rows = self._mapped(name, column).lookup(ids)
        return found

    def columns_of_ids(self, name: str, start: int, stop: int, columns: Sequence[str]) -> dict[str, Rows]:
        """Return the rows with ids in [start, stop), one of `ranges`, by column: float32 [n, D] or [n, 1]."""
        if self.manifest.table(name).order == SPREAD:
            return {column: self.lookup(name, column, np.arange(start, stop)) for column in columns}
        rows = self.rows(name, start, stop, columns)
        found = {**rows.columns, **rows.row_columns}
        return {column: found[column].reshape(stop - start, -1) for column in columns}

    def _rows_of(self, layer: int, table: Table, file: RangeFile) -> RowChunk:
        found: RowChunk = self._parsed(layer, table.name, file)
        return found

    def locate(self, name: str, first: int, last: int, out: npt.NDArray[np.int64]) -> None:
        """Write the locations of the merged rows [first, last) of a table whose rows are in segments, int64."""
        for file in self.chain[-1].manifest.table(name).files:
            begin, end = max(first, file.start), min(last, file.stop)
            if begin < end:
                rows = self._rows_of(len(self.chain) - 1, self.manifest.table(name), file)
                assert rows.locations is not None
                out[begin - first : end - first] = rows.locations[begin - file.start : end - file.start]

    def _chain(self, name: str) -> Chain:
        return chain_of_table(self.chain, name)

    def _parse(self, layer: int, name: str, file: RangeFile) -> RowChunk:
        path: Path = self.chain[layer].path / file.file
        table = self.chain[layer].manifest.table(name)
        return parse_range(path, mapped(path), table, file, self._segments(layer, name))

    def _keyed_rows(self, table: Table, start: int, stop: int, wanted: Sequence[str]) -> RowChunk:
        """Return the merged rows [start, stop) of a table by key."""
        assert table.keys is not None
        found = self.gather(table.name, np.arange(start, stop), wanted)
        columns = {name: values for name, values in found.items() if name not in table.row_slots}
        row_columns = {name: found[name] for name in table.row_slots if name in found}
        return RowChunk(start, None, columns, row_columns, self.key_columns(table.name, start, stop))

    def key_columns(self, name: str, start: int, stop: int) -> KeyColumns:
        """Return the keys of the merged rows [start, stop) of a table by key; see `gather` for their order."""
        table = self.manifest.table(name)
        assert table.keys is not None
        unknown = len(table.keys.unknown)
        keys = self.merged(name).columns.at(slice(max(start, unknown) - unknown, max(stop, unknown) - unknown))
        if start >= unknown:
            return keys
        files = [file for file in self.chain[-1].manifest.table(name).files if file.start < unknown]
        own = [self._rows_of(len(self.chain) - 1, table, file).keys for file in files]
        first = join_columns([each for each in own if each is not None])
        return join_columns([first.at(slice(start, min(stop, unknown))), keys])

    def gather(self, name: str, rows: npt.NDArray[Any], columns: Sequence[str]) -> dict[str, Rows]:
        """Return merged rows of a table by key by column, from the newest files that have them.

        Args:
            name: The table.
            rows: Row numbers [N]: out-of-vocabulary rows are first, followed by the keys of `merged`.
            columns: Names of columns, which are returned as float32 [N, D], or [N] for per-row state.
        """
        table = self.manifest.table(name)
        assert table.keys is not None
        merged, unknown = self.merged(name), len(table.keys.unknown)
        layers, positions = np.full(len(rows), len(self.chain) - 1, np.int32), np.array(rows, np.int64)
        by_key = np.flatnonzero(positions >= unknown)
        at = positions[by_key] - unknown
        layers[by_key], positions[by_key] = merged.layers[at], merged.positions[at]
        found: dict[str, Rows] = {}
        for column in columns:
            found[column] = np.empty(len(rows) if column in table.row_slots else (len(rows), table.dim), np.float32)
        for layer in np.unique(layers).tolist():
            for file in self.chain[layer].manifest.table(name).files:
                at = np.flatnonzero((layers == layer) & (file.start <= positions) & (positions < file.stop))
                if len(at):
                    chunk = self._rows_of(layer, table, file)
                    for column, values in found.items():
                        values[at] = _column(chunk, column)[positions[at] - file.start]
        return found


def _merged_entry(table: Table) -> Table:
    """Return a table's entry; a table by key gets the number of rows that it has in all checkpoints together."""
    return table if table.keys is None else replace(table, rows=len(table.keys.unknown) + table.keys.count)


def _column(rows: RowChunk, column: str) -> Any:
    return rows.columns[column] if column in rows.columns else rows.row_columns[column]
