"""A join of two id arrays: finds the ids that both have, with a hash table and linear probing."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Positions
from hostdev.kernels.jit import inline, kernel

_LEAST_BITS = 4
_FILTER_BITS = 3  # the filter has 2^3 times as many places as the hash table


@inline
def _place(row, shift):
    return (np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(shift)


@kernel
def _join(ids, others, table, maybe, shift, first, second):
    """Write the positions of common ids in `ids` to `first` and in `others` to `second`; return how many there are.

    Args:
        table: int32 [2 ** (64 - shift)], filled with -1: memory for the hash table of `others`.
        maybe: bool, eight times as long, all False: memory for a filter that rejects, without branches, most ids that
            are not in `others`.
    """
    last = np.uint64(len(table) - 1)
    fine = np.uint64(shift) - np.uint64(_FILTER_BITS)
    for j in range(np.uint64(len(others))):
        maybe[_place(others[j], fine)] = True
        place = _place(others[j], shift)
        while table[place] >= 0:
            place = np.uint64((place + np.uint64(1)) & last)
        table[place] = j
    candidates = np.uint64(0)
    for i in range(np.uint64(len(ids))):
        first[candidates] = i
        candidates += np.uint64(maybe[_place(ids[i], fine)])
    count = np.uint64(0)
    for c in range(candidates):
        at = np.uint64(first[c])
        place = _place(ids[at], shift)
        while table[place] >= 0:
            found = np.uint64(table[place])
            if others[found] == ids[at]:
                first[count], second[count] = at, found
                count += np.uint64(1)
                break
            place = np.uint64((place + np.uint64(1)) & last)
    return np.int64(count)


def join(ids: npt.NDArray[Any], others: npt.NDArray[Any]) -> tuple[Positions, Positions]:
    """Find the ids that two arrays have in common; return their positions in `ids`, ascending, and in `others`.

    Args:
        ids: int32 or int64 [U], unique.
        others: int32 or int64 [M], unique; should be the smaller array, since the hash table is built from it.
    """
    bits = max(_LEAST_BITS, (2 * len(others)).bit_length())
    table, maybe = np.full(1 << bits, -1, np.int32), np.zeros(1 << (bits + _FILTER_BITS), np.bool_)
    first, second = np.empty(len(ids) + 1, np.int32), np.empty(min(len(ids), len(others)), np.int32)
    count = _join(ids, others, table, maybe, np.uint64(64 - bits), first, second)
    return first[:count], second[:count]
