"""The dense network's input from unique rows, and its gradient back, where the device's memory is the host's.

Scaling, rounding to bfloat16 and the sum per row are done on the way: as operations of their own each would carry all
uses through memory once more. bfloat16 is stored as its 16 bits, uint16.

N uses, U unique rows, D columns; one float32 weight per use.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types, uint16, uint32
from numba.extending import overload

from hostdev.kernels.jit import kernel, prefetch_to_read_once, prefetch_to_write
from hostdev.kernels.pool import parallel_for
from hostdev.kernels.segment import first_seen

_GRAIN = 512
_SUMS_AHEAD, _GRADS_AHEAD = 12, 24  # uses


def _to_float32(value: Any) -> Any:
    """A stored number as float32; which kind it is, the kernel's argument types say."""
    raise NotImplementedError("compiled only")


@overload(_to_float32, inline="always")
def _to_float32_of(value: Any) -> Any:
    if isinstance(value, types.Float):

        def keep(value: Any) -> Any:
            return value

        return keep

    def widen_bfloat16(value: Any) -> Any:
        return np.uint32(uint32(value) << uint32(16)).view(np.float32)

    return widen_bfloat16


def _as_stored(to: Any, x: Any) -> Any:
    """x rounded to what the array `to` stores."""
    raise NotImplementedError("compiled only")


@overload(_as_stored, inline="always")
def _as_stored_in(to: Any, x: Any) -> Any:
    if isinstance(to.dtype, types.Float):

        def keep(to: Any, x: Any) -> Any:
            return x

        return keep

    def round_to_bfloat16(to: Any, x: Any) -> Any:
        # To the nearest, ties to even, as torch rounds; NaN becomes the quiet NaN.
        bits = np.float32(x).view(np.uint32)
        rounded = uint32(uint32(bits + uint32(0x7FFF) + uint32((bits >> uint32(16)) & uint32(1))) >> uint32(16))
        return uint16(0x7FC0) if x != x else uint16(rounded)

    return round_to_bfloat16


@kernel
def _scale(start: Any, stop: Any, rows: Any, inverse: Any, weights: Any, out: Any) -> None:
    for i in range(np.uint64(start), np.uint64(stop)):
        row, to, weight = rows[np.uint64(inverse[i])], out[i], weights[i]
        for j in range(len(row)):
            to[j] = _as_stored(to, np.float32(row[j] * weight))


@kernel
def _sum(seen: Any, grads: Any, inverse: Any, weights: Any, out: Any) -> None:
    D = grads.shape[1]
    uses, seen, one = np.uint64(len(inverse)), np.uint64(seen), np.uint64(1)
    for i in range(np.uint64(0), uses):
        prefetch_to_read_once(grads, i + np.uint64(_GRADS_AHEAD), grads.strides[0])
        if i + np.uint64(_SUMS_AHEAD) < uses:
            prefetch_to_write(out, inverse[i + np.uint64(_SUMS_AHEAD)], D * 4)
        row, weight = np.uint64(inverse[i]), weights[i]
        total, grad = out[row], grads[i]
        if row == seen:
            seen += one
            for j in range(D):
                total[j] = _to_float32(grad[j]) * weight
        else:
            for j in range(D):
                total[j] += _to_float32(grad[j]) * weight


def gather_scaled(
    rows: npt.NDArray[np.float32],
    inverse: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    out: npt.NDArray[Any],
) -> None:
    """Write each use's row times its weight: out[i] = rows[inverse[i]] * weights[i].

    rows     float32 [U, D]
    inverse  int32 [N], each in [0, U)
    weights  float32 [N]
    out      float32 [N, D], or uint16 [N, D] for bfloat16
    """
    parallel_for(_scale, len(inverse), rows, inverse, weights, out, grain=_GRAIN)


def segment_sum_scaled(
    grads: npt.NDArray[Any],
    inverse: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    *,
    in_order: bool = True,
) -> None:
    """Sum grads[i] * weights[i] over the uses of each row in order of occurrence, each operation in float32.

    grads     float32 [N, D], or uint16 [N, D] for bfloat16
    inverse   int32 [N], the unique row of each use; every row has one
    weights   float32 [N]
    out       float32 [U, D], overwritten
    in_order  as in `segment.segment_sum`

    One thread, as in `segment`; the network around it takes a hundred times as long.
    """
    _sum(first_seen(out, in_order), grads, inverse, weights, out)
