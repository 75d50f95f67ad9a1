"""Join: where ids of one array occur in another, by a hash table with linear probing."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import inline, kernel

Positions = npt.NDArray[np.int32]

_LEAST_BITS = 4


@inline
def _place(row, shift):
    return (np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(shift)


@kernel
def _join(ids, others, table, shift, first, second):
    """`table` is int32 [2 ** (64 - shift)], filled with -1."""
    last = np.uint64(len(table) - 1)
    for j in range(np.uint64(len(others))):
        place = _place(others[j], shift)
        while table[place] >= 0:
            place = np.uint64((place + np.uint64(1)) & last)
        table[place] = j
    count = np.uint64(0)
    for i in range(np.uint64(len(ids))):
        place = _place(ids[i], shift)
        while table[place] >= 0:
            found = np.uint64(table[place])
            if others[found] == ids[i]:
                first[count], second[count] = i, found
                count += np.uint64(1)
                break
            place = (place + np.uint64(1)) & last
    return np.int64(count)


def join(ids: npt.NDArray[Any], others: npt.NDArray[Any]) -> tuple[Positions, Positions]:
    """Return the positions of the ids that both arrays have: in ids [U], ascending, and of the same ids in `others`.

    Args:
        ids: int32 or int64 [U], unique.
        others: int32 or int64 [M], unique; the hash table has these, so it should be the smaller array.
    """
    bits = max(_LEAST_BITS, (2 * len(others)).bit_length())
    first, second = np.empty((2, min(len(ids), len(others))), np.int32)
    count = _join(ids, others, np.full(1 << bits, -1, np.int32), np.uint64(64 - bits), first, second)
    return first[:count], second[:count]
