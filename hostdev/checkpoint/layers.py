"""The merged rows and keys of a checkpoint and its parents, read from the files one range at a time.

Keys are merged in parts, by the highest bits of their hashes, so that little memory is needed beside the result.

Steps of some tables also change rows that the batch does not use. Files hold rows as they were last written, and the
manifest holds the table's step history. Reading a row applies the steps that the row has missed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.columns import Mapped, open_column
from hostdev.checkpoint.folder import Chain, Checkpoint, chain_of_table, mapped
from hostdev.checkpoint.keyed import OtherKeys, keys_of, read_others
from hostdev.checkpoint.manifest import BrokenCheckpointError, KeyState, RangeFile, Table
from hostdev.checkpoint.ranges import SPREAD, WEIGHTS, RowChunk, parse_range, require_covered, rows_per_file
from hostdev.checkpoint.segment_rows import open_segments
from hostdev.core.history import History, NoHistory
from hostdev.core.keys import KeyArrays, KeyColumns, decayed, join_columns
from hostdev.core.optimizer_base import LAST, CatchUp
from hostdev.core.optimizers import Adam
from hostdev.kernels.arrays import Rows, reserved
from hostdev.kernels.catch_up import bring_tasks
from hostdev.kernels.clock import Clock
from hostdev.kernels.counter import mix64
from hostdev.kernels.pool import run_tasks

_PART_BITS = 8
_AT_ONCE = 1 << 16  # keys that are merged as one part


class MergedKeys(NamedTuple):
    """The keys of a chain's table by key, in the order of their hashes, and where the newest version of each row is."""

    columns: KeyColumns  # [K]
    layers: npt.NDArray[np.int32]  # [K], the checkpoint that has the row
    positions: npt.NDArray[np.int32]  # [K], the row's position in that checkpoint
    others: OtherKeys  # of the newest checkpoint


class _Layer(NamedTuple):
    """The keys of one checkpoint, in the order of their hashes."""

    state: KeyState
    others: OtherKeys
    files: list[KeyColumns]  # in memory-mapped files
    ends: npt.NDArray[np.int64]  # [parts + 1], where the keys of each part begin and end
    gone_ends: npt.NDArray[np.int64]  # [parts + 1], the same for the keys that are gone

    def between(self, first: int, last: int) -> KeyColumns:
        """Return the keys at the positions [first, last)."""
        found, begin = [KeyColumns(*_nothing())], 0
        for file in self.files:
            end = begin + len(file.keys)
            if first < end and begin < last:
                found.append(file.at(slice(max(0, first - begin), last - begin)))
            begin = end
        return join_columns(found)


class _Part(NamedTuple):
    """Merged keys of a part; fields as in `MergedKeys`."""

    columns: KeyColumns
    layers: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]


def merge_keys(chain: Chain, name: str) -> MergedKeys:
    """Return the merged keys of a chain; raise BrokenCheckpointError if they contradict each other."""
    own = chain_of_table(chain, name)
    layers = [_read_layer(checkpoint, checkpoint.manifest.table(name)) for checkpoint in own]
    count = layers[-1].state.count
    columns = KeyColumns(*(reserved((count,), dtype) for dtype in (np.int64, np.uint32, np.uint32)))
    found = MergedKeys(columns, reserved((count,), np.int32), reserved((count,), np.int32), layers[-1].others)
    few = sum(int(layer.ends[-1]) for layer in layers) <= _AT_ONCE
    first = 0
    for begin, end in [(0, 1 << _PART_BITS)] if few else [(part, part + 1) for part in range(1 << _PART_BITS)]:
        part = _merge_part(layers, begin, end)
        last = first + len(part.layers)
        if last <= count:
            at = slice(first, last)
            columns.keys[at], columns.last[at], columns.uses[at] = part.columns
            found.layers[at], found.positions[at] = part.layers + (len(chain) - len(own)), part.positions
        first = last
    if first != count:
        raise BrokenCheckpointError(f"{chain[-1].path} is broken (table {name!r} has {first:,} keys, not {count:,})")
    return found


def key_arrays(merged: MergedKeys, state: KeyState) -> KeyArrays:
    """Return merged keys for a digest."""
    others = merged.others
    return KeyArrays(state.step, state.unknown, *merged.columns, others.waiting, others.counts, others.sketch)


def _read_layer(checkpoint: Checkpoint, table: Table) -> _Layer:
    state = keys_of(table)
    others = read_others(checkpoint, state)
    files, ends = _read_columns(checkpoint, table)
    return _Layer(state, others, files, ends, _ends(mix64(others.gone.view(np.uint64))))


def _read_columns(checkpoint: Checkpoint, table: Table) -> tuple[list[KeyColumns], npt.NDArray[np.int64]]:
    """Return the keys that have a row in a checkpoint, and where their parts begin and end."""
    unknown, last = len(keys_of(table).unknown), -1
    found, ends = [], np.zeros((1 << _PART_BITS) + 1, np.int64)
    for file in sorted(table.files, key=lambda file: file.start):
        path = checkpoint.path / file.file
        rows = parse_range(path, mapped(path), table, file)
        assert rows.keys is not None
        found.append(rows.keys.at(slice(max(0, min(unknown - file.start, len(rows))), None)))
        hashes = mix64(found[-1].keys.view(np.uint64))
        if len(hashes):
            if int(hashes[0]) <= last or (hashes[1:] <= hashes[:-1]).any():
                raise BrokenCheckpointError(
                    f"{checkpoint.path} is broken (the keys of table {table.name!r} are not in order)"
                )
            last = int(hashes[-1])
            ends += _ends(hashes)
    return found, ends


def _ends(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return where each part of ascending hashes begins and ends."""
    starts = np.arange(1 << _PART_BITS, dtype=np.uint64) << np.uint64(64 - _PART_BITS)
    return np.append(np.searchsorted(hashes, starts), len(hashes))


def _nothing() -> tuple[Any, Any, Any]:
    return np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.uint32)


def _merge_part(layers: list[_Layer], begin: int, end: int) -> _Part:
    """Merge the keys of the parts [begin, end)."""
    none = np.zeros(0, np.int32)
    merged, decays = _Part(KeyColumns(*_nothing()), none, none), 0
    for number, layer in enumerate(layers):
        first, last = layer.ends[[begin, end]].tolist()
        added = layer.between(first, last)
        gone = layer.others.gone[slice(*layer.gone_ends[[begin, end]].tolist())]
        state = layer.state
        uses, decays = decayed(merged.columns.uses, state.decay, state.decays - decays), state.decays
        merged = merged._replace(columns=merged.columns._replace(uses=uses))
        unknown = len(state.unknown)
        positions = np.arange(unknown + first, unknown + last, dtype=np.int32)
        merged = _replace(merged, gone, _Part(added, np.full(len(positions), number, np.int32), positions))
    return merged


def _replace(merged: _Part, gone: npt.NDArray[np.int64], new: _Part) -> _Part:
    """Remove keys, and then add keys or replace them; all are in the order of their hashes."""
    if not len(merged.layers):
        return new
    hashes, others = mix64(merged.columns.keys.view(np.uint64)), mix64(new.columns.keys.view(np.uint64))
    kept = np.ones(len(hashes), np.bool_)
    for removed in (mix64(gone.view(np.uint64)), others):
        at = np.minimum(np.searchsorted(hashes, removed), len(hashes) - 1)
        kept[at[hashes[at] == removed]] = False
    at = np.searchsorted(hashes[kept], others)

    def join(old: npt.NDArray[Any], values: npt.NDArray[Any]) -> Any:
        return np.insert(old[kept], at, values)

    old, own = merged.columns, new.columns
    columns = KeyColumns(join(old.keys, own.keys), join(old.last, own.last), join(old.uses, own.uses))
    return _Part(columns, join(merged.layers, new.layers), join(merged.positions, new.positions))


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


class CurrentTable:
    """A table's weights as of its last step, float32 [rows, dim], with the interface of `MappedTable`.

    Args:
        chain: A full checkpoint and its increments.
        name: The table.
        history: The table's step history.
    """

    def __init__(self, chain: Chain, name: str, history: History) -> None:
        about = chain[-1].manifest.table(name)
        self._clock = history.clock()
        planes = [WEIGHTS, *about.slots] if history.how.betas is not None else [WEIGHTS]
        self._planes = [open_column(chain, name, column) for column in planes]
        self._last = open_column(chain, name, LAST)
        self.is_by_key = self._last.is_by_key
        self.name, self.rows, self.dim = name, self._planes[0].rows, about.dim

    def lookup(self, ids: npt.NDArray[Any], **options: Any) -> Rows:
        """Return a copy of the rows `ids`, after applying the steps that each has missed; see `MappedTable.lookup`.

        For a table by key, the arguments are those of `MappedKeys.lookup`.
        """
        block = np.stack([plane.lookup(ids, **options) for plane in self._planes], 1)
        run_tasks(bring_tasks(block, self._last.lookup(ids, **options), self._clock))
        return np.ascontiguousarray(block[:, 0])


def open_table(chain: Chain, name: str) -> Mapped | CurrentTable:
    """Return a table's weights for lookups."""
    history = history_of(chain, name)
    return open_column(chain, name) if isinstance(history, NoHistory) else CurrentTable(chain, name, history)


class CurrentLayers(Layers):
    """A chain's tables; `columns_of_ids` returns rows as of the last step."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self._clocks: dict[str, Clock | None] = {}

    def columns_of_ids(self, name: str, start: int, stop: int, columns: Sequence[str]) -> dict[str, Rows]:
        """See `Layers`."""
        if name not in self._clocks:
            self._clocks[name] = history_of(self.chain, name).clock()
        clock, about = self._clocks[name], self.manifest.table(name)
        if clock is None:
            return super().columns_of_ids(name, start, stop, columns)
        planes = [WEIGHTS, *about.slots]
        found = super().columns_of_ids(name, start, stop, [*planes, *about.row_slots])
        block = np.stack([found[column] for column in planes], 1)
        row_slots = np.concatenate([found[column] for column in about.row_slots], 1)
        run_tasks(bring_tasks(block, row_slots, clock))
        found = {column: block[:, number] for number, column in enumerate(planes)}
        found |= {column: row_slots[:, number : number + 1] for number, column in enumerate(about.row_slots)}
        return {column: found[column] for column in columns}
