"""Ids to dense positions in order of first occurrence: the dedupe of a batch and the vocabulary's counting.

An open-addressing hash table with linear probing; its cost depends on the number of distinct ids and not on the
size of the embedding table, and its order on the ids alone.
"""

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import inline, kernel, prefetch_to_write
from hostdev.kernels.pool import host_threads, parallel_for, run_tasks

Positions = npt.NDArray[np.int32]

_EMPTY = np.int32(-1)
_AHEAD = 16  # ids
_SPARE_BITS = 2  # the table is at most a quarter full: long probes cost more than a larger table
_MAX_DISTINCT = 2**31  # positions are int32
_MOST_PARTS = 4  # of a batch, deduplicated at once; the rest is serial, and more parts make more of it
_SMALLEST_PART = 1 << 15
_maps = threading.local()  # of `unique`: a batch has about as many distinct ids as the one before


@inline
def _slot(key: Any, shift: Any) -> Any:
    # Fibonacci hashing (Knuth, TAOCP vol. 3, section 6.4): the high bits of a product are well spread.
    return (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(shift)


@kernel
def _add(ids: Any, start: Any, slots: Any, shift: Any, keys: Any, count: Any, positions: Any) -> Any:
    """Insert ids[start:]; stop early where the keys are full. Returns (next id to insert, number of keys)."""
    mask, one = np.uint64(len(slots) - 1), np.uint64(1)
    for i in range(np.uint64(start), np.uint64(len(ids))):
        if i + np.uint64(_AHEAD) < np.uint64(len(ids)):
            prefetch_to_write(slots, _slot(ids[i + np.uint64(_AHEAD)], shift), 4)
        key = ids[i]
        slot = _slot(key, shift)
        while True:
            position = slots[slot]
            if position < 0:
                if count == len(keys):
                    return np.int64(i), count
                slots[slot] = count
                keys[np.uint64(count)] = key
                positions[i] = count
                count += 1
                break
            if keys[np.uint64(position)] == key:
                positions[i] = position
                break
            slot = (slot + one) & mask
    return len(ids), count


@kernel
def _rehash(slots: Any, shift: Any, keys: Any, count: Any) -> None:
    mask, one = np.uint64(len(slots) - 1), np.uint64(1)
    for position in range(count):
        slot = _slot(keys[position], shift)
        while slots[slot] >= 0:
            slot = (slot + one) & mask
        slots[slot] = position


@kernel
def _find(ids: Any, slots: Any, shift: Any, keys: Any, positions: Any) -> None:
    mask, one = np.uint64(len(slots) - 1), np.uint64(1)
    for i in range(len(ids)):
        slot = _slot(ids[i], shift)
        while True:
            position = slots[slot]
            if position < 0 or keys[np.uint64(position)] == ids[i]:
                positions[i] = position
                break
            slot = (slot + one) & mask


class IdMap:
    """Grows with the distinct ids that it has seen, numbered 0, 1, 2, ... in order of first occurrence.

    dtype     of the ids
    expected  how many distinct ids are expected; more are welcome
    """

    def __init__(self, dtype: npt.DTypeLike = np.int64, *, expected: int = 0) -> None:
        bits = max(10, int(expected).bit_length() + _SPARE_BITS)
        self._shift = 64 - bits
        self._slots = np.full(1 << bits, _EMPTY, np.int32)
        self._keys = np.empty(1 << (bits - _SPARE_BITS), dtype)
        self._count = 0

    def __len__(self) -> int:
        """Return the number of distinct ids seen."""
        return self._count

    @property
    def ids(self) -> npt.NDArray[Any]:
        """The distinct ids in order of first occurrence, [len(self)]; a view until the next `add`."""
        return self._keys[: self._count]

    def clear(self) -> None:
        """Forget all ids; the memory stays."""
        self._slots.fill(_EMPTY)
        self._count = 0

    def add(self, ids: npt.NDArray[Any], positions: Positions | None = None) -> Positions:
        """Return each id's position, int32 [N]; an id not seen before gets the next one.

        positions  int32 [N] to write into; a new array if None
        """
        if positions is None:
            positions = np.empty(len(ids), np.int32)
        done = 0
        while True:
            done, self._count = _add(ids, done, self._slots, self._shift, self._keys, self._count, positions)
            if done == len(ids):
                return positions
            self._grow()

    def find(self, ids: npt.NDArray[Any]) -> Positions:
        """Return each id's position, int32 [N]; -1 for an id that was never added."""
        positions = np.empty(len(ids), np.int32)
        _find(ids, self._slots, self._shift, self._keys, positions)
        return positions

    def _grow(self) -> None:
        if self._count > _MAX_DISTINCT // 4:
            raise OverflowError(f"more than {self._count} distinct ids in one map")
        self._shift -= 2
        self._slots = np.full(len(self._slots) * 4, _EMPTY, np.int32)
        keys = np.empty(len(self._slots) >> _SPARE_BITS, self._keys.dtype)
        keys[: self._count] = self.ids
        self._keys = keys
        _rehash(self._slots, self._shift, self._keys, self._count)


def check_ids(ids: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return ids as an array; TypeError or ValueError unless it is int32 or int64 with one dimension."""
    array = np.asarray(ids)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # numpy's dtype for an empty list
    if array.dtype not in (np.int32, np.int64):
        raise TypeError(f"ids must be int32 or int64, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"ids must have one dimension, not {array.ndim}")
    return array


def unique(ids: npt.ArrayLike) -> tuple[npt.NDArray[Any], Positions]:
    """Deduplicate the ids of a batch.

    ids      int32 or int64 [N]
    returns  unique ids [U] of the same dtype, in order of first occurrence, and inverse int32 [N] with
             ids == unique[inverse]

    Raises TypeError or ValueError for a wrong dtype or shape.
    """
    ids = np.ascontiguousarray(check_ids(ids))
    inverse = np.empty(len(ids), np.int32)
    return unique_into(ids, inverse).copy(), inverse


def unique_into(ids: npt.NDArray[Any], inverse: Positions) -> npt.NDArray[Any]:
    """Deduplicate as `unique`, without new memory: write `inverse`, return a view until this thread's next call.

    Parts of the batch are deduplicated at once, each by itself; then the ids of each part are added to those of the
    parts before it, in order, which numbers them as one pass would.

    ids  int32 or int64 [N], C-contiguous
    """
    parts = max(1, min(host_threads(), _MOST_PARTS, len(ids) // _SMALLEST_PART))
    by_dtype: dict[np.dtype[Any], list[IdMap]] = _maps.__dict__.setdefault("by_dtype", {})
    maps = by_dtype.setdefault(ids.dtype, [])
    while len(maps) < parts:
        maps.append(IdMap(ids.dtype, expected=1 << 14))
    edges = [len(ids) * i // parts for i in range(parts + 1)]
    run_tasks([(_unique_part, a, b, (ids, inverse, seen)) for seen, (a, b) in zip(maps, pairwise(edges), strict=False)])
    for part in range(1, parts):
        start, stop = edges[part : part + 2]
        number = maps[0].add(maps[part].ids)
        parallel_for(_renumber, stop - start, inverse[start:stop], number, grain=_SMALLEST_PART)
    return maps[0].ids


def _unique_part(start: int, stop: int, ids: npt.NDArray[Any], inverse: Positions, seen: IdMap) -> None:
    seen.clear()
    seen.add(ids[start:stop], inverse[start:stop])


@kernel
def _renumber(start: Any, stop: Any, inverse: Any, number: Any) -> None:
    for i in range(np.uint64(start), np.uint64(stop)):
        inverse[i] = number[np.uint64(inverse[i])]


@kernel
def tally(positions: Any, counts: Any) -> None:
    """Count uses in place: counts[p] += 1 for each position p.

    positions  int32 [N]
    counts     int64 [at least the largest position + 1]
    """
    for i in range(len(positions)):
        counts[positions[i]] += 1
