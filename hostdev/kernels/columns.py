"""Writing columns of a row-major array, hashing keys to ids, and narrowing float64 columns to float32."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.counter import hashed
from hostdev.kernels.jit import inline, kernel

_TILE = 64  # rows


@kernel
def _place(codes, values, rows, column):
    at = np.uint64(column)
    for i in range(np.uint64(0), np.uint64(len(codes))):
        rows[i, at] = values[np.uint64(codes[i])]


def place_column(codes: npt.NDArray[Any], values: npt.NDArray[Any], rows: npt.NDArray[Any], column: int) -> None:
    """Write values[codes], of codes [n], to rows[:, column]; `rows` is [n, C]."""
    _place(codes, values, rows, column)


@kernel
def _narrow(numbers, short):
    """Convert numbers to float32, up to the first that float32 cannot represent; return how many come before it."""
    for i in range(np.uint64(0), np.uint64(len(numbers))):
        number = numbers[i]
        short[i] = np.float32(number)
        if np.float64(short[i]) != number and number == number:
            return np.int64(i)
    return np.int64(len(numbers))


def narrowed(numbers: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    """Return numbers [N] as float32 if each is NaN or a number that float32 represents exactly; else as they are."""
    short = np.empty(len(numbers), np.float32)
    return short if _narrow(numbers, short) == len(numbers) else numbers


@inline
def _bucket(found, buckets):
    """Return a hash modulo `buckets`, without a division if this is a power of 2."""
    return found & (buckets - np.uint64(1)) if buckets & (buckets - np.uint64(1)) == np.uint64(0) else found % buckets


@kernel
def _hash(keys, of_column, buckets, first, ids):
    for i in range(np.uint64(0), np.uint64(len(keys))):
        ids[i] = np.int64(_bucket(hashed(of_column, keys[i]), buckets)) + first


@kernel
def _hash_rows(keys, order, of_columns, buckets, first, missing, ids, lacking):
    """Hash the keys of rows in an order, a few rows at a time, so that these stay in the L1 cache.

    Args:
        keys: int64 [C, N].
        order: int64 [N], the rows in order.
        of_columns: uint64 [C], keys of the hash.
        buckets: Number of buckets.
        first: The id of bucket 0.
        missing: int64 [C], each column's key of a missing value.
        ids: Output, int32 or int64 [N, C].
        lacking: Output, bool [C, N]: which values are missing.
    """
    tile, n = np.uint64(_TILE), np.uint64(len(order))
    for begin in range(np.uint64(0), n, tile):
        end = min(begin + tile, n)
        for column in range(np.uint64(0), np.uint64(len(of_columns))):
            for i in range(begin, end):
                key = keys[column, np.uint64(order[i])]
                ids[i, column] = np.int64(_bucket(hashed(of_columns[column], key), buckets)) + first
                lacking[column, i] = key == missing[column]


def hash_keys(
    keys: npt.NDArray[np.int64], of_column: np.uint64, buckets: np.uint64, first: int
) -> npt.NDArray[np.int64]:
    """Return the id of each of the keys [N], int64 [N]: first + (mix64(key ^ of_column) mod buckets)."""
    ids = np.empty(len(keys), np.int64)
    _hash(keys, of_column, buckets, first, ids)
    return ids


def hash_rows(
    keys: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
    of_columns: npt.NDArray[np.uint64],
    buckets: np.uint64,
    first: int,
    missing: npt.NDArray[np.int64],
    dtype: str,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the ids of rows in an order, [N, C], as `hash_keys` does, and which of their values are missing, [C, N].

    Args:
        keys: int64 [N, C]; fastest if the keys of a column are contiguous.
        order: int64 [N], row numbers.
        of_columns: uint64 [C].
        buckets: Number of buckets.
        first: The id of bucket 0.
        missing: int64 [C], each column's key of a missing value.
        dtype: The dtype of the ids.
    """
    ids, lacking = np.empty((len(order), len(of_columns)), dtype), np.empty((len(of_columns), len(order)), np.bool_)
    _hash_rows(np.ascontiguousarray(keys.T), order, of_columns, buckets, first, missing, ids, lacking)
    return ids, lacking
