"""A fingerprint of bytes, to find out whether memory has changed; not for data that somebody forges."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint32

from hostdev.kernels.jit import kernel

_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # xxHash32's: odd, so that multiplication loses nothing


@kernel
def _sums(words: Any, sums: Any) -> None:
    """Write two sums, uint32 [2], over words, uint32 [N], each scrambled together with its place.

    A word's terms are bijections of it: one changed word always changes both sums.
    """
    first, second = uint32(0), uint32(0)
    for i in range(np.uint64(len(words))):
        x = uint32(uint32(words[i] ^ uint32(uint32(i) * uint32(_PRIMES[0]))) * uint32(_PRIMES[1]))
        x = uint32(x ^ uint32(x >> uint32(15)))
        first = uint32(first + x)
        x = uint32(x * uint32(_PRIMES[2]))
        second = uint32(second + uint32(x ^ uint32(x >> uint32(13))))
    sums[0], sums[1] = first, second


def fingerprint(data: npt.NDArray[np.uint8]) -> bytes:
    """Return a fingerprint of C-contiguous bytes [N]: two sums over words of 4, and the last bytes as they are."""
    whole = len(data) // 4 * 4
    words = data[:whole] if data.ctypes.data % 4 == 0 else data[:whole].copy()
    sums = np.empty(2, np.uint32)
    _sums(words.view(np.uint32), sums)
    return sums.tobytes() + data[whole:].tobytes()
