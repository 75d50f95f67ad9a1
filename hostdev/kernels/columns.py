"""Columns of numbers: writing them to a row-major array, hashing keys to ids, and narrowing float64 to float32.

The module also gathers rows and lists from chunked arrays, such as a file's record batches.

A "place" is an int64 that locates a row: the low 40 bits are the row's number within its chunk, and the other bits are
the chunk's number.

Shapes: P chunks with R rows in total, n places, D columns.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.counter import hashed
from hostdev.kernels.jit import array_at, inline, kernel, prefetch_to_read
from hostdev.kernels.pool import Task, get_grain, parallel_for, tasks_over

_TILE = 64  # rows that are hashed at a time
Places = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.int64]
_ROW_BITS = 40  # low bits of a place, which hold the row
_AHEAD = 8  # prefetch distance in rows
_GRAIN = 4096  # places per range


@kernel
def _place(codes, values, rows, column):
    at = np.uint64(column)
    for i in range(np.uint64(0), np.uint64(len(codes))):
        rows[i, at] = values[np.uint64(codes[i])]


def place_column(codes: npt.NDArray[Any], values: npt.NDArray[Any], rows: npt.NDArray[Any], column: int) -> None:
    """Write values[codes] to rows[:, column]; `codes` is [n], and `rows` is [n, C]."""
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
    """Hash the keys of rows in the given order, a few rows at a time, so that these rows stay in the L1 cache.

    Args:
        keys: int64 [C, N].
        order: int64 [N], row numbers in the order of the ids.
        of_columns: uint64 [C], the key of each column's hash.
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
    """Return ids [N, C] of rows in the given order, computed as in `hash_keys`, and which values are missing, [C, N].

    Args:
        keys: int64 [N, C]; fastest if the keys of a column are contiguous.
        order: int64 [N], row numbers in the order of the ids.
        of_columns: uint64 [C], the key of each column's hash.
        buckets: Number of buckets.
        first: The id of bucket 0.
        missing: int64 [C], each column's key of a missing value.
        dtype: The dtype of the ids.
    """
    ids, lacking = np.empty((len(order), len(of_columns)), dtype), np.empty((len(of_columns), len(order)), np.bool_)
    _hash_rows(np.ascontiguousarray(keys.T), order, of_columns, buckets, first, missing, ids, lacking)
    return ids, lacking


def get_addresses(pieces: Sequence[npt.NDArray[Any]]) -> Addresses:
    """Return the addresses of P C-contiguous arrays, int64 [P]; the caller must keep the arrays alive."""
    assert all(piece.flags.c_contiguous for piece in pieces)
    return np.array([piece.ctypes.data for piece in pieces], np.int64)


@inline
def _at(addresses, place, nbytes):
    """Return the address of the row at a place; a row has `nbytes` bytes."""
    piece, row = place >> np.int64(_ROW_BITS), place & np.int64((1 << _ROW_BITS) - 1)
    return addresses[np.uint64(piece)] + row * np.int64(nbytes)


@kernel
def _locate(start, stop, rows, first, places):
    for i in range(np.uint64(start), np.uint64(stop)):
        row = rows[i]
        low, high = np.uint64(0), np.uint64(len(first))
        while high - low > np.uint64(1):
            middle = (low + high) >> np.uint64(1)
            if first[middle] <= row:
                low = middle
            else:
                high = middle
        places[i] = (np.int64(low) << np.int64(_ROW_BITS)) | (row - first[low])


def places_of(rows: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> Places:
    """Return the places of rows, int64 [n]; if there is only one chunk, this is `rows` itself.

    Args:
        rows: int64 [n], row numbers in the concatenated chunks, each in [0, R).
        first: int64 [P], ascending from 0: the first row of each chunk.
    """
    if len(first) == 1:
        return rows
    places = np.empty(len(rows), np.int64)
    parallel_for(_locate, len(rows), rows, first, places, grain=_GRAIN)
    return places


@kernel
def _take(start, stop, places, addresses, out):
    D = out.shape[1]
    nbytes = D * out.itemsize
    for i in range(np.uint64(start), np.uint64(stop)):
        ahead = i + np.uint64(_AHEAD)
        if ahead < np.uint64(stop):
            prefetch_to_read(array_at(_at(addresses, places[ahead], nbytes), 1, np.uint8), 0, nbytes)
        row, to = array_at(_at(addresses, places[i], nbytes), D, out.dtype), out[i]
        for j in range(D):
            to[j] = row[j]


def take_tasks(places: Places, addresses: Addresses, out: npt.NDArray[Any]) -> list[Task]:
    """Return tasks that copy the row at places[i] to out[i]; one `run_tasks` can run them together with other tasks.

    Args:
        places: int64 [n].
        addresses: int64 [P], the address of each chunk: an array [any, D] with the dtype of `out`.
        out: [n, D], C-contiguous, written.
    """
    return tasks_over(_take, len(places), places, addresses, out, grain=get_grain(out.strides[0]))


@kernel
def _measure(start, stop, places, offsets, lengths):
    for i in range(np.uint64(start), np.uint64(stop)):
        edges = array_at(_at(offsets, places[i], 8), 2, np.int64)
        lengths[i] = edges[1] - edges[0]


@kernel
def _take_lists(start, stop, places, offsets, values, begins, out):
    for i in range(np.uint64(start), np.uint64(stop)):
        first = array_at(_at(offsets, places[i], 8), 1, np.int64)[0]
        piece = np.uint64(places[i] >> np.int64(_ROW_BITS))
        begin = np.uint64(begins[i])
        size = np.uint64(begins[i + np.uint64(1)]) - begin
        found = array_at(values[piece] + first * out.itemsize, size, out.dtype)
        for j in range(size):
            out[begin + j] = found[j]


def length_tasks(places: Places, offsets: Addresses, lengths: npt.NDArray[np.int32]) -> list[Task]:
    """Return tasks that write the length of the list at each place.

    Args:
        places: int64 [n].
        offsets: int64 [P], the address of each chunk's offsets: int64 [rows + 1], where each list begins in the chunk's
            values, and where the last list ends.
        lengths: int32 [n], written.
    """
    return tasks_over(_measure, len(places), places, offsets, lengths, grain=_GRAIN)


def list_tasks(
    places: Places, offsets: Addresses, values: Addresses, begins: npt.NDArray[np.int64], out: npt.NDArray[Any]
) -> list[Task]:
    """Return tasks that copy the list at places[i] to out[begins[i] : begins[i + 1]].

    Args:
        places: int64 [n].
        offsets: As for `length_tasks`.
        values: int64 [P], the address of each chunk's values, which have the dtype of `out`.
        begins: int64 [n + 1], where each list begins in `out`, and where the last list ends.
        out: 1-dimensional, written: the values of all lists.
    """
    n = len(places)
    mean = (int(begins[-1]) - int(begins[0])) * out.itemsize // max(1, n)
    return tasks_over(_take_lists, n, places, offsets, values, begins, out, grain=get_grain(mean))
