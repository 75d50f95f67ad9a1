"""Clipping of each row's gradient by its norm; `core.optimizers` has the formula and its source."""

import numpy as np

from hostdev.kernels.adagrad import LANES, mean_square
from hostdev.kernels.arrays import Rows
from hostdev.kernels.buffers import identity
from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import get_grain, parallel_for


@kernel
def clip_rows(start, stop, source, grads, limit, out):
    """Write clipped gradients: a gradient with a mean square q above `limit` is multiplied by sqrt(limit / q).

    Args:
        source: int32 [U]: out[i] is the clipped grads[source[i]].
        grads: float32 [any, D].
        limit: float32, the largest mean square of a gradient that is not scaled.
        out: float32 [U, D], written; may be `grads` itself if source[i] = i for each i.
    """
    lanes, columns = np.empty(LANES, np.float32), np.float32(grads.shape[1])
    for i in range(np.uint64(start), np.uint64(stop)):
        grad, to = grads[np.uint64(source[i])], out[i]
        mean, factor = mean_square(grad, lanes, columns), np.float32(1)
        if mean > limit:
            factor = np.sqrt(limit / mean)
        for j in range(len(grad)):
            to[j] = grad[j] * factor


def clipped(grads: Rows, limit: np.float32) -> Rows:
    """Return gradients [U, D] with each row clipped to a mean square of at most `limit`, using all threads."""
    out = np.empty_like(grads)
    parallel_for(clip_rows, len(grads), identity(len(grads)), grads, limit, out, grain=get_grain(grads.strides[0]))
    return out
