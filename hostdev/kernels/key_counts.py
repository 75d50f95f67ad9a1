"""Counts of 64-bit keys, for keys that do not have a row yet: 16 bytes an entry, in the memory of a `KeyDirectory`.

An entry's value is the number of the last step that used the key, and the key's uses: step * 2^24 + count.
"""

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Keys
from hostdev.kernels.jit import array_at, kernel
from hostdev.kernels.key_directory import (
    AHEAD,
    COUNT,
    EMPTY,
    MOST_ROWS,
    PARTS,
    SLOTS,
    KeyDirectory,
    find_begin,
    find_entry,
    first_entry,
    last_entry,
    look_ahead,
)

_COUNT_BITS = 24
MOST_USES = (1 << _COUNT_BITS) - 1
_MOST_STEPS = (1 << 32) - 1

Values = npt.NDArray[np.int64]


@kernel
def _add(keys, uses, step, oldest, start, parts, totals, before):
    """Count keys[start:], which are distinct; return the index of the first new key that does not fit, or N."""
    ring, owners = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.uint64)
    begin, end, ahead = np.uint64(start), np.uint64(len(keys)), np.uint64(AHEAD)
    for i in range(begin, min(begin + ahead, end)):
        look_ahead(keys, i, parts, ring, owners)
    for i in range(begin, end):
        address, part = ring[i & np.uint64(AHEAD - 1)], owners[i & np.uint64(AHEAD - 1)]
        if i + ahead < end:
            look_ahead(keys, i + ahead, parts, ring, owners)
        address = find_entry(address, keys[i])
        if address >= last_entry(parts, part):
            return np.int64(i)
        entry = array_at(address, 2, np.int64)
        before[i], count = entry[1], np.int64(0)
        if entry[1] < 0:
            entry[0] = keys[i]
            parts[part, np.uint64(COUNT)] += 1
        elif entry[1] >> np.int64(_COUNT_BITS) >= np.int64(oldest):
            count = entry[1] & np.int64(MOST_USES)
        totals[i] = min(count + np.int64(uses[i]), np.int64(MOST_USES))
        entry[1] = (np.int64(step) << np.int64(_COUNT_BITS)) | totals[i]
    return len(keys)


@kernel
def _set(keys, values, parts):
    """Replace the values of keys that are in the directory."""
    for i in range(np.uint64(0), np.uint64(len(keys))):
        entry = array_at(find_entry(find_begin(parts, keys[i])[1], keys[i]), 2, np.int64)
        entry[1] = values[i]


@kernel
def _collect(parts, step, keys, values):
    """Write the keys, and their values, that no step from `step` on has used; return their number.

    If `keys` is shorter than this number, only the first ones are written.
    """
    found, limit = np.uint64(0), np.int64(step) << np.int64(_COUNT_BITS)
    for part in range(np.uint64(0), np.uint64(PARTS)):
        slots = np.uint64(parts[part, np.uint64(SLOTS)])
        entries = array_at(first_entry(parts, part), 2 * MOST_ROWS, np.int64)
        for slot in range(np.uint64(0), slots):
            value = entries[np.uint64(2) * slot + np.uint64(1)]
            if 0 <= value < limit:
                if found < np.uint64(len(keys)):
                    keys[found], values[found] = entries[np.uint64(2) * slot], value
                found += np.uint64(1)
    return np.int64(found)


class KeyCounts(KeyDirectory):
    """Counts the uses of keys, and remembers the last step that used each key."""

    def add(self, keys: Keys, uses: npt.NDArray[np.int32], step: int, oldest: int = 0) -> tuple[Values, Values]:
        """Add a step's uses of distinct keys [N]; return their total uses, at most MOST_USES, and their former values.

        Both are int64 [N]. The former value of a new key is EMPTY. Uses are forgotten of a key that no step from
        `oldest` on has used.
        """
        totals, before = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
        self.reserve(keys)
        done = 0
        while (done := int(_add(keys, uses, step, oldest, done, self.parts, totals, before))) < len(keys):
            self.add_spare(keys[done])
        return totals, before

    def restore(self, keys: Keys, values: Values) -> None:
        """Give keys [N] their former values [N]; keys with the value EMPTY are erased."""
        known = self.find_values(keys) != EMPTY
        gone = values == EMPTY
        self.erase(keys[known & gone])
        _set(keys[known & ~gone], values[known & ~gone], self.parts)
        self.insert(keys[~known & ~gone], values[~known & ~gone])

    def entries(self) -> tuple[Keys, Values]:
        """Return all keys with their values, int64 [K]."""
        return self._collect(_MOST_STEPS + 1)

    def expire(self, step: int) -> tuple[Keys, Values]:
        """Erase the keys that no step from `step` on has used; return them with their values, int64 [N]."""
        keys, values = self._collect(step)
        self.erase(keys)
        return keys, values

    def _collect(self, step: int) -> tuple[Keys, Values]:
        none = np.zeros(0, np.int64)
        count = int(_collect(self.parts, step, none, none))
        keys, values = np.empty(count, np.int64), np.empty(count, np.int64)
        _collect(self.parts, step, keys, values)
        return keys, values
