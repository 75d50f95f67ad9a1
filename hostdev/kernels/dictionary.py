"""A dictionary that numbers keys in order of first occurrence and counts how often each occurs.

It is made for hundreds of millions of keys: a key with its count takes 16 bytes, and a slot of the hash table takes 4;
at most three quarters of the slots are used. Memory is prefetched for several keys at once, to hide its latency.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Keys
from hostdev.kernels.jit import kernel, prefetch_to_read
from hostdev.kernels.unique import find_slot

BYTES_A_VALUE = 31  # at most: 20 for a key and its count, if a fifth is unused, and 11 for slots, if 3/8 are used
_EMPTY = -1
_LEAST_BITS = 10
_FULL, _OF = 3, 4  # at most 3 of 4 slots are used
_AHEAD = 16  # keys
_MOST_VALUES = 2**31 - 1


@kernel
def _add(keys, uses, start, slots, shift, known, counts, count):
    """Count keys[start:]; stop early at a new key that does not fit.

    Return the index of the first key that was not counted, and the number of distinct keys.
    """
    mask, one, stop = np.uint64(len(slots) - 1), np.uint64(1), np.uint64(len(keys))
    for i in range(np.uint64(start), stop):
        ahead = i + np.uint64(_AHEAD)
        if ahead + np.uint64(_AHEAD) < stop:
            prefetch_to_read(slots, find_slot(keys[ahead + np.uint64(_AHEAD)], shift), 1)
        if ahead < stop:
            position = slots[find_slot(keys[ahead], shift)]
            prefetch_to_read(known, max(position, np.int32(0)), 1)
            prefetch_to_read(counts, max(position, np.int32(0)), 1)
        key = keys[i]
        slot = find_slot(key, shift)
        while True:
            position = np.int64(slots[slot])
            if position < 0:
                if count == len(known):
                    return np.int64(i), count
                slots[slot] = position = count
                known[np.uint64(count)], counts[np.uint64(count)] = key, 0
                count += 1
                break
            if known[np.uint64(position)] == key:
                break
            slot = (slot + one) & mask
        counts[np.uint64(position)] += np.int64(uses[i])
    return np.int64(stop), count


@kernel
def _find(keys, slots, shift, known, positions):
    mask, one, stop = np.uint64(len(slots) - 1), np.uint64(1), np.uint64(len(keys))
    for i in range(stop):
        ahead = i + np.uint64(_AHEAD)
        if ahead + np.uint64(_AHEAD) < stop:
            prefetch_to_read(slots, find_slot(keys[ahead + np.uint64(_AHEAD)], shift), 1)
        if ahead < stop:
            prefetch_to_read(known, max(slots[find_slot(keys[ahead], shift)], np.int32(0)), 1)
        slot = find_slot(keys[i], shift)
        while True:
            position = np.int64(slots[slot])
            if position < 0 or known[np.uint64(position)] == keys[i]:
                positions[i] = position
                break
            slot = (slot + one) & mask


@kernel
def _rebuild(slots, shift, known, count):
    mask, one = np.uint64(len(slots) - 1), np.uint64(1)
    for position in range(np.uint64(count)):
        slot = find_slot(known[position], shift)
        while slots[slot] >= 0:
            slot = (slot + one) & mask
        slots[slot] = position


class Dictionary:
    """A growing map from keys to numbers 0, 1, 2, ... in order of first occurrence, with a count for each key.

    Several threads may call `find` at once.
    """

    def __init__(self) -> None:
        self._shift = 64 - _LEAST_BITS
        self._slots = np.full(1 << _LEAST_BITS, _EMPTY, np.int32)
        room = (1 << _LEAST_BITS) * _FULL // _OF
        self._keys, self._uses = np.empty(room, np.int64), np.empty(room, np.int64)
        self._count = 0

    def __len__(self) -> int:
        """Return the number of distinct keys."""
        return self._count

    @property
    def keys(self) -> Keys:
        """The distinct keys in order of first occurrence, int64 [len(self)]: a view, valid until `count` is called."""
        return self._keys[: self._count]

    @property
    def uses(self) -> Keys:
        """The number of occurrences of each key, int64 [len(self)]: a view, valid until `count` is called."""
        return self._uses[: self._count]

    def count(self, keys: Keys, uses: npt.NDArray[Any]) -> None:
        """Add uses[i] to the count of keys[i] for each i; `keys` is int64 [N]."""
        done = 0
        while True:
            done, self._count = _add(keys, uses, done, self._slots, self._shift, self._keys, self._uses, self._count)
            if done == len(keys):
                return
            self._grow()

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return each key's number, int64 [N]; -1 for an unknown key."""
        positions = np.empty(len(keys), np.int64)
        _find(keys, self._slots, self._shift, self._keys, positions)
        return positions

    def _grow(self) -> None:
        if self._count == _MOST_VALUES:
            raise OverflowError(f"cannot number more than {self._count} distinct values")
        room = min(len(self._slots) * _FULL // _OF, _MOST_VALUES)
        if self._count == room:
            self._shift -= 1
            size = 2 * len(self._slots)
            self._slots = np.empty(0, np.int32)  # free the old slots first
            self._slots = np.full(size, _EMPTY, np.int32)
            _rebuild(self._slots, self._shift, self._keys, self._count)
            room = min(size * _FULL // _OF, _MOST_VALUES)
        size = min(room, self._count + self._count // 4 + 1024)
        for array in (self._keys, self._uses):
            array.resize(size, refcheck=False)  # a large array is moved without a copy
