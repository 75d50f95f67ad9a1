"""Counter-based random numbers: a value is a pure function of a key and a counter, never of a draw's order."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix64(x: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Scramble an array of 64-bit counters, any shape (SplitMix64's finalizer: Steele, Lea & Flood, OOPSLA 2014)."""
    z = np.asarray(x, np.uint64) + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key64(seed: int, *names: str | int) -> int:
    """Derive a 64-bit key from a seed and the names of what it is for, the same on every platform and run."""
    text = "\0".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def uniform(key: int, counters: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return uniform numbers in [0, 1) with 53 random bits, one per counter."""
    bits = mix64(counters.astype(np.uint64) ^ np.uint64(key & _MASK))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, key: int) -> npt.NDArray[np.int64]:
    """Return a random order of range(n): a stable sort by hash, so it does not change with a library's version."""
    return np.argsort(mix64(np.arange(n, dtype=np.uint64) ^ np.uint64(key & _MASK)), kind="stable")
