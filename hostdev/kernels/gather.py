"""Gathering of a row, times a weight, for each occurrence of an id, on devices that share the host's memory.

Scaling and rounding to bfloat16 happen in the same pass; separate operations would each move all rows through memory.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.bfloat16 import as_stored
from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import parallel_for

_GRAIN = 512


@kernel
def _scale(start, stop, rows, inverse, weights, out):
    for i in range(np.uint64(start), np.uint64(stop)):
        row, to, weight = rows[np.uint64(inverse[i])], out[i], weights[i]
        for j in range(len(row)):
            to[j] = as_stored(to, np.float32(row[j] * weight))


def gather_scaled(
    rows: npt.NDArray[np.float32],
    inverse: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    out: npt.NDArray[Any],
) -> None:
    """Write each occurrence's row times its weight: out[i] = rows[inverse[i]] * weights[i].

    Args:
        rows: float32 [U, D].
        inverse: int32 [N], each in [0, U).
        weights: float32 [N].
        out: float32 [N, D], or bfloat16 as uint16 [N, D], written.
    """
    parallel_for(_scale, len(inverse), rows, inverse, weights, out, grain=_GRAIN)
