"""How large the values of an array are; a value that is not a number counts as infinite."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint32

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import KernelTask, ranges, run_tasks

_GRAIN = 1 << 15  # values: 128 KiB
_INFINITE = np.uint32(0x7F800000)


@kernel
def _largest(start: Any, stop: Any, bits: Any, found: Any, piece: Any) -> None:
    """Write the largest bits of absolute values, which are in the order of the values."""
    largest = uint32(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        largest = max(largest, bits[i] & uint32(0x7FFFFFFF))
    found[np.uint64(piece)] = largest


def largest(values: npt.NDArray[np.float32]) -> float:
    """Return the largest absolute value of an array float32, any shape, C-contiguous; inf for NaN, 0 for none."""
    n = values.size
    if n == 0:
        return 0.0
    pieces = len(ranges(n, _GRAIN))
    found = np.zeros(pieces, np.uint32)
    run_tasks([KernelTask(_largest, n, _GRAIN, pieces, (values.reshape(-1).view(np.uint32), found))])
    return float(np.minimum(found.max(), _INFINITE).view(np.float32))
