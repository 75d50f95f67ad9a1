"""Maps of ids to dense positions in order of first occurrence, to deduplicate a batch or count a vocabulary.

If the largest id of a batch is less than twice the number of ids, the map is an array indexed by id. Otherwise it is an
open-addressing hash table with linear probing, whose cost depends on the number of distinct ids, not on the embedding
table's size. Both maps assign the same positions.
"""

import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Ids, Positions, aligned_empty, scratch
from hostdev.kernels.hash_table import find_slot
from hostdev.kernels.jit import kernel, prefetch_to_write
from hostdev.kernels.pool import Task, host_threads, run_tasks, tasks_over

_EMPTY = -1
_AHEAD = 32  # prefetch distance in ids
_SPARE_BITS = 1  # the table is at most half full
_FEW = 32  # slots per key; with more, emptying only the keys' slots is faster
_MAX_DISTINCT = 2**31  # positions are int32
_MOST_PARTS = 4  # parts of a batch that are deduplicated in parallel; more parts add serial work
_SMALLEST_PART = 1 << 15
_COUNTED_PART = 1 << 17  # the minimum occurrences per part when counting in parallel
_DIRECT_UP_TO = 2  # if all ids are below this multiple of their number, an array fits the cache
_maps = threading.local()  # reused, since the next batch has about as many distinct ids


@kernel
def _add(ids, start, entries, shift, keys, count, positions):
    """Insert ids[start:]; stop early at a new id if `keys` is full.

    Return the index of the first id that was not processed, and the number of keys.
    """
    mask, one, stop = np.uint64(len(entries) - 1), np.uint64(1), np.uint64(len(ids))
    for i in range(np.uint64(start), stop):
        if i + np.uint64(_AHEAD) < stop:
            prefetch_to_write(entries, find_slot(ids[i + np.uint64(_AHEAD)], shift), entries.strides[0])
        key = ids[i]
        slot = find_slot(key, shift)
        while True:
            position = np.int32(entries[slot, 1])
            if position < 0:
                if count == len(keys):
                    return np.int64(i), count
                entries[slot, 0], entries[slot, 1] = key, count
                keys[np.uint64(count)] = key
                positions[i] = count
                count += 1
                break
            if entries[slot, 0] == key:
                positions[i] = position
                break
            slot = (slot + one) & mask
    return len(ids), count


@kernel
def _find(ids, entries, shift, positions):
    mask, one = np.uint64(len(entries) - 1), np.uint64(1)
    for i in range(len(ids)):
        slot = find_slot(ids[i], shift)
        while True:
            position = np.int32(entries[slot, 1])
            if position < 0 or entries[slot, 0] == ids[i]:
                positions[i] = position
                break
            slot = (slot + one) & mask


@kernel
def _forget(entries, shift, keys, count):
    """Empty the slots of all keys, the last key first, since only earlier keys have displaced a key from its slot."""
    mask, one = np.uint64(len(entries) - 1), np.uint64(1)
    for i in range(np.uint64(count)):
        key = keys[np.uint64(count) - one - i]
        slot = find_slot(key, shift)
        while entries[slot, 1] < 0 or entries[slot, 0] != key:
            slot = (slot + one) & mask
        entries[slot, 0], entries[slot, 1] = _EMPTY, _EMPTY


def _entries(n: int, dtype: npt.DTypeLike) -> Ids:
    """Return n empty slots, [n, 2]. A slot has an id and its position, side by side in a cache line; -1 means empty."""
    entries: npt.NDArray[Any] = aligned_empty((n, 2), dtype)
    entries.fill(_EMPTY)
    return entries


class IdMap:
    """A growing map from distinct ids to positions 0, 1, 2, ... in order of first occurrence.

    Args:
        dtype: Dtype of the ids.
        expected: Expected number of distinct ids; more are allowed.
    """

    def __init__(self, dtype: npt.DTypeLike = np.int64, *, expected: int = 0) -> None:
        bits = max(10, int(expected).bit_length() + _SPARE_BITS)
        self._shift = 64 - bits
        self._entries = _entries(1 << bits, dtype)
        self._keys = np.empty(1 << (bits - _SPARE_BITS), dtype)
        self._count = 0

    def __len__(self) -> int:
        """Return the number of distinct ids seen."""
        return self._count

    @property
    def ids(self) -> Ids:
        """The distinct ids in order of first occurrence, [len(self)]: a view, valid until `add` is called."""
        return self._keys[: self._count]

    def clear(self) -> None:
        """Remove all ids, but keep the memory."""
        if self._count * _FEW < len(self._entries):
            _forget(self._entries, self._shift, self._keys, self._count)
        else:
            self._entries.fill(_EMPTY)
        self._count = 0

    def add(self, ids: Ids, positions: Positions | None = None) -> Positions:
        """Return each id's position, int32 [N]; a new id gets the next free position.

        Args:
            ids: [N].
            positions: int32 [N], written and returned, or None for a new array.
        """
        if positions is None:
            positions = np.empty(len(ids), np.int32)
        done = 0
        while True:
            done, self._count = _add(ids, done, self._entries, self._shift, self._keys, self._count, positions)
            if done == len(ids):
                return positions
            self._grow()

    def find(self, ids: Ids) -> Positions:
        """Return each id's position, int32 [N]; -1 for an unknown id."""
        positions = np.empty(len(ids), np.int32)
        _find(ids, self._entries, self._shift, positions)
        return positions

    def _grow(self) -> None:
        if self._count > _MAX_DISTINCT // 4:
            raise OverflowError(f"cannot number more than {self._count} distinct ids")
        ids, size = self.ids, 4 * len(self._entries)
        self._entries, self._count = _entries(size, ids.dtype), 0
        self._keys, self._shift = np.empty(size >> _SPARE_BITS, ids.dtype), self._shift - 2
        self.add(ids)


@kernel
def id_range(ids):
    """Return the minimum and the maximum of the ids [N] and of 0."""
    low = high = ids.dtype.type(0)
    for i in range(np.uint64(0), np.uint64(len(ids))):
        low, high = min(low, ids[i]), max(high, ids[i])
    return low, high


@kernel
def add_direct(ids, places, keys, count, positions):
    """Insert ids as `IdMap.add` does, but without branches, which would be hard to predict.

    Return the number of keys.
    """
    for i in range(np.uint64(0), np.uint64(len(ids))):
        key, next_key = np.uint64(ids[i]), np.uint64(count)
        place = places[key]
        new = place < 0
        place = np.int32(count) if new else place
        places[key] = positions[i] = place
        keys[next_key] = ids[i]  # a known id is overwritten by the next one
        count += np.int64(new)
    return count


class DirectMap:
    """A map like `IdMap` for ids in a small range: an array with a position for every possible id."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._places = np.empty(0, np.int32)
        self._keys = np.empty(1, dtype)
        self._count = 0

    @property
    def ids(self) -> Ids:
        """The distinct ids in order of first occurrence: a view, valid until `add` is called."""
        return self._keys[: self._count]

    def clear(self, limit: int) -> None:
        """Remove all ids; all ids that are added afterwards must be below `limit`."""
        if len(self._places) < limit:
            self._places = np.empty(limit + limit // 4, np.int32)
            self._keys = np.empty(len(self._places) + 1, self._keys.dtype)
        self._places[:limit].fill(_EMPTY)
        self._count = 0

    def add(self, ids: Ids, positions: Positions | None = None) -> Positions:
        """Add ids as `IdMap.add` does."""
        if positions is None:
            positions = np.empty(len(ids), np.int32)
        self._count = int(add_direct(ids, self._places, self._keys, self._count, positions))
        return positions


def check_ids(ids: npt.ArrayLike) -> Ids:
    """Return ids as an array; raise TypeError unless they are int32 or int64, ValueError unless 1-dimensional."""
    array = np.asarray(ids)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # numpy makes an empty list float64
    if array.dtype not in (np.int32, np.int64):
        raise TypeError(f"ids must be int32 or int64, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"ids must have one dimension, not {array.ndim}")
    return array


def unique(ids: npt.ArrayLike) -> tuple[Ids, Positions]:
    """Deduplicate the ids of a batch.

    Args:
        ids: int32 or int64 [N].

    Returns:
        The unique ids [U], of the same dtype, in order of first occurrence; and the position of each id among the
        unique ids, int32 [N].

    Raises:
        TypeError, ValueError: The ids have a wrong dtype or shape.
    """
    ids = np.ascontiguousarray(check_ids(ids))
    inverse = np.empty(len(ids), np.int32)
    return unique_into(ids, inverse).copy(), inverse


def unique_into(ids: Ids, inverse: Positions) -> npt.NDArray[Any]:
    """Deduplicate as `unique` does, but in reused memory; the returned ids are valid until this thread's next call.

    Args:
        ids: int32 or int64 [N], C-contiguous.
        inverse: int32 [N], written: the position of each id among the unique ids.
    """
    work = Dedupe([ids], inverse)
    run_tasks(work.tasks())
    work.merge()
    run_tasks(work.renumber_tasks())
    return work.ids


class Dedupe:
    """Deduplication of a sequence of ids, in tasks that can run together with the tasks of other sequences.

    Parts of the sequence are deduplicated in parallel (`tasks`). Then the unique ids of each part are added, in order,
    to those of the earlier parts (`merge`). Finally, positions are renumbered as a single pass would have numbered them
    (`renumber_tasks`).

    Args:
        features: The ids, in one or more consecutive arrays: int32 or int64, of one dtype, C-contiguous.
        inverse: int32 [N], written: the position of each id in the unique ids.
        number: A number, from 0, that must differ between the sequences that this thread deduplicates at the same time:
            the next sequence with the same number reuses the memory.
    """

    def __init__(self, features: Sequence[npt.NDArray[Any]], inverse: Positions, number: int = 0) -> None:
        N, dtype = len(inverse), features[0].dtype
        lows, highs = zip(*map(id_range, features), strict=True)
        parts = max(1, min(host_threads(), _MOST_PARTS, N // _SMALLEST_PART))
        self._maps: list[Any]
        self._limit: tuple[int, ...] = ()
        if min(lows) >= 0 and max(highs) < _DIRECT_UP_TO * N:  # one array is faster than two hash tables
            self._limit = (int(max(highs)) + 1,)
            self._maps = _get_maps(DirectMap, dtype, number + 1)[number:][:1]
        else:
            self._maps = _get_maps(IdMap, dtype, (number + 1) * _MOST_PARTS)[number * _MOST_PARTS :][:parts]
        self._features, self._inverse = features, inverse
        self._edges = [N * i // len(self._maps) for i in range(len(self._maps) + 1)]
        self._numbers: list[Positions] = []

    def tasks(self) -> list[Task]:
        """Return the tasks that deduplicate the parts; run them first."""
        return [(self._add, a, b, (seen,)) for seen, (a, b) in zip(self._maps, pairwise(self._edges), strict=True)]

    def merge(self) -> None:
        """Merge the unique ids of all parts; call this when the tasks from `tasks` have run."""
        self._numbers = [self._maps[0].add(seen.ids) for seen in self._maps[1:]]

    def renumber_tasks(self) -> list[Task]:
        """Return the tasks that renumber the positions; call `merge` before, and run these tasks last."""
        tasks: list[Task] = []
        for (start, stop), number in zip(pairwise(self._edges[1:]), self._numbers, strict=True):
            tasks += tasks_over(renumber, stop - start, self._inverse[start:stop], number, grain=_SMALLEST_PART)
        return tasks

    @property
    def ids(self) -> Ids:
        """The unique ids [U], once `merge` has run: a view, valid until this thread's next `Dedupe` of this number."""
        ids: Ids = self._maps[0].ids
        return ids

    def _add(self, start: int, stop: int, seen: Any) -> None:
        """Deduplicate the ids at [start, stop) with the map `seen`."""
        seen.clear(*self._limit)
        ends = [0, *accumulate(map(len, self._features))]
        for ids, (begin, end) in zip(self._features, pairwise(ends), strict=True):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                seen.add(ids[first - begin : last - begin], self._inverse[first:last])


def id_map(ids: Ids) -> "IdMap | DirectMap":
    """Return an empty map for `ids`, int32 or int64 [N]; this thread's next call reuses its memory."""
    low, high = map(int, id_range(ids))
    if low >= 0 and high < _DIRECT_UP_TO * len(ids):
        direct: DirectMap = _get_maps(DirectMap, ids.dtype, 1)[0]
        direct.clear(high + 1)
        return direct
    hashed: IdMap = _get_maps(IdMap, ids.dtype, 1)[0]
    hashed.clear()
    return hashed


def _get_maps(kind: Any, dtype: np.dtype[Any], n: int) -> list[Any]:
    """Return this thread's maps of a class and dtype, at least n; create any that are missing."""
    maps: list[Any] = _maps.__dict__.setdefault(f"{kind.__name__} {dtype.char}", [])
    while len(maps) < n:
        maps.append(kind(dtype))
    return maps


@kernel
def renumber(start, stop, values, numbers):
    """Replace each of values[start:stop] by numbers[value]."""
    for i in range(np.uint64(start), np.uint64(stop)):
        values[i] = numbers[np.uint64(values[i])]


@kernel
def tally(positions, counts):
    """Count in place: counts[p] += 1 for each position p.

    Args:
        positions: int32 [N].
        counts: int32 or int64 [at least the largest position + 1].
    """
    for i in range(np.uint64(0), np.uint64(len(positions))):
        counts[np.uint64(positions[i])] += 1


def count_occurrences(inverse: Positions, unique: int) -> Positions:
    """Return how often each unique id occurs, int32 [unique].

    Args:
        inverse: int32 [N], the position of each id among the unique ids, as returned by `unique()`.
        unique: The number of unique ids.
    """
    parts = max(1, min(host_threads(), _MOST_PARTS, len(inverse) // _COUNTED_PART))
    counts = scratch("counts", (parts, unique), np.int32)
    edges = [len(inverse) * i // parts for i in range(parts + 1)]
    run_tasks([(_count_part, a, b, (inverse, part)) for part, (a, b) in zip(counts, pairwise(edges), strict=True)])
    total: Positions = counts[0].copy()
    for part in counts[1:]:  # faster than a sum over the first axis
        total += part
    return total


def _count_part(start: int, stop: int, inverse: Positions, counts: Positions) -> None:
    counts.fill(0)
    tally(inverse[start:stop], counts)
