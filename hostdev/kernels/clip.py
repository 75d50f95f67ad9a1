"""Clipping of rows' gradients by their norm; `core.optimizers` has the formula and its source."""

import numpy as np

from hostdev.kernels.adagrad import LANES, mean_square
from hostdev.kernels.jit import kernel


@kernel
def clip_rows(start, stop, source, grads, limit, out):
    """Write clipped gradients: out[i] = grads[source[start + i]] * sqrt(limit / q), or unscaled if q <= limit.

    Args:
        source: int32 [U], rows of `grads`.
        grads: float32 [any, D].
        limit: float32, the largest mean square q of a row that stays as it is.
        out: float32 [stop - start, D]; may be the same rows as those of `grads`.
    """
    lanes, columns = np.empty(LANES, np.float32), np.float32(grads.shape[1])
    first = np.uint64(start)
    for i in range(first, np.uint64(stop)):
        grad, to = grads[np.uint64(source[i])], out[i - first]
        mean, factor = mean_square(grad, lanes, columns), np.float32(1)
        if mean > limit:
            factor = np.sqrt(limit / mean)
        for j in range(len(grad)):
            to[j] = grad[j] * factor
