"""Sorting of rows by the hashes of their keys, with little extra memory, and numbering of a batch's distinct rows."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hostdev.kernels.arrays import AnyIds, Keys, LongIds, RowNumbers, reserved
from hostdev.kernels.bits import Bits, count_bits
from hostdev.kernels.counter import hashed, mix64
from hostdev.kernels.jit import kernel

_NO_ROWS = np.zeros(0, np.int32)
_PART_BITS = 8  # 256 parts; hashes and their order, 16 bytes a row, are in memory for one part at a time


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
    """Return the rows `first`, followed by the rows of a set in the order of their keys' hashes.

    Args:
        keys: int64 [V], the key of each row.
        bits: The set, of rows below V.
        first: int32 [F], the rows that come first.

    Returns:
        int32 [F + K], where K is the number of rows in the set.
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


def order_of(keys: Keys) -> LongIds:
    """Return the indices that sort keys [N] by their hashes, int64 [N]."""
    return np.argsort(mix64(keys.view(np.uint64)))


@kernel
def _number(rows, inverse, ends, firsts, unknown, slots, numbers, found):
    """Renumber `inverse` in order of first occurrence; write the rows in this order, and return their number.

    Args:
        rows: int32 [U], the row of each unique key, or a negative number.
        inverse: int32 [N], the position of each key among the unique keys; overwritten.
        ends: int64 [F + 1], where each feature's keys begin.
        firsts: int64 [F + 1], where each feature's out-of-vocabulary rows begin; its keys use them in turn.
        unknown: int32 [any], the out-of-vocabulary rows.
        slots: int64 [any], the place of each out-of-vocabulary row in `numbers`, from U on.
        numbers: int32, all -1, one for each unique key and each distinct out-of-vocabulary row.
        found: int32, of the same length, written: the rows.
    """
    count = np.uint64(0)
    one = np.uint64(1)
    for f in range(np.uint64(0), np.uint64(len(ends) - 1)):
        first, last = np.uint64(firsts[f]), np.uint64(firsts[f + one])
        own = first
        for i in range(np.uint64(ends[f]), np.uint64(ends[f + one])):
            key = np.uint64(inverse[i])
            row = rows[key]
            place = key if row >= 0 else np.uint64(slots[own])
            number = numbers[place]
            if number < 0:
                number = numbers[place] = count
                found[count] = row if row >= 0 else unknown[own]
                count += one
            inverse[i] = number
            own = own + one if own + one < last else first
    return np.int64(count)


def number_rows(
    rows: RowNumbers, inverse: RowNumbers, features: Sequence[AnyIds], unknown: Sequence[Sequence[int]]
) -> RowNumbers:
    """Return the distinct rows of a batch in order of first occurrence; renumber `inverse` accordingly, in place.

    Args:
        rows: int32 [U], the row of each unique key; a negative number for a key without a row.
        inverse: int32 [N], the position of each of the batch's keys among the unique keys; afterwards, that of its row.
        features: The keys of each feature, together N; only their lengths are used.
        unknown: The out-of-vocabulary rows of each feature, which its keys use in turn: one, or one for each column.
    """
    if not len(rows) or rows.min() >= 0:
        return rows
    ends = np.array(list(accumulate(map(len, features), initial=0)), np.int64)
    firsts = np.array(list(accumulate(map(len, unknown), initial=0)), np.int64)
    flat = [row for each in unknown for row in each]
    places = {row: len(rows) + number for number, row in enumerate(dict.fromkeys(flat))}
    numbers = np.full(len(rows) + len(places), -1, np.int32)
    found = np.empty(len(numbers), np.int32)
    slots = np.array([places[row] for row in flat], np.int64)
    count = _number(rows, inverse, ends, firsts, np.array(flat, np.int32), slots, numbers, found)
    return found[:count].copy()
