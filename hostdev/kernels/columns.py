"""Writing columns of a row-major array, hashing keys to ids, and narrowing float64 columns to float32."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.counter import hashed
from hostdev.kernels.jit import kernel


@kernel
def _place(codes, values, rows, column):
    at = np.uint64(column)
    for i in range(np.uint64(0), np.uint64(len(codes))):
        rows[i, at] = values[np.uint64(codes[i])]


@kernel
def _copy(values, rows, column):
    at = np.uint64(column)
    for i in range(np.uint64(0), np.uint64(len(values))):
        rows[i, at] = values[i]


def place_column(codes: npt.NDArray[Any], values: npt.NDArray[Any] | None, rows: npt.NDArray[Any], column: int) -> None:
    """Write values[codes], or codes [n] itself if `values` is None, to rows[:, column]; `rows` is [n, C]."""
    if values is None:
        _copy(codes, rows, column)
    else:
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


@kernel
def _hash(keys, of_column, buckets, first, ids):
    for i in range(np.uint64(0), np.uint64(len(keys))):
        ids[i] = np.int64(hashed(of_column, keys[i]) % buckets) + first


def hash_keys(
    keys: npt.NDArray[np.int64], of_column: np.uint64, buckets: np.uint64, first: int
) -> npt.NDArray[np.int64]:
    """Return the id of each of the keys [N], int64 [N]: first + (mix64(key ^ of_column) mod buckets)."""
    ids = np.empty(len(keys), np.int64)
    _hash(keys, of_column, buckets, first, ids)
    return ids
