"""A column of a table in a checkpoint, for lookups, wherever the rows are.

The files are mapped into memory, which processes share. A file's keys are in the order of their hashes, which are
spread evenly. So a key's position is estimated from its hash (interpolation search), and found by a binary search
nearby; no directory is built when a checkpoint is opened.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.folder import Chain, chain_of_table, mapped
from hostdev.checkpoint.keyed import keys_of, read_others
from hostdev.checkpoint.manifest import BrokenCheckpointError, Table
from hostdev.checkpoint.ranges import LOCATION, SPREAD, WEIGHTS, get_column, get_width, parse_range, require_covered
from hostdev.checkpoint.segment_rows import SegmentRows
from hostdev.core.checks import checked_ids, to_keys
from hostdev.core.errors import UserError
from hostdev.core.initializers import from_text
from hostdev.core.keys import INITIAL, SHARED
from hostdev.core.optimizer_base import LAST
from hostdev.core.rounding import rounding_key
from hostdev.core.table_dtypes import BF16
from hostdev.kernels.arrays import AnyIds, Keys, LongIds, Rows, identity
from hostdev.kernels.bfloat16 import round_rows
from hostdev.kernels.counter import hashed, mix64
from hostdev.kernels.jit import address_of, array_at, inline, kernel
from hostdev.kernels.plane_formats import BFLOAT16
from hostdev.kernels.pool import get_grain, parallel_for
from hostdev.kernels.shards import get_positions

_FEW = 512  # rows; for up to this many, waking other threads costs more than it saves


@kernel
def _copy_rows(start: Any, stop: Any, ids: Any, layers: Any, files: Any, out: Any) -> None:
    """Copy the newest version of the rows ids[start:stop] to out[start:stop].

    Args:
        start: The first index.
        stop: The end of the indices.
        ids: int32 or int64 [N].
        layers: int64 [L + 1]; the files of the l-th newest checkpoint are files[layers[l] : layers[l + 1]].
        files: int64 [F, 5]; for each file: first row, end, number of rows, address of their ids (0: all rows), address
            of their values.
        out: Output, float32 [N, D].
    """
    D = out.shape[1]
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
            weights, to = array_at(files[low, 4] + at * D * 4, D, np.float32), out[i]
            for j in range(D):
                to[j] = weights[j]
            break


class MappedTable:
    """A column of a table, weights or optimizer state, float32 [rows, dim]. Several threads may call `lookup`.

    Args:
        chain: A full checkpoint and its increments, from `read_chain`.
        name: The table.
        column: "weights", the name of a state column, or "location".
    """

    is_by_key = False

    def __init__(self, chain: Chain, name: str, column: str = WEIGHTS) -> None:
        about, chain = chain[-1].manifest.table(name), chain_of_table(chain, name)
        self.name, self.rows = name, about.rows
        self.dim = get_width(about, column)
        self._spread = about.order == SPREAD
        require_covered(chain, name)
        for checkpoint in chain:
            table = checkpoint.manifest.table(name)
            if (table.dim, table.order) != (about.dim, about.order) or table.rows > about.rows:
                raise BrokenCheckpointError(
                    f"{checkpoint.path} is broken (table {name!r} differs in shape or row order from {chain[-1].path})"
                )
        self._held: list[Any] = []  # keeps alive the memory that `_files` points into
        found: list[list[int]] = []
        layers = [0]
        for checkpoint in reversed(chain):
            table = checkpoint.manifest.table(name)
            for file in sorted(table.files, key=lambda file: file.start):
                path = checkpoint.path / file.file
                rows = parse_range(path, mapped(path), table, file)
                weights = get_column(rows, column)
                self._held += [weights, rows.ids]
                ids = 0 if rows.ids is None else int(address_of(rows.ids))
                found.append([file.start, file.stop, len(rows), ids, int(address_of(weights))])
            layers.append(len(found))
        self._files, self._layers = np.array(found, np.int64).reshape(-1, 5), np.array(layers, np.int64)

    def lookup(self, ids: AnyIds) -> Rows:
        """Return a copy, float32 [N, D], of rows `ids`, int32 or int64 [N]; raise the errors of `HostTable.lookup`."""
        ids = checked_ids(ids, self.rows, self.name)
        out = np.empty((len(ids), self.dim), np.float32)
        if self._spread:
            ids = get_positions(ids, self.rows)
        if len(ids) <= _FEW:
            _copy_rows(0, len(ids), ids, self._layers, self._files, out)
        else:
            parallel_for(_copy_rows, len(ids), ids, self._layers, self._files, out, grain=get_grain(4 * self.dim))
        return out


@inline
def _find(keys: Any, found: Any, first: Any, last: Any) -> Any:
    """Return the position of the key with a hash among keys in the order of hashes, or -1.

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
def _copy_keyed(
    start: Any, stop: Any, keys: Any, layers: Any, files: Any, gone: Any, unknown: Any, turns: Any, out: Any
) -> None:
    """Copy the newest version of the rows of keys[start:stop], or an out-of-vocabulary row, to out[start:stop].

    Args:
        start: The first index.
        stop: The end of the indices.
        keys: int64 [N].
        layers: int64 [L + 1]; the files of the l-th newest checkpoint are files[layers[l] : layers[l + 1]].
        files: int64 [F, 5]; for each file: the hashes of its first and of its last key, the number of its keys, the
            addresses of the keys and of their values.
        gone: int64 [L, 4]; for each checkpoint, the same without values of the keys that are gone since its parent.
        unknown: float32 [any, D], the out-of-vocabulary rows.
        turns: int64 [T], the out-of-vocabulary rows that keys without a row get in turn.
        out: Output, float32 [N, D].
    """
    D = out.shape[1]
    for i in range(np.uint64(start), np.uint64(stop)):
        found = hashed(0, keys[i])
        to = out[i]
        to[:] = unknown[turns[i % np.uint64(len(turns))]]
        for layer in range(len(layers) - 1):
            low, high = layers[layer], layers[layer + 1]
            while high - low > 1:  # find the last file that begins at or before the hash
                middle = (low + high) // 2
                if np.uint64(files[middle, 0]) <= found:
                    low = middle
                else:
                    high = middle
            at = np.int64(-1)
            if low < high:
                file = files[low]
                at = _find(array_at(file[3], file[2], np.int64), found, np.uint64(file[0]), np.uint64(file[1]))
            if at >= 0:
                values = array_at(files[low, 4] + at * D * 4, D, np.float32)
                for j in range(D):
                    to[j] = values[j]
                break
            lost = gone[layer]
            if lost[2] > 0:
                dead = array_at(lost[3], lost[2], np.int64)
                if _find(dead, found, np.uint64(lost[0]), np.uint64(lost[1])) >= 0:
                    break


class MappedKeys:
    """A column of a table by key, weights or optimizer state, float32 [keys, dim]. Several threads may call `lookup`.

    Args:
        chain: A full checkpoint and its increments, from `read_chain`.
        name: The table.
        column: "weights", the name of a state column, or "location", which is 0 for keys without a row that read
            their initial values.
    """

    is_by_key = True

    def __init__(self, chain: Chain, name: str, column: str = WEIGHTS) -> None:
        about, chain = chain[-1].manifest.table(name), chain_of_table(chain, name)
        state = keys_of(about)
        self.name, self.rows, self.unknown = name, state.count, state.unknown
        self.dim = get_width(about, column)
        self._shares = state.unknown_values == SHARED
        self._initial = get_initial_values(about, column) if state.unknown_values == INITIAL else None
        self._held: list[Any] = []  # keeps alive the memory that the addresses point into
        self._unknown = np.empty((len(state.unknown), self.dim), np.float32)
        found: list[list[int]] = []
        gone, layers = [], [0]
        for checkpoint in reversed(chain):
            table = checkpoint.manifest.table(name)
            own = keys_of(table)
            if table.dim != about.dim:
                raise BrokenCheckpointError(
                    f"{checkpoint.path} is broken (table {name!r} differs in shape from {chain[-1].path})"
                )
            for file in sorted(table.files, key=lambda file: file.start):
                path = checkpoint.path / file.file
                rows = parse_range(path, mapped(path), table, file)
                assert rows.keys is not None
                values = get_column(rows, column)
                first = max(0, min(len(rows), len(own.unknown) - file.start))
                if checkpoint is chain[-1]:
                    self._unknown[file.start : file.start + first] = values[:first].reshape(first, self.dim)
                if first < len(rows):
                    found.append([*self._describe(rows.keys.keys[first:]), int(address_of(values[first:]))])
                    self._held.append(values)
            layers.append(len(found))
            gone.append(self._describe(read_others(checkpoint, own).gone))
        if self._initial is not None:
            self._unknown = np.full((1, self.dim), np.nan, np.float32)  # no row has such values
            if column == LOCATION:
                self._unknown, self._initial = np.zeros((1, self.dim), np.float32), None
        self._files = np.array(found, np.int64).reshape(-1, 5)
        self._layers, self._gone = np.array(layers, np.int64), np.array(gone, np.int64)

    def _describe(self, keys: Keys) -> list[int]:
        """Return the hashes of the first and of the last key, the number of keys, and their address."""
        if not len(keys):
            return [0, 0, 0, 0]
        self._held.append(keys)
        edges = mix64(keys[[0, -1]].view(np.uint64)).view(np.int64)
        return [int(edges[0]), int(edges[1]), len(keys), int(address_of(keys))]

    def lookup(self, ids: npt.ArrayLike, unknown: str | Sequence[str] = "") -> Rows:
        """Return a copy, float32 [N, D], of the rows of keys [N].

        Args:
            ids: Keys, integers of 64 bits [N].
            unknown: Name of the out-of-vocabulary row, which is returned for keys without a row; or names of several,
                which keys use in turn, as columns of ids [B, k] do. It has no effect if such keys read zeros or their
                own initial values.

        Raises:
            TypeError, ValueError: The keys are not integers, or have a wrong shape.
            UserError: There is no out-of-vocabulary row of this name.
        """
        keys = to_keys(ids, f"table {self.name!r}: keys")
        if keys.ndim != 1:
            raise ValueError(f"table {self.name!r}: keys must have the shape [N], not {list(keys.shape)}")
        names = [unknown] if isinstance(unknown, str) else list(unknown)
        names = names if self._shares else [""]
        for name in names:
            if name not in self.unknown:
                raise UserError(
                    f"table {self.name!r} has no out-of-vocabulary row {name!r}; it has "
                    f"{', '.join(map(repr, self.unknown))}"
                )
        out = np.empty((len(keys), self.dim), np.float32)
        turns = np.array([self.unknown.index(name) for name in names], np.int64)
        args = keys, self._layers, self._files, self._gone, self._unknown, turns, out
        if len(keys) <= _FEW:
            _copy_keyed(0, len(keys), *args)
        else:
            parallel_for(_copy_keyed, len(keys), *args, grain=get_grain(4 * self.dim))
        if self._initial is not None and len(missing := np.flatnonzero(np.isnan(out[:, 0]))):
            out[missing] = self._initial(keys[missing])
        return out


def get_initial_values(table: Table, column: str) -> Callable[[Keys], Rows]:
    """Return a function that returns what keys [N] without a row have in a column, float32 [N, dim]."""
    state, seed = keys_of(table), table.seed
    assert seed is not None
    if column == WEIGHTS:
        init = from_text(state.init)

        def weights(keys: Keys) -> Rows:
            block = np.empty((len(keys), 1, table.dim), np.float32)
            init.fill(block, seed, table.name, np.empty(0, np.float32), ids=keys)
            if table.dtype == BF16:
                round_rows(block, identity(len(keys)), keys, rounding_key(seed, table.name, 0), (BFLOAT16,))
            return block[:, 0]

        return weights
    value = table.step if column == LAST else 0
    return lambda keys: np.full((len(keys), table.dim if column in table.slots else 1), value, np.float32)


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
