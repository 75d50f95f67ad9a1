"""64-bit hashes: XXH64 with seed 0 for texts, and a variant of FNV-1a for rows.

XXH64: Collet, "xxHash fast digest algorithm", specification 0.1.1.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import inline, kernel
from hostdev.kernels.pool import parallel_for

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
_GRAIN = 4096  # texts per range
_ROWS_PER_RANGE = 256


@inline
def _rotate(x, bits):
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@inline
def _read(data, at, nbytes):
    """Return the little-endian number in data[at : at + nbytes]."""
    found = np.uint64(0)
    for i in range(nbytes):
        found |= np.uint64(data[at + np.uint64(i)]) << np.uint64(8 * i)
    return found


@inline
def first_lanes():
    """Return the initial values of the four lanes; word i belongs to lane i % 4."""
    return _P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1


@inline
def add_to_lane(lane, word):
    """Return a lane after one more word of 8 bytes."""
    return _rotate(lane + word * _P2, 31) * _P1


@inline
def merge_lanes(a, b, c, d):
    """Return the hash of the lanes' words; the caller then adds the length in bytes, and the words left over."""
    found = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
    found = (found ^ add_to_lane(np.uint64(0), a)) * _P1 + _P4
    found = (found ^ add_to_lane(np.uint64(0), b)) * _P1 + _P4
    found = (found ^ add_to_lane(np.uint64(0), c)) * _P1 + _P4
    return (found ^ add_to_lane(np.uint64(0), d)) * _P1 + _P4


@inline
def add_word(found, word):
    """Return the hash after one of the words that are left over."""
    return _rotate(found ^ add_to_lane(np.uint64(0), word), 27) * _P1 + _P4


@inline
def finish(found):
    """Return the final hash."""
    found = (found ^ (found >> np.uint64(33))) * _P2
    found = (found ^ (found >> np.uint64(29))) * _P3
    return found ^ (found >> np.uint64(32))


@kernel
def _hash(start, stop, offsets, data, hashes):
    eight, four, one = np.uint64(8), np.uint64(4), np.uint64(1)
    for i in range(np.uint64(start), np.uint64(stop)):
        at, end = np.uint64(offsets[i]), np.uint64(offsets[i + one])
        length = end - at
        if length >= np.uint64(32):
            a, b, c, d = first_lanes()
            while end - at >= np.uint64(32):
                a = add_to_lane(a, _read(data, at, 8))
                b = add_to_lane(b, _read(data, at + eight, 8))
                c = add_to_lane(c, _read(data, at + np.uint64(16), 8))
                d = add_to_lane(d, _read(data, at + np.uint64(24), 8))
                at += np.uint64(32)
            found = merge_lanes(a, b, c, d)
        else:
            found = _P5
        found += length
        while end - at >= eight:
            found = add_word(found, _read(data, at, 8))
            at += eight
        if end - at >= four:
            found = _rotate(found ^ (_read(data, at, 4) * _P1), 23) * _P2 + _P3
            at += four
        while at < end:
            found = _rotate(found ^ (np.uint64(data[at]) * _P5), 11) * _P1
            at += one
        hashes[i] = finish(found)


def xxh64(offsets: npt.NDArray[Any], data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the hashes of N texts, uint64 [N].

    Args:
        offsets: int32 or int64 [N + 1], where each text begins in `data`, and where the last one ends.
        data: uint8 [any], the texts' bytes.
    """
    hashes = np.empty(len(offsets) - 1, np.uint64)
    parallel_for(_hash, len(hashes), offsets, data, hashes, grain=_GRAIN)
    return hashes


@kernel
def _hash_rows(start, stop, words, ids, out):
    for i in range(np.uint64(start), np.uint64(stop)):
        row = words[np.uint64(ids[i])]
        for s in range(row.shape[0]):
            h = np.uint64(0xCBF29CE484222325)
            for j in range(row.shape[1]):
                h = (h ^ np.uint64(row[s, j])) * np.uint64(0x100000001B3)
                h ^= h >> np.uint64(29)
            out[i, s] = h


def hash_rows(block: npt.NDArray[np.float32], ids: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return a hash for each of the S arrays of each row: FNV-1a over 32-bit words, plus a shift to spread high bits.

    Args:
        block: float32 [V, S, D].
        ids: int32 or int64 [U], the rows to hash, each in [0, V).

    Returns:
        The hashes, uint64 [U, S].
    """
    out = np.empty((len(ids), block.shape[1]), np.uint64)
    parallel_for(_hash_rows, len(ids), block.view(np.uint32), ids, out, grain=_ROWS_PER_RANGE)
    return out
