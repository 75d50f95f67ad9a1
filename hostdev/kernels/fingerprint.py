"""64-bit hashes of rows; comparing the hashes of two runs finds the first row that differs, without storing rows."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import parallel_for

_GRAIN = 256


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
    parallel_for(_hash_rows, len(ids), block.view(np.uint32), ids, out, grain=_GRAIN)
    return out
