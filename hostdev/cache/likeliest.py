"""The C rows with the largest counts of uses, found without copying the counts, which may be in a large file.

A row's key is the probability that a batch uses the row, or the count itself. A radix search over histograms of the
keys' digits finds the C-th largest key; of the rows with exactly that key, the first are taken.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import inline, kernel
from hostdev.kernels.pool import run_tasks

_DIGIT_BITS, _KEY_BITS, _CHANCE_BITS = 16, 64, 32  # the last: zero bits below a float32 probability in a key
_BY_COUNT = np.float32(0)
_PIECES, _PIECE = 16, 1 << 18  # chunks at a time, and rows per chunk


class Likeliest(NamedTuple):
    """The C rows with the largest keys: all rows with a key above `key`, and rows up to `last` with `key` itself."""

    counts: npt.NDArray[Any]  # [V], one per row
    per_use: np.float32  # a batch's uses divided by the sum of counts; 0: the count itself is the key
    key: np.uint64
    last: int
    above: float  # rows also need a larger count than this


def likeliest(
    counts: npt.NDArray[Any], capacity: int, per_use: np.float32 = _BY_COUNT, *, above: float = -np.inf
) -> Likeliest:
    """Return the `capacity` > 0 rows with the largest keys; see `Likeliest` for the arguments."""
    key, left = 0, capacity
    for shift in range(_KEY_BITS - _DIGIT_BITS, _CHANCE_BITS - 1 if per_use > 0 else -1, -_DIGIT_BITS):
        histograms = np.zeros((_PIECES, 1 << _DIGIT_BITS), np.int64)
        for pieces in _blocks(len(counts)):
            shared = (counts, per_use, np.uint64(key), np.uint64(shift), histograms)
            run_tasks([(_digits, start, stop, (*shared, i)) for i, (start, stop) in enumerate(pieces)])
        digits = histograms.sum(0)
        from_top = np.cumsum(digits[::-1])
        found = int(np.searchsorted(from_top, left))
        digit = len(digits) - 1 - found
        key, left = key | digit << shift, left - int(from_top[found] - digits[digit])
    return Likeliest(counts, per_use, np.uint64(key), _nth(counts, per_use, np.uint64(key), left), above)


def chance_at(key: np.uint64) -> np.float32:
    """Return the probability that a key encodes; the key must come from a probability, not a count."""
    bits = key ^ np.uint64(1 << 63) if key >> np.uint64(63) else ~key
    return np.uint32(bits >> np.uint64(_CHANCE_BITS)).view(np.float32)


def _blocks(rows: int) -> list[list[tuple[int, int]]]:
    """Return chunks of rows, grouped into short blocks so that interrupts are handled soon."""
    pieces = [(start, min(start + _PIECE, rows)) for start in range(0, rows, _PIECE)]
    return [pieces[i : i + _PIECES] for i in range(0, len(pieces), _PIECES)]


def _nth(counts: npt.NDArray[Any], per_use: np.float32, key: np.uint64, n: int) -> int:
    """Return the n-th row with this key; n counts from 1."""
    for pieces in _blocks(len(counts)):
        found = np.zeros(_PIECES, np.int64)
        shared = (counts, per_use, key, found)
        run_tasks([(_alike, start, stop, (*shared, i)) for i, (start, stop) in enumerate(pieces)])
        if found.sum() >= n:
            piece = int(np.searchsorted(np.cumsum(found), n))
            return int(_find_nth(*pieces[piece], counts, per_use, key, n - found[:piece].sum()))
        n -= int(found.sum())
    raise AssertionError("no row has this key")


@inline
def chance_by(count: Any, per_use: Any) -> Any:
    """Return the probability that a batch uses a row; `per_use` is the batch's uses divided by the sum of counts."""
    return np.float32(1) - np.exp(np.float32(-per_use * np.float32(count)))


@inline
def _key_of(count: Any, per_use: Any) -> Any:
    """Return a row's key: the bits of its probability or count as an integer with the same order; 0 for NaN."""
    if per_use > 0:
        chance = chance_by(count, per_use) + np.float32(0)  # turns -0 into 0
        bits = np.uint64(np.float32(chance).view(np.uint32)) << np.uint64(_CHANCE_BITS)
        is_number = chance == chance
    else:
        value = np.float64(count) + 0.0
        bits = np.float64(value).view(np.uint64)
        is_number = value == value
    ascending = ~bits if bits >> np.uint64(63) else bits | np.uint64(1 << 63)
    if per_use > 0:
        ascending = ascending >> np.uint64(_CHANCE_BITS) << np.uint64(_CHANCE_BITS)
    return ascending if is_number else np.uint64(0)


@kernel
def chances(start: Any, stop: Any, counts: Any, per_use: Any, out: Any) -> None:
    """Write the probabilities that a batch uses the rows [start, stop)."""
    for row in range(np.uint64(start), np.uint64(stop)):
        out[row] = chance_by(counts[row], per_use)


@kernel
def told(
    start: Any,
    stop: Any,
    ids: Any,
    positions: Any,
    counts: Any,
    per_use: Any,
    key: Any,
    last: Any,
    above: Any,
    chances: Any,
    members: Any,
) -> None:
    """Write, for each of ids[start:stop] that has no position, its probability of use, and whether `Likeliest` has it.

    Args:
        chances: Output, float32 [U]: the probability that a batch uses the row, by its count.
        members: Output, bool [U]: whether the row is one of `Likeliest`.
    """
    for i in range(np.uint64(start), np.uint64(stop)):
        if positions[i] < 0:
            count = counts[np.uint64(ids[i])]
            of_row = _key_of(count, per_use)
            chances[i] = chance_by(count, per_use)
            members[i] = ((of_row > key) | ((of_row == key) & (np.int64(ids[i]) <= last))) & (count > above)


@kernel
def _digits(
    start: Any, stop: Any, counts: Any, per_use: Any, key: Any, shift: Any, histograms: Any, piece: Any
) -> None:
    """Count the digits at bit `shift` of the keys of rows [start, stop) whose higher digits equal those of `key`."""
    histogram = histograms[piece]
    for row in range(np.uint64(start), np.uint64(stop)):
        digit = (_key_of(counts[row], per_use) ^ key) >> shift
        if digit < np.uint64(1 << _DIGIT_BITS):
            histogram[digit] += 1


@kernel
def _alike(start: Any, stop: Any, counts: Any, per_use: Any, key: Any, found: Any, piece: Any) -> None:
    """Add the number of rows in [start, stop) with this key to found[piece]."""
    for row in range(np.uint64(start), np.uint64(stop)):
        found[piece] += _key_of(counts[row], per_use) == key


@kernel
def _find_nth(start: Any, stop: Any, counts: Any, per_use: Any, key: Any, n: Any) -> Any:
    """Return the n-th row of [start, stop) with this key, where n counts from 1; -1 if there is none."""
    for row in range(np.uint64(start), np.uint64(stop)):
        n -= _key_of(counts[row], per_use) == key
        if n == 0:
            return np.int64(row)
    return -1
