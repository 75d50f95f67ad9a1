"""Sorts rows by the hashes of their keys, with little memory beside the result."""

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Keys, RowNumbers
from hostdev.kernels.bits import Bits, count_bits
from hostdev.kernels.buffers import reserved
from hostdev.kernels.counter import hashed, mix64
from hostdev.kernels.jit import kernel

_NO_ROWS = np.zeros(0, np.int32)
_PART_BITS = 8  # a part's hashes and their order, which need 16 bytes a row, are in memory one part at a time


@kernel
def _place(keys, bits, nexts, order):
    """Write the rows of a set to `order`, grouped by the highest bits of their keys' hashes.

    Args:
        keys: int64 [V], the key of each row.
        bits: The set, of rows below V.
        nexts: int64 [parts], where the next row of each part goes; overwritten.
        order: int32 [K], written; or [0], to only count the rows.
    """
    six, one, shift = np.uint64(6), np.uint64(1), np.uint64(64 - _PART_BITS)
    write = len(order) > 0
    for word in range(np.uint64(0), np.uint64(len(bits))):
        left = bits[word]
        row = word << six
        while left:
            if left & one:
                part = hashed(np.uint64(0), keys[row]) >> shift
                if write:
                    order[np.uint64(nexts[part])] = row
                nexts[part] += 1
            left >>= one
            row += one


def sorted_rows(keys: Keys, bits: Bits, first: RowNumbers = _NO_ROWS) -> RowNumbers:
    """Return the rows of a set in the order of the hashes of their keys, after other rows.

    Args:
        keys: int64 [V], the key of each row.
        bits: The set, of rows below V.
        first: int32 [F], the rows that come first.

    Returns:
        int32 [F + K].
    """
    found: RowNumbers = reserved((len(first) + count_bits(bits),), np.int32)
    found[: len(first)] = first
    order = found[len(first) :]
    if not len(order):
        return found
    ends = np.zeros(1 << _PART_BITS, np.int64)
    _place(keys, bits, ends, order[:0])
    np.cumsum(ends, out=ends)
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    _place(keys, bits, begins.copy(), order)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        part = order[begin:end]
        part[:] = part[order_of(keys[part])]
    return found


def order_of(keys: Keys) -> npt.NDArray[np.int64]:
    """Return the positions of keys [N] in the order of their hashes, int64 [N]."""
    return np.argsort(mix64(keys.view(np.uint64)))
