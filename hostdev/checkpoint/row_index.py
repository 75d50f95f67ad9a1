"""Find where rows of a table are in the files of a checkpoint and its parents, by ids, by keys, or for all keys.

A place is the number of a file << 32 | the number of a row in it. The files of the newest checkpoint have the lowest
numbers.

Files are mapped into memory, which processes share. A file's keys are in the order of their hashes, which are spread
evenly. So a key's position is estimated from its hash (interpolation search), and found by a binary search nearby;
opening a checkpoint builds no hash table. `KeyedIndex.merge` merges the keys of all checkpoints part by part, so that
it needs little memory besides the result; a part has the keys whose hashes begin with the same bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.folder import Checkpoint
from hostdev.checkpoint.keyed import OtherKeys, keys_of, read_others
from hostdev.checkpoint.manifest import BrokenCheckpointError, KeyState, RangeFile
from hostdev.checkpoint.ranges import SPREAD, RowChunk
from hostdev.core.checks import checked_ids, to_keys
from hostdev.core.errors import UserError
from hostdev.core.keys import INITIAL, SHARED, KeyArrays, KeyColumns, decayed, join_columns
from hostdev.kernels.arrays import AnyIds, Keys, LongIds, Rows, reserved
from hostdev.kernels.counter import hashed, mix64
from hostdev.kernels.jit import address_of, array_at, inline, kernel
from hostdev.kernels.loops import run_alone
from hostdev.kernels.pool import get_grain, parallel_for
from hostdev.kernels.shards import get_positions

PLACE_BITS = 32  # bits of a place that hold the number of the row in its file
NOWHERE = -1  # the place of a key that has no row, and reads its own initial values
_FEW = 512  # rows; for up to this many, waking other threads costs more than it saves
_SEARCH_BYTES = 256  # bytes of memory that the search for a row reads, roughly
_PART_BITS = 8  # how many of the highest bits of a key's hash give the number of its part
_AT_ONCE = 1 << 16  # keys; if all checkpoints together have at most so many, they are merged as one part


def run(work: Any, n: int, *arrays: Any, nbytes: int = _SEARCH_BYTES) -> None:
    """Run a kernel that reads `nbytes` bytes of memory per row, for n rows; if n is large, in several threads."""
    if n <= _FEW:
        run_alone(work, n, *arrays)
    else:
        parallel_for(work, n, *arrays, grain=get_grain(nbytes))


@inline
def _copy_row(values: Any, place: Any, to: Any) -> None:
    """Copy the values of the row at `place` to `to`; `values` is the address of the values of its file."""
    D = len(to)
    row = array_at(values + (place & np.int64((1 << PLACE_BITS) - 1)) * D * 4, D, np.float32)
    for j in range(D):
        to[j] = row[j]


@kernel
def copy_rows(start: Any, stop: Any, places: Any, files: Any, out: Any) -> None:
    """Copy the values of rows to out[start:stop].

    Args:
        start: The first index.
        stop: The end of the indices.
        places: int64 [N].
        files: int64 [F], the addresses of the files' values.
        out: Output, float32 [N, D].
    """
    for i in range(np.uint64(start), np.uint64(stop)):
        _copy_row(files[places[i] >> PLACE_BITS], places[i], out[i])


class TableFiles(NamedTuple):
    """The files of a table in a chain, newest first."""

    chain: list[Checkpoint]  # newest first
    entries: list[RangeFile]  # [F], the files' entries in the manifests
    chunks: list[RowChunk]  # [F], the files' rows
    layers: LongIds  # [L + 1]; the l-th newest checkpoint, from 0, has the files [layers[l], layers[l + 1])

    def of(self, layer: int) -> range:
        """Return the numbers of the files of the checkpoint that is the `layer`-th newest, from 0."""
        return range(int(self.layers[layer]), int(self.layers[layer + 1]))


class FileValues(NamedTuple):
    """Where the values of a column are in memory."""

    addresses: LongIds  # [F], the address of each file's values
    width: int  # number of float32 values of a row


NO_VALUES = FileValues(np.zeros(0, np.int64), 0)


class IndexedRows(NamedTuple):
    """The rows that an index has found."""

    ids: AnyIds  # [N], positions in stored order; for a table by key, keys
    places: LongIds  # [N]
    values: Rows  # float32 [N, D], of one column; D is 0 if no values were asked for


@kernel
def _find_ids(start: Any, stop: Any, ids: Any, layers: Any, files: Any, addresses: Any, places: Any, out: Any) -> None:
    """Write the places and the values of the newest versions of the rows ids[start:stop].

    Args:
        start: The first index.
        stop: The end of the indices.
        ids: int32 or int64 [N], positions in stored order.
        layers: int64 [L + 1], see `TableFiles`.
        files: int64 [F, 4]; for each file: first row and end of its range, number of its rows, and address of their ids
            (0 if it has all rows of the range).
        addresses: int64 [F], the addresses of the files' values, if D is not 0.
        places: Output, int64 [N].
        out: Output, float32 [N, D].
    """
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.int64(ids[i])
        for layer in range(len(layers) - 1):
            low, high = layers[layer], layers[layer + 1]
            while high - low > 1:  # find the last file that begins at or before the row
                middle = (low + high) // 2
                if files[middle, 0] <= row:
                    low = middle
                else:
                    high = middle
            if low == high or row < files[low, 0] or row >= files[low, 1]:
                continue
            count, at = files[low, 2], row - files[low, 0]
            if files[low, 3] != 0:
                rows = array_at(files[low, 3], count, np.int64)
                begin, end = np.int64(0), count
                while begin < end:
                    half = (begin + end) // 2
                    if rows[half] < row:
                        begin = half + 1
                    else:
                        end = half
                if begin == count or rows[begin] != row:
                    continue
                at = begin
            places[i] = low << PLACE_BITS | at
            if out.shape[1] > 0:
                _copy_row(addresses[places[i] >> PLACE_BITS], places[i], out[i])
            break


class IdIndex:
    """The index of a table by row, which finds rows by ids. Several threads may call its methods.

    Args:
        name: The table.
        files: Its files; those of the oldest checkpoint have all rows.
    """

    unknown, has_initial = np.zeros(0, np.int64), False  # the attributes of `KeyedIndex`, for a table without keys

    def __init__(self, name: str, files: TableFiles) -> None:
        about = files.chain[0].manifest.table(name)
        self.name, self.rows, self._spread, self._layers = name, about.rows, about.order == SPREAD, files.layers
        ids = [0 if chunk.ids is None else int(address_of(chunk.ids)) for chunk in files.chunks]
        described = [[file.start, file.stop, file.rows, at] for file, at in zip(files.entries, ids, strict=True)]
        self._files = np.array(described, np.int64).reshape(-1, 4)

    def find(self, ids: npt.ArrayLike, unknown: object = None, values: FileValues = NO_VALUES) -> IndexedRows:
        """Return the rows with ids [N], with their values in the column `values`; raise as `HostTable.lookup` does."""
        del unknown
        checked = checked_ids(ids, self.rows, self.name)
        return self.locate(get_positions(checked, self.rows) if self._spread else checked, values)

    def locate(self, positions: AnyIds, values: FileValues = NO_VALUES) -> IndexedRows:
        """Return the places of the rows at positions [N] in stored order, and their values in the column `values`."""
        n = len(positions)
        found = IndexedRows(positions, np.empty(n, np.int64), np.empty((n, values.width), np.float32))
        own = self._layers, self._files, values.addresses
        run(_find_ids, n, positions, *own, *found[1:], nbytes=_SEARCH_BYTES + 4 * values.width)
        return found


@inline
def _find(keys: Any, found: Any, first: Any, last: Any) -> Any:
    """Return the position of the key whose hash is `found`, or -1; the keys are in the order of their hashes.

    `first` and `last` are the hashes of the first and the last key.
    """
    n = np.int64(len(keys))
    if found < first or found > last:
        return np.int64(-1)
    share = np.float64(found - first) / max(np.float64(last - first), 1.0)
    guess = min(max(np.int64(share * np.float64(n - 1)), np.int64(0)), n - 1)
    low, high, step = guess, guess + 1, np.int64(16)
    while low > 0 and hashed(0, keys[low]) > found:
        low = max(low - step, np.int64(0))
        step *= 2
    step = np.int64(16)
    while high < n and hashed(0, keys[high]) <= found:
        high = min(high + step, n)
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if hashed(0, keys[middle]) <= found:
            low = middle
        else:
            high = middle
    return low if hashed(0, keys[low]) == found else np.int64(-1)


@kernel
def _find_keys(start: Any, stop: Any, keys: Any, index: Any, turns: Any, addresses: Any, places: Any, out: Any) -> None:
    """Write the places and the values of the newest versions of the rows of keys[start:stop].

    Args:
        start: The first index.
        stop: The end of the indices.
        keys: int64 [N].
        index: Three arrays. The first is int64 [L + 1], see `TableFiles`. The second is int64 [F, 5], for each file:
            the hashes of its first and of its last key, the number of its keys, their address, and the number of
            out-of-vocabulary rows before them. The third is int64 [L, 4], for each checkpoint: the first four of these
            numbers for the keys that have lost their rows since its parent.
        turns: int64 [T], places for keys without a row: the i-th key gets the (i modulo T)-th.
        addresses: As for `_find_ids`.
        places: As for `_find_ids`.
        out: As for `_find_ids`; rows whose place is negative are left unchanged.
    """
    layers, files, gone = index
    for i in range(np.uint64(start), np.uint64(stop)):
        found = hashed(0, keys[i])
        places[i] = turns[i % np.uint64(len(turns))]
        for layer in range(len(layers) - 1):
            low, high = layers[layer], layers[layer + 1]
            while high - low > 1:  # find the last file that begins at or before the hash
                middle = (low + high) // 2
                if np.uint64(files[middle, 0]) <= found:
                    low = middle
                else:
                    high = middle
            at = np.int64(-1)
            if low < high and files[low, 2] > 0:
                file = files[low]
                at = _find(array_at(file[3], file[2], np.int64), found, np.uint64(file[0]), np.uint64(file[1]))
            if at >= 0:
                places[i] = low << PLACE_BITS | (at + files[low, 4])
                break
            lost = gone[layer]
            if lost[2] > 0:
                dead = array_at(lost[3], lost[2], np.int64)
                if _find(dead, found, np.uint64(lost[0]), np.uint64(lost[1])) >= 0:
                    break
        if out.shape[1] > 0 and places[i] >= 0:
            _copy_row(addresses[places[i] >> PLACE_BITS], places[i], out[i])


class KeyedIndex:
    """The index of a table by key, which finds rows by keys. Several threads may call its methods.

    Args:
        name: The table.
        files: Its files.

    Attributes:
        unknown: int64 [P], the places of the out-of-vocabulary rows, in the order of their names.
        others: For each checkpoint, newest first: its keys that have no row.
        has_initial: Whether keys without a row read their own initial values; `find` then returns `NOWHERE` for them.
    """

    def __init__(self, name: str, files: TableFiles) -> None:
        self._table, self._files = name, files
        states = [keys_of(checkpoint.manifest.table(name)) for checkpoint in files.chain]
        self.others = [read_others(*pair) for pair in zip(files.chain, states, strict=True)]
        self._states, self._names = states, states[0].unknown
        self._shares = states[0].unknown_values == SHARED
        self.has_initial = states[0].unknown_values == INITIAL
        self._before = np.concatenate([self._count_unknown(layer) for layer in range(len(states))])
        keys = list(map(_require_keys, files.chunks))
        self._keys = [each.at(slice(n, None)) for n, each in zip(self._before, keys, strict=True)]
        self._unknown_keys = [each.at(slice(n)) for n, each in zip(self._before, keys, strict=True)]
        described = [[*_describe(keys.keys), n] for keys, n in zip(self._keys, self._before.tolist(), strict=True)]
        gone = np.array([_describe(each.gone) for each in self.others], np.int64)
        self._arrays = files.layers, np.array(described, np.int64).reshape(-1, 5), gone
        own = [make_places(file, 0, self._before[file]) for file in files.of(0)]
        self.unknown = np.concatenate([np.zeros(0, np.int64), *own])
        if len(self.unknown) != len(self._names):
            raise BrokenCheckpointError(
                f"{files.chain[0].path} is broken (out-of-vocabulary rows of table {name!r} are missing)"
            )

    @property
    def rows(self) -> int:
        """Number of keys that have a row."""
        return self._states[0].count

    def _count_unknown(self, layer: int) -> LongIds:
        """Return how many out-of-vocabulary rows, which are a checkpoint's first rows, each of its files has."""
        chunks = [self._files.chunks[file] for file in self._files.of(layer)]
        left = len(self._states[layer].unknown)
        return np.array([max(0, min(len(chunk), left - chunk.start)) for chunk in chunks], np.int64)

    def find(
        self, ids: npt.ArrayLike, unknown: str | Sequence[str] | None = None, values: FileValues = NO_VALUES
    ) -> IndexedRows:
        """Return the places of the rows of keys [N], and the values of these rows in one column.

        Args:
            ids: Keys, integers of 64 bits [N].
            unknown: Name of the out-of-vocabulary row that keys without a row read; None for the row without a name.
                Or k names, which the keys use in turn, as for flattened ids [B, k] with a name for each of k. The
                names have no effect if keys without a row read zeros or their own initial values.
            values: The column; `NO_VALUES` for places only.

        Raises:
            TypeError, ValueError: The keys are not integers, or have a wrong shape.
            UserError: There is no out-of-vocabulary row of this name.
        """
        keys = to_keys(ids, f"table {self._table!r}: keys")
        if keys.ndim != 1:
            raise ValueError(f"table {self._table!r}: keys must have the shape [N], not {list(keys.shape)}")
        names = [unknown or ""] if unknown is None or isinstance(unknown, str) else unknown
        turns = np.array([self._get_place(name) for name in (names if self._shares else [""])], np.int64)
        n = len(keys)
        found = IndexedRows(keys, np.empty(n, np.int64), np.empty((n, values.width), np.float32))
        own = self._arrays, turns, values.addresses
        run(_find_keys, n, keys, *own, *found[1:], nbytes=_SEARCH_BYTES + 4 * values.width)
        return found

    def _get_place(self, name: str) -> int:
        if name not in self._names:
            raise UserError(
                f"table {self._table!r} has no out-of-vocabulary row {name!r}; it has "
                f"{', '.join(map(repr, self._names))}"
            )
        return NOWHERE if self.has_initial else int(self.unknown[self._names.index(name)])

    def merge(self) -> "MergedKeys":
        """Return all keys of the table; raise BrokenCheckpointError if the checkpoints' keys contradict each other."""
        count, path = self.rows, self._files.chain[0].path
        layers = [self._read_layer(layer) for layer in reversed(range(len(self._states)))]
        unknown = join_columns([_NOTHING, *(self._unknown_keys[file] for file in self._files.of(0))])
        columns = KeyColumns(*(reserved((count,), dtype) for dtype in (np.int64, np.uint32, np.uint32)))
        places = reserved((len(self.unknown) + count,), np.int64)
        places[: len(self.unknown)] = self.unknown
        found = MergedKeys(columns, unknown, places, self.others[0])
        few = sum(int(layer.ends[-1]) for layer in layers) <= _AT_ONCE
        first = 0
        for begin, end in [(0, 1 << _PART_BITS)] if few else [(part, part + 1) for part in range(1 << _PART_BITS)]:
            part = self._merge_part(layers, begin, end)
            last = first + len(part.places)
            if last <= count:
                at = slice(first, last)
                columns.keys[at], columns.last[at], columns.uses[at] = part.columns
                places[len(self.unknown) :][at] = part.places
            first = last
        if first != count:
            raise BrokenCheckpointError(f"{path} is broken (table {self._table!r} has {first:,} keys, not {count:,})")
        return found

    def _read_layer(self, number: int) -> "_Layer":
        """Return where the keys with a row are in a checkpoint; raise BrokenCheckpointError if they are unordered."""
        ends, last, files = np.zeros((1 << _PART_BITS) + 1, np.int64), -1, self._files.of(number)
        for file in files:
            hashes = mix64(self._keys[file].keys.view(np.uint64))
            if len(hashes):
                if int(hashes[0]) <= last or (hashes[1:] <= hashes[:-1]).any():
                    raise BrokenCheckpointError(
                        f"{self._files.chain[number].path} is broken (the keys of table {self._table!r} are not "
                        "in order)"
                    )
                last = int(hashes[-1])
                ends += _ends(hashes)
        return _Layer(number, files, ends, _ends(mix64(self.others[number].gone.view(np.uint64))))

    def _merge_part(self, layers: "list[_Layer]", begin: int, end: int) -> "_Part":
        """Merge the keys of the parts [begin, end), from the oldest layer on."""
        merged, decays = _Part(_NOTHING, np.zeros(0, np.int64)), 0
        for layer in layers:
            state, gone = self._states[layer.number], self.others[layer.number].gone
            added = self._between(layer.files, *layer.ends[[begin, end]].tolist())
            uses, decays = decayed(merged.columns.uses, state.decay, state.decays - decays), state.decays
            merged = merged._replace(columns=merged.columns._replace(uses=uses))
            merged = _replace(merged, gone[slice(*layer.gone_ends[[begin, end]].tolist())], added)
        return merged

    def _between(self, files: range, first: int, last: int) -> "_Part":
        """Return the keys [first, last) of all keys of these files together, with the places of their rows."""
        columns, places, begin = [_NOTHING], [np.zeros(0, np.int64)], 0
        for file in files:
            keys = self._keys[file]
            end = begin + len(keys.keys)
            if first < end and begin < last:
                start, stop = max(0, first - begin), min(last, end) - begin
                columns.append(keys.at(slice(start, stop)))
                places.append(make_places(file, int(self._before[file]) + start, int(self._before[file]) + stop))
            begin = end
        return _Part(join_columns(columns), np.concatenate(places))


class MergedKeys(NamedTuple):
    """The keys of a chain's table by key, in the order of their hashes, and where the newest version of each row is."""

    columns: KeyColumns  # [K]
    unknown: KeyColumns  # [P], the keys of the out-of-vocabulary rows
    places: LongIds  # [P + K], the places of the out-of-vocabulary rows, and then of the keys' rows
    others: OtherKeys  # the keys that have no row in the newest checkpoint

    def between(self, start: int, stop: int) -> KeyColumns:
        """Return the keys of the rows [start, stop); the out-of-vocabulary rows come first."""
        first = len(self.unknown.keys)
        keys = self.columns.at(slice(max(start, first) - first, max(stop, first) - first))
        return keys if start >= first else join_columns([self.unknown.at(slice(start, min(stop, first))), keys])

    def for_digest(self, state: KeyState) -> KeyArrays:
        """Return the keys for a digest; `state` is the table's entry in the newest manifest."""
        others = self.others
        return KeyArrays(state.step, state.unknown, *self.columns, others.waiting, others.counts, others.sketch)


class _Layer(NamedTuple):
    """Where each part begins and ends in a checkpoint's keys, and in the keys that lost their rows, both by hash."""

    number: int  # 0 for the newest checkpoint
    files: range  # numbers of its files
    ends: LongIds  # [parts + 1], where the keys of each part begin and end
    gone_ends: LongIds  # [parts + 1], the same for the keys that have lost their rows since the parent


class _Part(NamedTuple):
    """Merged keys of a part, and the places of their rows."""

    columns: KeyColumns
    places: LongIds


_NOTHING = KeyColumns(np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.uint32))


def make_places(file: int, start: int, stop: int) -> LongIds:
    """Return the places of the rows [start, stop) of a file."""
    return (file << PLACE_BITS) + np.arange(start, stop)


def _require_keys(chunk: RowChunk) -> KeyColumns:
    assert chunk.keys is not None
    return chunk.keys


def _describe(keys: Keys) -> list[int]:
    """Return the hashes of the first and of the last key, the number of keys, and their address."""
    if not len(keys):
        return [0, 0, 0, 0]
    edges = mix64(keys[[0, -1]].view(np.uint64)).view(np.int64)
    return [int(edges[0]), int(edges[1]), len(keys), int(address_of(keys))]


def _ends(hashes: npt.NDArray[np.uint64]) -> LongIds:
    """Return where each part of ascending hashes begins and ends."""
    starts = np.arange(1 << _PART_BITS, dtype=np.uint64) << np.uint64(64 - _PART_BITS)
    return np.append(np.searchsorted(hashes, starts), len(hashes))


def _replace(merged: _Part, gone: Keys, new: _Part) -> _Part:
    """Return `merged` without the keys `gone`, and with those of `new` added or replaced; all in order of hashes."""
    if not len(merged.places):
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
    return _Part(columns, join(merged.places, new.places))
