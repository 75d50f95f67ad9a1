"""The merged keys of a table by key in a checkpoint and its parents.

Keys are merged in parts, by the highest bits of their hashes, so that little memory is needed beside the result.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.files import mapped
from hostdev.checkpoint.folder import Chain, Checkpoint, chain_of_table
from hostdev.checkpoint.keyed import OtherKeys, keys_of, read_others
from hostdev.checkpoint.manifest import BrokenCheckpointError, KeyState, Table
from hostdev.checkpoint.ranges import parse_range
from hostdev.core.keys import KeyArrays, KeyColumns, decayed, join_columns
from hostdev.kernels.buffers import reserved
from hostdev.kernels.counter import mix64

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
