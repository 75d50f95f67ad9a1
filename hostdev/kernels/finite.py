"""The largest absolute value in an array; NaN counts as infinite."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import uint32

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import KernelTask, ranges, run_tasks

_GRAIN = 1 << 15  # values: 128 KiB
_INFINITE = np.uint32(0x7F800000)


@kernel
def _largest(start, stop, bits, found, piece):
    """Write the largest bit pattern of the absolute values: that of the largest absolute value, or of a NaN."""
    largest = uint32(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        largest = max(largest, bits[i] & uint32(0x7FFFFFFF))
    found[np.uint64(piece)] = largest


def largest(values: npt.NDArray[np.float32]) -> float:
    """Return the largest absolute value in a C-contiguous float32 array: inf if it has a NaN, 0 if it is empty."""
    return largest_of_each([values])[0]


def largest_of_each(arrays: Sequence[npt.NDArray[np.float32]]) -> list[float]:
    """Return `largest` for each of several arrays; all host threads share the work."""
    tasks, parts = [], []
    for values in arrays:
        n, pieces = values.size, max(1, len(ranges(values.size, _GRAIN)))
        found, bits = np.zeros(pieces, np.uint32), values.reshape(-1).view(np.uint32)
        parts.append(found)
        if pieces == 1:  # waking threads would take longer
            _largest(0, n, bits, found, 0)
        else:
            tasks.append(KernelTask(_largest, n, _GRAIN, pieces, (bits, found)))
    if tasks:
        run_tasks(tasks)
    return [float(np.minimum(found.max(), _INFINITE).view(np.float32)) for found in parts]
