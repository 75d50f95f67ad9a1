"""Sets of a table's rows as bitmaps, and copies of rows into columnar arrays.

Shapes: V table rows of dimension D, S arrays per row (weights, optimizer slots), N ids.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import LINE
from hostdev.kernels.bfloat16 import to_float32
from hostdev.kernels.jit import fetch_or, kernel, prefetch_to_read
from hostdev.kernels.pool import get_grain, parallel_for

Bits = npt.NDArray[np.uint64]  # [ceil(V / 64)]; row r is bit r % 64 of word r // 64

_AHEAD = 8  # prefetch distance in rows


def empty_bits(rows: int) -> Bits:
    """Return an empty set for a table of `rows` rows."""
    return np.zeros(-(-rows // 64), np.uint64)


def full_bits(rows: int) -> Bits:
    """Return the set of all rows of a table of `rows` rows."""
    bits = np.full(-(-rows // 64), np.uint64(0xFFFFFFFFFFFFFFFF))
    if rows % 64:
        bits[-1] = np.uint64((1 << rows % 64) - 1)
    return bits


def bits_of(rows: npt.NDArray[np.bool_]) -> Bits:
    """Return the set of the rows r for which rows[r], bool [V], is true."""
    packed = np.packbits(rows, bitorder="little")
    found = np.zeros(-(-len(rows) // 64) * 8, np.uint8)
    found[: len(packed)] = packed
    return found.view("<u8").astype(np.uint64, copy=False)


def count_bits(bits: Bits) -> int:
    """Return the number of rows in a set."""
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


def contains(bits: Bits, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which of the rows [N] are in a set."""
    rows = rows.astype(np.uint64)
    found: npt.NDArray[np.bool_] = (bits[rows >> np.uint64(6)] >> (rows & np.uint64(63)) & np.uint64(1)).astype(
        np.bool_
    )
    return found


def any_in_ranges(bits: Bits, rows: int, length: int) -> npt.NDArray[np.bool_]:
    """Split a table of `rows` rows into ranges of `length` rows, and return which ranges have a row in the set `bits`.

    Args:
        bits: The set of rows.
        rows: The number of rows of the table.
        length: The number of rows per range, a power of two; the last range may be shorter.

    Returns:
        bool [ranges].
    """
    ranges = -(-rows // length)
    if length >= 64:
        words = np.zeros(ranges * (length // 64), np.uint64)
        words[: len(bits)] = bits
        return np.asarray(words.reshape(ranges, -1).any(axis=1))
    found = np.unpackbits(bits.astype("<u8").view(np.uint8), bitorder="little", count=rows)
    return np.asarray(np.pad(found, (0, ranges * length - rows)).reshape(ranges, length).any(axis=1))


@kernel
def _mark(start, stop, ids, bits):
    six, low, one = np.uint64(6), np.uint64(63), np.uint64(1)
    address = bits.ctypes.data
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(ids[i])
        bit = one << (row & low)
        if not bits[row >> six] & bit:  # most bits are set after a few steps; the check saves atomic operations
            fetch_or(address + np.int64(row >> six) * 8, bit)


def mark(ids: npt.NDArray[Any], bits: Bits) -> None:
    """Add the rows `ids`, int32 or int64 [N], to a set, using all threads; concurrent calls are safe."""
    parallel_for(_mark, len(ids), ids, bits, grain=get_grain(LINE))


@kernel
def take(ids, bits, out):
    """Remove ids [N] from a set; return the number n of ids that were in the set, and write them to out[:n].

    `out` is [N]; items after the first n may be overwritten, too.
    """
    six, low, one = np.uint64(6), np.uint64(63), np.uint64(1)
    count = np.uint64(0)
    for i in range(np.uint64(0), np.uint64(len(ids))):
        row = np.uint64(ids[i])
        bit = one << (row & low)
        word = bits[row >> six]
        found = word & bit
        bits[row >> six] = word & ~bit
        out[count] = ids[i]  # if the set does not have this id, the next id overwrites it
        count += one if found else np.uint64(0)
    return np.int64(count)


@kernel
def rows_between(first, last, bits, out):
    """Write the rows of a set that are in [first, last), ascending, to the start of `out`; return their number."""
    six, low, one = np.uint64(6), np.uint64(63), np.uint64(1)
    count = np.uint64(0)
    row, end = np.uint64(first), np.uint64(last)
    while row < end:
        word = bits[row >> six] >> (row & low)
        if word == np.uint64(0):
            row = ((row >> six) + one) << six
            continue
        if word & one:
            out[count] = row
            count += one
        row += one
    return np.int64(count)


@kernel
def copy_to_columns(start, stop, first, ids, block, out):
    """Copy rows to columns: out[s, i] = block[ids[i], s], or block[first + i, s] if `ids` is None.

    Args:
        ids: int32 or int64 [N], or None.
        block: float32, or bfloat16 as uint16, [V, S, D].
        out: float32 [S, N, D], written.
    """
    for i in range(np.uint64(start), np.uint64(stop)):
        if ids is None:
            row = np.uint64(first) + i
        else:
            row = np.uint64(ids[i])
            ahead = i + np.uint64(_AHEAD)
            if ahead < np.uint64(stop):
                prefetch_to_read(block, ids[ahead], block.strides[0])
        for s in range(block.shape[1]):
            source, to = block[row, s], out[s, i]
            for j in range(block.shape[2]):
                to[j] = to_float32(source[j])


@kernel
def gather_rows(rows, order, out):
    """Copy rows: out[i] = rows[order[i]], float32 [any, width], without holding the GIL."""
    for i in range(np.uint64(0), np.uint64(len(order))):
        ahead = i + np.uint64(_AHEAD)
        if ahead < np.uint64(len(order)):
            prefetch_to_read(rows, order[ahead], rows.strides[0])
        source, to = rows[np.uint64(order[i])], out[i]
        for j in range(len(to)):
            to[j] = source[j]


@kernel
def place_in_columns(rows, ids, wanted, columns):
    """Write rows into columns: for each i, columns[s, k] = rows[i, s], where k is the index of ids[i] in `wanted`.

    Args:
        rows: float32 [n, S, D].
        ids: int32 or int64 [n], ascending, each in `wanted`.
        wanted: int64 [N], ascending.
        columns: float32 [S, N, D]; only the values of the rows `ids` are overwritten.
    """
    k = np.uint64(0)
    for i in range(np.uint64(0), np.uint64(len(ids))):
        while wanted[k] < ids[i]:
            k += np.uint64(1)
        for s in range(rows.shape[1]):
            source, to = rows[i, s], columns[s, k]
            for j in range(rows.shape[2]):
                to[j] = source[j]
