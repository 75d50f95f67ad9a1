"""The changes of a table's keys in one step: what they are, how to undo them, and which rows and keys they take.

A key without a row may use a free row for one batch. A rule of eviction with scores evicts exactly the keys with the
smallest scores of the whole table, even if the table is divided among ranks.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.kernels.arrays import Counts, Keys, RowNumbers, Rows
from hostdev.kernels.counter import mix64
from hostdev.kernels.key_order import order_of

Steps = npt.NDArray[np.uint32]

NO_KEYS = np.zeros(0, np.int64)
NO_ROWS = np.zeros(0, np.int32)
_CHECKED_ROWS = 1 << 16  # free memory is checked for at least this many new rows at a time
Total = Callable[[Counts], Counts]  # returns the sum of all ranks' arrays of this shape
_DIGIT = 16  # bits of a digit
_SCORE_BITS = {4: 32, 8: 64}  # bits of a score, by its bytes


class PlannedAheadError(Exception):
    """A step can be planned only once all earlier steps are finished."""


class PlannedKeys(NamedTuple):
    """The changes of a table's keys in one step."""

    rows: RowNumbers  # int32 [U], the row of each key; EMPTY for a key without a row
    new: npt.NDArray[np.int64]  # positions of the keys that get a row in this step; these rows must be initialized
    evicted: Keys  # keys that lost their rows before this step, in an order that depends on row numbers
    evicted_rows: RowNumbers  # the rows of `evicted`, which keep their values until the step is committed
    guests: RowNumbers = (
        NO_ROWS  # rows for this step alone, which must be initialized: one per key without a row, or one for all
    )


class KeyCount(NamedTuple):
    """The numbers of keys after a step, over all ranks."""

    step: int
    live: int  # keys with a row
    waiting: int  # keys that are counted and wait for a row
    admitted: int  # keys that got a row in this step
    evicted: int  # keys that lost their row before this step


@dataclass
class Undo:
    """How to undo a step."""

    step: int
    used: RowNumbers = field(default_factory=lambda: NO_ROWS)  # [U], the rows of the step's keys, or EMPTY
    before: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))  # [U], their former states
    new: tuple[Keys, RowNumbers] = (NO_KEYS, NO_ROWS)  # keys that got a row, and their rows
    evicted: tuple[Keys, RowNumbers, Steps] = (NO_KEYS, NO_ROWS, np.zeros(0, np.uint32))  # keys, rows and last steps
    guests: RowNumbers = field(default_factory=lambda: NO_ROWS)  # see `PlannedKeys`
    waiting: list[tuple[Keys, npt.NDArray[np.int64]]] = field(default_factory=list)  # keys, and their former counts
    sketched: tuple[Keys, npt.NDArray[Any]] = (NO_KEYS, NO_ROWS)  # keys, and the uses that were added to the sketch
    undecayed: npt.NDArray[np.uint32] | None = None  # uses of all rows before they decayed; None if they did not
    decays: int = 0  # how often this step let the uses decay
    counts: KeyCount | None = None  # the numbers of keys after the step


class FreeRows:
    """Gives out rows, first those that were used before.

    Args:
        space: V, the maximum number of rows.
        require_memory: As for `KeyIndex`.

    Attributes:
        rows: Number of rows that have ever been used.
        returned: Rows that other threads have released, to be used again.
    """

    def __init__(self, space: int, require_memory: Callable[[int, int], None]) -> None:
        self.row_space, self.rows = space, 0
        self._require_memory, self._checked_rows = require_memory, 0
        self._free: list[RowNumbers] = []  # rows that can be used again
        self.returned: deque[RowNumbers] = deque()

    def release(self, rows: RowNumbers) -> None:
        """Make rows free again; the caller no longer uses them."""
        if len(rows):
            self._free.append(rows)

    def _has_rows(self, n: int) -> bool:
        """Return whether n rows are free; first release those in `returned`."""
        while self.returned:
            self.release(self.returned.popleft())
        return n <= sum(map(len, self._free)) + self.row_space - self.rows

    def _take_rows(self, n: int) -> RowNumbers:
        """Take n free rows, first those that were used before, and return them."""
        taken, missing = [NO_ROWS], n
        while missing and self._free:
            some = self._free.pop()
            if len(some) > missing:
                self._free.append(some[missing:])
            taken.append(some[:missing])
            missing -= len(taken[-1])
        used = np.concatenate(taken)
        first, self.rows = self.rows, self.rows + n - len(used)
        return np.concatenate([used, np.arange(first, self.rows, dtype=np.int32)])

    def _require_memory_for(self, new: int, keys: int) -> None:
        """Raise UserError unless there is memory for `new` more rows, in a table that has `keys` keys."""
        first_used = max(0, new - sum(map(len, self._free)))
        if self.rows + first_used > self._checked_rows:
            step = max(first_used, _CHECKED_ROWS)
            self._require_memory(step, keys)
            self._checked_rows = self.rows + step

    def _find_lack(self, new: int, keys: int) -> UserError | None:
        """Return the error that `_require_memory_for` raises, or None."""
        try:
            self._require_memory_for(new, keys)
        except UserError as error:
            return error
        return None


class GuestRows:
    """Rows of a batch that only reads; they can be used again when the last reference to this object is gone.

    Args:
        rows: int32 [any].
        returned: The queue to which the rows are then appended, in any thread.
    """

    def __init__(self, rows: RowNumbers, returned: deque[RowNumbers]) -> None:
        self._rows, self._returned = rows, returned

    def take(self) -> RowNumbers:
        """Return the rows; from now on, the caller decides when they can be used again."""
        rows, self._rows = self._rows, self._rows[:0]
        return rows

    def __del__(self) -> None:
        if len(self._rows):
            self._returned.append(self._rows)


def choose_least(
    scores: npt.NDArray[Any], keys_at: Callable[[npt.NDArray[np.int64]], Keys], count: int, total: Total | None
) -> npt.NDArray[np.int64]:
    """Choose the `count` keys with the smallest scores over all ranks; return the positions of this rank's, [any].

    The keys' hashes order keys with equal scores.

    Args:
        scores: uint32 [N], or non-negative float64 [N], of this rank's keys.
        keys_at: Returns the keys at positions [any], int64.
        count: Number of keys to choose over all ranks, which have at least as many.
        total: Returns sums over the ranks; None for a table that is not divided among ranks.
    """
    if total is None:
        if count == len(scores):
            return np.arange(len(scores))
        limit = np.partition(scores, count)[count]
        below, equal = np.flatnonzero(scores < limit), np.flatnonzero(scores == limit)
        hashes, left = mix64(keys_at(equal).view(np.uint64)), count - len(below)
        return np.concatenate([below, equal[hashes < np.partition(hashes, left)[left]]])
    if not count:
        return np.zeros(0, np.int64)
    bits = _SCORE_BITS[scores.itemsize]
    values = scores.view(f"u{scores.itemsize}").astype(np.uint64)  # non-negative floats are in the order of their bits
    limit, left = _find_least(values, bits, count, total)
    below, equal = np.flatnonzero(values < limit), np.flatnonzero(values == limit)
    hashes = mix64(keys_at(equal).view(np.uint64))
    last, _ = _find_least(hashes, 64, left, total)
    return np.concatenate([below, equal[hashes <= last]])


def _find_least(values: npt.NDArray[np.uint64], bits: int, count: int, total: Total) -> tuple[np.uint64, int]:
    """Return the `count`-th smallest of all ranks' values, and how many of the `count` smallest are equal to it.

    Digit by digit from the highest on, ranks add up how many of the values that agree so far have each digit.
    """
    found, left = 0, count
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        digits = ((values >> np.uint64(shift)) & np.uint64((1 << _DIGIT) - 1)).astype(np.int64)
        ends = np.cumsum(total(np.bincount(digits, minlength=1 << _DIGIT)))
        digit = int(np.searchsorted(ends, left))
        left -= int(ends[digit - 1]) if digit else 0
        values, found = values[digits == digit], found << _DIGIT | digit
    return np.uint64(found), left


class EvictionReports:
    """Evictions that were not reported yet, and the functions to which they are reported."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Keys, Rows], object]] = []
        self._waiting: deque[tuple[Keys, Rows]] = deque()

    def __bool__(self) -> bool:
        """Return whether there is a listener."""
        return bool(self.listeners)

    def add(self, keys: Keys, weights: Callable[[npt.NDArray[np.int64]], Rows]) -> None:
        """Add an eviction: keys [E], and a function that returns the weights of the keys at positions [E], [E, D]."""
        if len(keys) and self.listeners:
            order = order_of(keys)
            self._waiting.append((keys[order], weights(order)))

    def send(self) -> None:
        """Call the listeners for each eviction that was not reported yet."""
        while self._waiting:
            keys, weights = self._waiting.popleft()
            for listener in self.listeners:
                listener(keys, weights)
