"""The last uses and the number of uses of rows, and of keys that do not have a row yet.

A row's last step and uses take 8 bytes: the step the low 32 bits, the number of uses the high ones. Exact counts of
keys without a row take 16 bytes an entry, in the memory of a `KeyDirectory`. An entry's value is the number of the last
step that used the key, and the key's uses: step * 2^24 + count.

The alternative is a count-min sketch: counts in fixed memory, which may be too large but never too small. Source:
Cormode and Muthukrishnan, "An Improved Data Stream Summary: The Count-Min Sketch and its Applications", Journal of
Algorithms 55, 2005. Additions commute, so the counts do not depend on the order of the keys in a batch.

Each part of the keys' hashes has counters of its own (see `shards`), so that ranks with different parts share none.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Ids, Keys, RowNumbers
from hostdev.kernels.counter import hashed, key64
from hostdev.kernels.jit import array_at, inline, kernel, prefetch_to_read
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
    next_search,
    start_searches,
)
from hostdev.kernels.pool import parallel_for

Packed = npt.NDArray[np.uint64]

_AHEAD = 16  # prefetch distance in rows
_GRAIN = 8192
_LOW = 0xFFFFFFFF
_COUNT_BITS = 24
MOST_USES = (1 << _COUNT_BITS) - 1
_MOST_STEPS = (1 << 32) - 1
Values = npt.NDArray[np.int64]
_DEPTH = 4  # counters per key; the smallest of them is the key's count


@inline
def _used(value, uses, step):
    """Return a row's state after a step with this many uses."""
    low, high = np.uint64(_LOW), np.uint64(32)
    return (min((value >> high) + np.uint64(uses), low) << high) | (np.uint64(step) & low)


@inline
def _use_row(i, rows, uses, step, packed, before):
    """Record the uses of the row rows[i] in its state, and write the former state to before[i]."""
    row = np.uint64(rows[i])
    before[i] = packed[row]
    packed[row] = _used(before[i], uses[i], step)


@kernel
def _use(start, stop, rows, uses, step, packed, before):
    begin, end = np.uint64(start), np.uint64(stop)
    for i in range(begin, end):
        ahead = i + np.uint64(_AHEAD)
        if ahead < end and rows[ahead] >= 0:
            prefetch_to_read(packed, rows[ahead], 8)
        if rows[i] >= 0:
            _use_row(i, rows, uses, step, packed, before)


@kernel
def _find_and_use(start, stop, keys, parts, uses, step, packed, rows, before):
    """Find each key's row; record its uses some keys later, when the prefetched state of the row has arrived."""
    begin, end, behind = np.uint64(start), np.uint64(stop), np.uint64(_AHEAD)
    ring, owners = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.uint64)
    start_searches(keys, begin, end, parts, ring, owners)
    for i in range(begin, end):
        address, _ = next_search(keys, i, end, parts, ring, owners)
        row = array_at(address, 2, np.int64)[1]
        rows[i] = row
        if row >= 0:
            prefetch_to_read(packed, row, 8)
        if i >= begin + behind and rows[i - behind] >= 0:
            _use_row(i - behind, rows, uses, step, packed, before)
    for i in range(max(begin + behind, end) - behind, end):
        if rows[i] >= 0:
            _use_row(i, rows, uses, step, packed, before)


@kernel
def _restore(start, stop, rows, packed, before):
    for i in range(np.uint64(start), np.uint64(stop)):
        if rows[i] >= 0:
            packed[np.uint64(rows[i])] = before[i]


def use(rows: RowNumbers, uses: RowNumbers, step: int, packed: Packed) -> Packed:
    """Set the last step of distinct rows, and add to their uses, up to 2^32 - 1.

    Args:
        rows: int32 [U]; negative numbers are left out.
        uses: int32 [U], how often the step uses each row.
        step: The step, at most 2^32 - 1.
        packed: uint64 [V], the state of all rows, changed.

    Returns:
        The former state of each row, uint64 [U], for `restore`.
    """
    before = np.empty(len(rows), np.uint64)
    parallel_for(_use, len(rows), rows, uses, np.uint64(step), packed, before, grain=_GRAIN)
    return before


def find_and_use(
    directory: KeyDirectory, keys: npt.NDArray[np.int64], uses: RowNumbers, step: int, packed: Packed
) -> tuple[RowNumbers, Packed]:
    """Find the rows of distinct keys, and call `use` with them; return the rows, int32 [N], and the result of `use`."""
    rows, before = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint64)
    arguments = keys, directory.parts, uses, np.uint64(step), packed, rows, before
    parallel_for(_find_and_use, len(keys), *arguments, grain=_GRAIN)
    return rows, before


def restore(rows: RowNumbers, packed: Packed, before: Packed) -> None:
    """Undo a call of `use`."""
    parallel_for(_restore, len(rows), rows, packed, before, grain=_GRAIN)


def split(packed: Packed) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return views of the last steps and of the uses, each uint32 [V]."""
    halves = packed.view(np.uint32)
    little = sys.byteorder == "little"
    return halves[1 - little :: 2], halves[little::2]


@kernel
def _add(keys, uses, step, oldest, start, parts, totals, before):
    """Count keys[start:], which are distinct; return the index of the first new key that does not fit, or N."""
    begin, end = np.uint64(start), np.uint64(len(keys))
    ring, owners = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.uint64)
    start_searches(keys, begin, end, parts, ring, owners)
    for i in range(begin, end):
        address, part = next_search(keys, i, end, parts, ring, owners)
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
    """Write the keys that no step from `step` on has used, and their values; return the number of these keys.

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

        Both are int64 [N]. The former value of a new key is EMPTY. If no step from `oldest` on
        has used a key, its earlier uses are forgotten.
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


@kernel
def _add_counts(keys, uses, sign, seeds, first, counts, totals):
    """Add the keys' uses, times `sign`, to their counters; then write each key's count.

    `counts` is uint32 [parts, depth, width], of the parts from `first` on.
    """
    width = np.uint64(counts.shape[2])
    for i in range(np.uint64(0), np.uint64(len(keys))):
        part = (hashed(0, keys[i]) >> np.uint64(56)) - np.uint64(first)
        for row in range(np.uint64(0), np.uint64(_DEPTH)):
            place = ((hashed(seeds[row], keys[i]) >> np.uint64(32)) * width) >> np.uint64(32)
            counts[part, row, place] += np.uint32(np.int64(sign) * np.int64(uses[i]))
    for i in range(np.uint64(0), np.uint64(len(keys))):
        part = (hashed(0, keys[i]) >> np.uint64(56)) - np.uint64(first)
        least = np.uint32(0xFFFFFFFF)
        for row in range(np.uint64(0), np.uint64(_DEPTH)):
            place = ((hashed(seeds[row], keys[i]) >> np.uint64(32)) * width) >> np.uint64(32)
            least = min(least, counts[part, row, place])
        totals[i] = least


class CountMinSketch:
    """Approximate counts of the uses of keys, as a count-min sketch (see the module).

    Args:
        nbytes: Size of the counters of all parts, at least 64 KiB.
        seed: Seed of the hash functions.
        first: The first part whose keys are counted.
        end: One more than the last part.
    """

    def __init__(self, nbytes: int, seed: int, first: int = 0, end: int = PARTS) -> None:
        self._counts = np.zeros((end - first, _DEPTH, nbytes // (4 * _DEPTH * PARTS)), np.uint32)
        self._first = first
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Set the seed of the hash functions; the counters do not change."""
        self._seeds = np.array([key64(seed, "sketch", row) for row in range(_DEPTH)], np.uint64)

    @property
    def nbytes(self) -> int:
        """Size of the counters in bytes."""
        return self._counts.nbytes

    def add(self, keys: Ids, uses: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Add uses [N] of keys [N]; return the keys' counts, int64 [N]."""
        return self._change(keys, uses, 1)

    def subtract(self, keys: Ids, uses: npt.NDArray[np.int32]) -> None:
        """Undo an `add`."""
        self._change(keys, uses, -1)

    def without(self, added: Sequence[tuple[Ids, npt.NDArray[np.int32]]]) -> npt.NDArray[np.uint32]:
        """Return a copy of the counters, uint32 [any], as if these pairs of keys and uses had not been added."""
        counts = self._counts.copy()
        for keys, uses in added:
            _add_counts(keys, uses, -1, self._seeds, self._first, counts, np.empty(len(keys), np.int64))
        return counts.reshape(-1)

    def restore(self, counts: npt.NDArray[np.uint32]) -> None:
        """Set this sketch's counters from those of all parts, uint32 [any], in the layout of `without`."""
        parts = counts.reshape(PARTS, *self._counts.shape[1:])
        self._counts[:] = parts[self._first : self._first + len(self._counts)]

    def _change(self, keys: Ids, uses: npt.NDArray[np.int32], sign: int) -> npt.NDArray[np.int64]:
        totals = np.empty(len(keys), np.int64)
        _add_counts(keys, uses, sign, self._seeds, self._first, self._counts, totals)
        return totals
