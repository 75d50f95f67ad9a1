"""A count-min sketch of 64-bit keys: counts in fixed memory, which may be too large but never too small.

Source: Cormode and Muthukrishnan, "An Improved Data Stream Summary: The Count-Min Sketch and its Applications", Journal
of Algorithms 55, 2005. Additions commute, so the counts do not depend on the order of the keys in a batch.

Each part of the keys' hashes has counters of its own (see `key_parts`), so that ranks with different parts share none.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Ids
from hostdev.kernels.counter import hashed, key64
from hostdev.kernels.jit import kernel
from hostdev.kernels.key_directory import PARTS

_DEPTH = 4  # counters of a key; the smallest of them is the key's count


@kernel
def _add(keys, uses, sign, seeds, first, counts, totals):
    """Add the keys' uses, times `sign`, to their counters; then write each key's count.

    `counts` is uint32 [parts, depth, width], of the parts from `first` on.
    """
    width = np.uint64(counts.shape[2])
    for i in range(np.uint64(0), np.uint64(len(keys))):
        part = (hashed(0, keys[i]) >> np.uint64(56)) - np.uint64(first)
        for row in range(np.uint64(0), np.uint64(_DEPTH)):
            place = ((hashed(seeds[row], keys[i]) >> np.uint64(32)) * width) >> np.uint64(32)
            counts[part, row, place] += np.uint32(np.int64(sign) * np.int64(uses[i]))
    for i in range(np.uint64(0), np.uint64(len(keys))):
        part = (hashed(0, keys[i]) >> np.uint64(56)) - np.uint64(first)
        least = np.uint32(0xFFFFFFFF)
        for row in range(np.uint64(0), np.uint64(_DEPTH)):
            place = ((hashed(seeds[row], keys[i]) >> np.uint64(32)) * width) >> np.uint64(32)
            least = min(least, counts[part, row, place])
        totals[i] = least


class CountMinSketch:
    """Counts keys.

    Args:
        nbytes: Size of the counters of all parts, at least 64 KiB.
        seed: Seed of the hash functions.
        first: The first part whose keys are counted.
        end: One more than the last one.
    """

    def __init__(self, nbytes: int, seed: int, first: int = 0, end: int = PARTS) -> None:
        self._counts = np.zeros((end - first, _DEPTH, nbytes // (4 * _DEPTH * PARTS)), np.uint32)
        self._first = first
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Set the seed of the hash functions; the counters do not change."""
        self._seeds = np.array([key64(seed, "sketch", row) for row in range(_DEPTH)], np.uint64)

    @property
    def nbytes(self) -> int:
        """Size of the counters in bytes."""
        return self._counts.nbytes

    def add(self, keys: Ids, uses: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Add uses [N] of keys [N]; return the keys' counts, int64 [N]."""
        return self._change(keys, uses, 1)

    def subtract(self, keys: Ids, uses: npt.NDArray[np.int32]) -> None:
        """Undo an `add`."""
        self._change(keys, uses, -1)

    def without(self, added: Sequence[tuple[Ids, npt.NDArray[np.int32]]]) -> npt.NDArray[np.uint32]:
        """Return a copy of the counters, uint32 [any], as if these pairs of keys and uses had not been added."""
        counts = self._counts.copy()
        for keys, uses in added:
            _add(keys, uses, -1, self._seeds, self._first, counts, np.empty(len(keys), np.int64))
        return counts.reshape(-1)

    def restore(self, counts: npt.NDArray[np.uint32]) -> None:
        """Set the counters to those of all parts, uint32 [any], of a result of `without`."""
        parts = counts.reshape(PARTS, *self._counts.shape[1:])
        self._counts[:] = parts[self._first : self._first + len(self._counts)]

    def _change(self, keys: Ids, uses: npt.NDArray[np.int32], sign: int) -> npt.NDArray[np.int64]:
        totals = np.empty(len(keys), np.int64)
        _add(keys, uses, sign, self._seeds, self._first, self._counts, totals)
        return totals
