"""Conversions for kernels whose arrays are float32 or bfloat16 (as uint16); an array's dtype selects the conversion."""

from typing import Any

import numpy as np
from numba import types, uint16, uint32
from numba.extending import overload


def to_float32(value: Any) -> Any:
    """Convert a stored number, float32 or bfloat16 (as uint16), to float32."""
    raise NotImplementedError("only compiled kernels can call this function")


@overload(to_float32, inline="always")
def _overload_to_float32(value: Any) -> Any:
    if isinstance(value, types.Float):

        def keep(value: Any) -> Any:
            return value

        return keep

    def widen_bfloat16(value: Any) -> Any:
        return np.uint32(uint32(value) << uint32(16)).view(np.float32)

    return widen_bfloat16


def as_exact(to: Any, x: Any) -> Any:
    """Return x in the format of the array `to`, float32 or bfloat16, which must be able to represent x exactly."""
    raise NotImplementedError("only compiled kernels can call this function")


@overload(as_exact, inline="always")
def _overload_as_exact(to: Any, x: Any) -> Any:
    if isinstance(to.dtype, types.Float):

        def keep(to: Any, x: Any) -> Any:
            return x

        return keep

    def cut(to: Any, x: Any) -> Any:
        return uint16(np.float32(x).view(np.uint32) >> uint32(16))

    return cut


def as_stored(to: Any, x: Any) -> Any:
    """Return x rounded to the format of the array `to`, float32 or bfloat16."""
    raise NotImplementedError("only compiled kernels can call this function")


@overload(as_stored, inline="always")
def _overload_as_stored(to: Any, x: Any) -> Any:
    if isinstance(to.dtype, types.Float):

        def keep(to: Any, x: Any) -> Any:
            return x

        return keep

    def round_to_bfloat16(to: Any, x: Any) -> Any:
        # Round to nearest, ties to even, like torch; NaN becomes the quiet NaN.
        bits = np.float32(x).view(np.uint32)
        rounded = uint32(uint32(bits + uint32(0x7FFF) + uint32((bits >> uint32(16)) & uint32(1))) >> uint32(16))
        return uint16(0x7FC0) if x != x else uint16(rounded)

    return round_to_bfloat16
