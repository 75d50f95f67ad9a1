"""Which keys a table by key evicts: exactly the least of the whole table, even with ranks; and reports of these."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Counts, Keys, Rows
from hostdev.kernels.counter import mix64
from hostdev.kernels.key_order import order_of

Total = Callable[[Counts], Counts]  # returns the sum of all ranks' arrays of this shape

_DIGIT = 16  # bits
_SCORE_BITS = {4: 32, 8: 64}  # by the bytes of a score


def choose_least(
    scores: npt.NDArray[Any], keys_at: Callable[[npt.NDArray[np.int64]], Keys], count: int, total: Total | None
) -> npt.NDArray[np.int64]:
    """Return the positions of the `count` keys of all ranks with the smallest scores that are on this rank, [any].

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
    values = scores.view(f"u{scores.itemsize}").astype(np.uint64)  # such floats are in the order of their bits
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
        """Return whether anybody listens."""
        return bool(self.listeners)

    def add(self, keys: Keys, weights: Callable[[npt.NDArray[np.int64]], Rows]) -> None:
        """Note an eviction: keys [E], and a function that returns the weights of these positions, [E, D]."""
        if len(keys) and self.listeners:
            order = order_of(keys)
            self._waiting.append((keys[order], weights(order)))

    def send(self) -> None:
        """Call the listeners for each eviction that was not reported yet."""
        while self._waiting:
            keys, weights = self._waiting.popleft()
            for listener in self.listeners:
                listener(keys, weights)
