"""The gradient of a unique row: the sum over its uses in a batch, in order of occurrence, whatever the threads.

N uses, U unique rows, D columns.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import host_threads, parallel_for

_COLUMNS = 16  # one cache line of float32: threads that split the columns do not share lines
_ROWS = 1024


@kernel
def _sum_columns(start: Any, stop: Any, grads: Any, inverse: Any, out: Any) -> None:
    """Sum the columns [start, stop) of every row."""
    seen = 0
    for i in range(len(inverse)):
        u = inverse[i]
        if u == seen:  # the first use: rows are numbered in order of first occurrence
            seen += 1
            for j in range(start, stop):
                out[u, j] = grads[i, j]
        else:
            for j in range(start, stop):
                out[u, j] += grads[i, j]


@kernel
def _sum_rows(start: Any, stop: Any, grads: Any, inverse: Any, out: Any) -> None:
    """Sum the unique rows [start, stop), all their columns."""
    seen = start
    for i in range(len(inverse)):
        u = inverse[i]
        if u < start or u >= stop:
            continue
        if u == seen:
            seen += 1
            for j in range(out.shape[1]):
                out[u, j] = grads[i, j]
        else:
            for j in range(out.shape[1]):
                out[u, j] += grads[i, j]


def segment_sum(grads: npt.NDArray[np.float32], inverse: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
    """Sum the gradients of each unique row: out[u] = ((g_a + g_b) + g_c) + ... over its uses a < b < c < ...

    grads    float32 [N, D], one row per use
    inverse  int32 [N], the unique row of each use, numbered in order of first occurrence (see `unique`)
    out      float32 [U, D], overwritten
    """
    U, D = out.shape
    if D >= 2 * _COLUMNS:
        parallel_for(_sum_columns, D, grads, inverse, out, grain=_COLUMNS)
    else:
        parallel_for(_sum_rows, U, grads, inverse, out, grain=max(_ROWS, -(-U // host_threads())))
