"""Counter-based random numbers: a value is a pure function of a key and a counter."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint32, uint64

from hostdev.kernels.jit import inline, kernel

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_DIGIT = 11  # bits of a radix digit: the counts fit the L1 cache, and few hashes agree in two digits


def mix64(x: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Scramble an array of 64-bit counters of any shape (SplitMix64's finalizer: Steele, Lea & Flood, OOPSLA 2014)."""
    z = np.asarray(x, np.uint64) + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key64(seed: int, *names: str | int) -> int:
    """Derive a 64-bit key from a seed and names that say what the key is for; all platforms derive the same key."""
    text = "\0".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def uniform(key: int, counters: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return a uniform number in [0, 1), with 53 random bits, for each counter."""
    bits = mix64(counters.astype(np.uint64) ^ np.uint64(key & _MASK))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@inline
def hashed(key, counter):
    """Return mix64(key ^ counter) of one counter; for use in kernels."""
    x = uint64((uint64(key) ^ uint64(counter)) + uint64(_GAMMA))
    x = uint64((x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9))
    x = uint64((x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB))
    return uint64(x ^ (x >> uint64(31)))


@inline
def mix32(x):
    """Scramble a 32-bit number; for use in kernels ("lowbias32": Wellons, Hash Prospector, 2018)."""
    x = uint32(uint32(x ^ (x >> uint32(16))) * uint32(0x7FEB352D))
    x = uint32(uint32(x ^ (x >> uint32(15))) * uint32(0x846CA68B))
    return uint32(x ^ (x >> uint32(16)))


@kernel
def _sort_by_hash(key, half, order):
    """Write the numbers 0, 1, ... to `order`, sorted by hash; `half` is scratch memory.

    Two radix passes sort by the hash's second-highest and then by its highest digit; insertion sort does the rest.
    """
    n, one, mask = np.uint64(len(order)), np.uint64(1), np.uint64((1 << _DIGIT) - 1)
    first, second = np.uint64(64 - _DIGIT), np.uint64(64 - 2 * _DIGIT)
    ends = np.zeros((2, (1 << _DIGIT) + 1), np.int64)
    for i in range(n):
        found = hashed(key, i)
        ends[0, (found >> first) + one] += 1
        ends[1, ((found >> second) & mask) + one] += 1
    for digit in range(1, 1 << _DIGIT):
        ends[0, digit] += ends[0, digit - 1]
        ends[1, digit] += ends[1, digit - 1]
    for i in range(n):
        digit = (hashed(key, i) >> second) & mask
        half[np.uint64(ends[1, digit])] = i
        ends[1, digit] += 1
    for i in range(n):
        digit = hashed(key, half[i]) >> first
        order[np.uint64(ends[0, digit])] = half[i]
        ends[0, digit] += 1
    largest = np.uint64(0)
    for i in range(n):
        item = order[i]
        found = hashed(key, item)
        if found >= largest:
            largest = found
            continue
        place = np.uint64(i)
        while place > np.uint64(0) and hashed(key, order[place - one]) > found:
            order[place] = order[place - one]
            place -= one
        order[place] = item


def permutation(n: int, key: int) -> npt.NDArray[np.int64]:
    """Return the numbers 0 .. n - 1 in a random order, int64 [n].

    The result is `np.argsort(mix64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)))`; all hashes are different. While
    it runs, the function needs another 8 bytes per number.
    """
    half, order = np.empty(n, np.int64), np.empty(n, np.int64)
    _sort_by_hash(np.uint64(key & _MASK), half, order)
    return order
