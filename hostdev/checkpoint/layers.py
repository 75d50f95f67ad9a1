"""The rows of tables in a checkpoint and its parents: rows of any ids or keys, and whole tables range by range.

`SavedRows` is one table, opened read-only: an index, which finds the places of rows (`row_index`), the values at these
places, and the table's step history. Files hold rows as they were last written. If a table's steps also change rows
that the batch does not use, the manifest has the table's step history. With `current`, reading a row then applies the
steps that the row has missed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.folder import Chain, chain_of_table, mapped
from hostdev.checkpoint.keyed import keys_of
from hostdev.checkpoint.manifest import BrokenCheckpointError, Table
from hostdev.checkpoint.ranges import (
    KEY,
    LOCATION,
    SPREAD,
    WEIGHTS,
    RowChunk,
    get_column,
    get_width,
    parse_range,
    require_covered,
    rows_per_file,
)
from hostdev.checkpoint.row_index import (
    NO_VALUES,
    PLACE_BITS,
    FileValues,
    IdIndex,
    KeyedIndex,
    MergedKeys,
    TableFiles,
    copy_rows,
    make_places,
    run,
)
from hostdev.checkpoint.segment_rows import SegmentRows
from hostdev.core.history import History, NoHistory
from hostdev.core.initializers import from_text
from hostdev.core.optimizer_base import LAST, CatchUp
from hostdev.core.optimizers import Adam
from hostdev.core.table_dtypes import BF16
from hostdev.host.storage import fill_initial
from hostdev.kernels.arrays import Keys, LongIds, Rows
from hostdev.kernels.catch_up import bring_tasks
from hostdev.kernels.jit import address_of
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.shards import ids_of

_HELD = 2  # files of locations whose rows stay in memory, so that several columns are read from the segments once


class FileSlice(NamedTuple):
    """The rows [start, stop) of a file."""

    file: int
    start: int
    stop: int


class SavedRows:
    """A table in a chain. Several threads may call its methods.

    Args:
        chain: A full checkpoint and its increments, from `read_chain`.
        name: The table.
        current: Whether rows are read as of the table's last step; otherwise, as they were last written.
        all_rows: Whether all rows will be read.

    Attributes:
        table: The table's entry in the newest manifest.
        rows: Number of rows or, for a table by key, of keys that have a row.

    Raises:
        BrokenCheckpointError: A file is damaged, or the checkpoints contradict each other.
    """

    def __init__(self, chain: Chain, name: str, *, current: bool = True, all_rows: bool = False) -> None:
        newest, chain = chain[-1], chain_of_table(chain, name)
        self.table = about = newest.manifest.table(name)
        self.name, self.dim, self.is_by_key = name, about.dim, about.keys is not None
        if not self.is_by_key:
            require_covered(chain, name)
        for checkpoint in chain:
            table = checkpoint.manifest.table(name)
            is_larger = not self.is_by_key and table.rows > about.rows
            if (table.dim, table.order) != (about.dim, about.order) or is_larger:
                raise BrokenCheckpointError(
                    f"{checkpoint.path} is broken (table {name!r} differs in shape or row order from {newest.path})"
                )
        self._files = _open_files(chain[::-1], name)
        self._index = (KeyedIndex if self.is_by_key else IdIndex)(name, self._files)
        self.rows = self._index.rows
        self._segments = None if about.segments is None else SegmentRows(newest.path, about, all_rows=all_rows)
        self._load = lru_cache(maxsize=_HELD)(partial(_load, self._files.chunks, self._segments))  # by file number
        self._values: dict[str, FileValues] = {}
        history = history_of(chain, name) if current else NoHistory()
        self._clock = history.clock()
        self._planes = [WEIGHTS, *about.slots] if history.how is not None and history.how.betas else [WEIGHTS]
        is_plain = self._segments is None and self._clock is None
        self._weights = self._get_values(WEIGHTS) if is_plain else None  # None if a lookup must do more than copy

    @cached_property
    def merged(self) -> MergedKeys:
        """All keys of a table by key."""
        assert isinstance(self._index, KeyedIndex)
        return self._index.merge()

    def lookup(self, ids: npt.ArrayLike, unknown: str | Sequence[str] | None = None) -> Rows:
        """Return a copy, float32 [N, D], of the weights of ids or keys [N].

        Args:
            ids: int32 or int64 [N] in [0, rows); for a table by key, keys.
            unknown: For a table by key, as for `KeyedIndex.find`.

        Raises:
            TypeError, ValueError, UserError: As for `HostTable.lookup`; or there is no out-of-vocabulary row of this
                name.
            BrokenCheckpointError: A segment is damaged.
        """
        checked, places, out = self._index.find(ids, unknown, self._weights or NO_VALUES)
        if self._weights is None:
            known = np.where(places < 0, self._index.unknown[0], places) if self._index.has_initial else places
            out = np.ascontiguousarray(self.read(known, [WEIGHTS])[WEIGHTS])
        if self._index.has_initial and len(missing := np.flatnonzero(places < 0)):
            out[missing] = make_initial(self.table, checked[missing])
        return out

    def find(self, ids: npt.ArrayLike) -> LongIds:
        """Return the places of the rows of ids [N], int64 [N]; raise the errors of `lookup`."""
        return self._index.find(ids).places

    def locate(self, start: int, stop: int) -> LongIds | FileSlice:
        """Return where the rows [start, stop) in stored order are: a slice of a file, or places, int64 [stop - start].

        It is a slice if the chain has only one checkpoint, and one of the checkpoint's files has all these rows.

        The rows of a table by key are its out-of-vocabulary rows, and then those of its keys in the order of hashes.
        """
        chunks = self._files.chunks if len(self._files.chain) == 1 else ()
        for file, chunk in enumerate(chunks):
            if chunk.start <= start and stop <= chunk.start + len(chunk):
                return FileSlice(file, start - chunk.start, stop - chunk.start)
        if isinstance(self._index, KeyedIndex):
            return self.merged.places[start:stop]
        return self._index.locate(np.arange(start, stop)).places

    def read(self, places: LongIds | FileSlice, columns: Sequence[str]) -> dict[str, Rows]:
        """Return columns of rows by name, float32 [N, D], or [N, 1] for per-row state; some may be read-only views."""
        if self._clock is None:
            return self._read_stored(places, columns)
        found = self._read_stored(places, list(dict.fromkeys([*self._planes, LAST, *columns])))
        block, found[LAST] = np.stack([found[plane] for plane in self._planes], 1), found[LAST].copy()
        run_tasks(bring_tasks(block, found[LAST], self._clock))
        found |= {plane: block[:, number] for number, plane in enumerate(self._planes)}
        return {column: found[column] for column in columns}

    def read_locations(self, start: int, stop: int) -> LongIds:
        """Return the locations of the rows [start, stop) of a table whose rows are in segments."""
        places = self.locate(start, stop)
        if isinstance(places, FileSlice):
            places = make_places(*places)
        return self._copy(places, LOCATION).view(np.int64)[:, 0]

    def _read_stored(self, places: LongIds | FileSlice, columns: Sequence[str]) -> dict[str, Rows]:
        if isinstance(places, FileSlice):
            chunk, part = self._load(places.file), slice(places.start, places.stop)
            found = {column: get_column(chunk, column)[part] for column in columns}
            return {column: values.reshape(len(values), -1) for column, values in found.items()}
        if self._segments is None:
            return {column: self._copy(places, column) for column in columns}
        if not len(places):
            return {column: np.empty((0, get_width(self.table, column)), np.float32) for column in columns}
        places, inverse = np.unique(places, return_inverse=True)
        locations = self._copy(places, LOCATION).view(np.int64)[:, 0]
        found = self._segments.columns(locations, self._get_ids(places))
        return {column: found[column].reshape(len(places), -1)[inverse] for column in columns}

    def _get_ids(self, places: LongIds) -> LongIds:
        """Return the ids in the whole table, or the keys, of the rows at `places`, which must be in segments."""
        if self.is_by_key:
            return self._copy(places, KEY).view(np.int64)[:, 0]
        starts = np.array([chunk.start for chunk in self._files.chunks], np.int64)
        positions = starts[places >> PLACE_BITS] + (places & ((1 << PLACE_BITS) - 1))
        return ids_of(positions, self.rows) if self.table.order == SPREAD else positions

    def _copy(self, places: LongIds, column: str) -> Rows:
        """Return copies of a column's values at places [N], float32 [N, width]; see `get_column`."""
        values = self._get_values(column)
        out = np.empty((len(places), values.width), np.float32)
        run(copy_rows, len(places), places, values.addresses, out, nbytes=4 * values.width)
        return out

    def _get_values(self, column: str) -> FileValues:
        if column not in self._values:
            addresses = [int(address_of(get_column(chunk, column))) for chunk in self._files.chunks]
            self._values[column] = FileValues(np.array(addresses, np.int64), get_width(self.table, column))
        return self._values[column]


def _open_files(chain: Chain, name: str) -> TableFiles:
    """Open the files of a table; the newest checkpoint comes first."""
    entries = [sorted(each.manifest.table(name).files, key=lambda file: file.start) for each in chain]
    chunks = [
        parse_range(path, mapped(path), checkpoint.manifest.table(name), file)
        for checkpoint, files in zip(chain, entries, strict=True)
        for file in files
        for path in [checkpoint.path / file.file]
    ]
    layers = np.array([0, *accumulate(map(len, entries))], np.int64)
    return TableFiles(chain, [file for files in entries for file in files], chunks, layers)


def _load(chunks: list[RowChunk], segments: SegmentRows | None, file: int) -> RowChunk:
    """Return the rows of a file with their columns, which are read from `segments` unless it is None."""
    return chunks[file] if segments is None else segments.load(chunks[file])


def make_initial(table: Table, keys: Keys) -> Rows:
    """Return the initial weights of keys [N] of a table by key, float32 [N, D]."""
    assert table.seed is not None
    block = np.empty((len(keys), 1, table.dim), np.float32)
    init, none = from_text(keys_of(table).init), np.empty(0, np.float32)
    fill_initial(block, keys, init, table.seed, table.name, none, is_rounded=table.dtype == BF16)
    return block[:, 0]


def history_of(chain: Chain, name: str) -> NoHistory | History:
    """Return a table's step history; `NoHistory` if its steps change only the rows of their batches.

    Raises:
        BrokenCheckpointError: The step history is damaged.
    """
    about = chain[-1].manifest.table(name)
    if LAST not in about.row_slots:
        return NoHistory()
    try:
        found = History(_catch_up(about))
        found.restore(about.history or "")
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise BrokenCheckpointError(f"{chain[-1].path} is broken (table {name!r}: {error})"[:480]) from None
    return found


def _catch_up(about: Table) -> CatchUp:
    given = about.arguments
    if about.optimizer == Adam.__name__:
        return Adam(**given).catch_up  # Adam checks the values
    return CatchUp(float(given["weight_decay"]))


class Layers:
    """A chain's tables, read range by range from memory-mapped files; checksums are verified only in segments.

    Args:
        chain: The checkpoint, with its parents.
        current: As for `SavedRows`.
    """

    def __init__(self, chain: Chain, *, current: bool = False) -> None:
        self.chain = chain
        tables = [_merged_entry(table) for table in chain[-1].manifest.tables]
        self.manifest = replace(chain[-1].manifest, tables=tables)
        self.open = lru_cache(maxsize=None)(partial(SavedRows, chain, current=current, all_rows=True))  # by name

    def merged(self, name: str) -> MergedKeys:
        """Return all keys of a table by key."""
        return self.open(name).merged

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """Return row ranges that cover a table; raise BrokenCheckpointError if a table by row lacks rows.

        For a table by row, these are the ranges of the files of the oldest checkpoint that the table needs.
        The rows of a table by key are its out-of-vocabulary rows, and then those of its keys in the order of hashes.
        """
        table = self.manifest.table(name)
        if table.keys is not None:
            step = rows_per_file(table)
            return [(start, min(start + step, table.rows)) for start in range(0, table.rows, step)]
        return require_covered(chain_of_table(self.chain, name), name)

    def read(self, name: str, start: int, stop: int, columns: Sequence[str]) -> dict[str, Rows]:
        """Return the rows [start, stop) in stored order, by column: float32 [n, D], or [n, 1] for per-row state."""
        rows = self.open(name)
        return rows.read(rows.locate(start, stop), columns)

    def column(self, name: str, column: str) -> Iterator[Rows]:
        """Yield a column's rows in id order, range by range: float32 [n, D], or [n, 1] for per-row state."""
        for start, stop in self.ranges(name):
            yield self.columns_of_ids(name, start, stop, [column])[column]

    def lookup(self, name: str, ids: npt.ArrayLike, columns: Sequence[str]) -> dict[str, Rows]:
        """Return the rows of ids [N] by column: float32 [N, D], or [N, 1] for per-row state."""
        rows = self.open(name)
        return rows.read(rows.find(ids), columns)

    def columns_of_ids(self, name: str, start: int, stop: int, columns: Sequence[str]) -> dict[str, Rows]:
        """Return the rows with ids in [start, stop), as `read` does; for a table by key, just what `read` returns."""
        if self.manifest.table(name).order == SPREAD:
            return self.lookup(name, np.arange(start, stop), columns)
        return self.read(name, start, stop, columns)

    def gather(self, name: str, rows: LongIds, columns: Sequence[str]) -> dict[str, Rows]:
        """Return columns of rows [N] of a table by key, as `read` does; `rows` are their numbers in stored order."""
        stored = self.open(name)
        return stored.read(stored.merged.places[rows], columns)


def _merged_entry(table: Table) -> Table:
    """Return a table's entry; a table by key gets the number of rows that it has in all checkpoints together."""
    return table if table.keys is None else replace(table, rows=len(table.keys.unknown) + table.keys.count)
