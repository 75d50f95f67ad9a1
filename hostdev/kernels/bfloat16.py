"""bfloat16: conversions in kernels, formats of stored rows, and rounding, which is stochastic or to the nearest value.

An array's dtype, float32 or bfloat16 (as uint16), selects the conversion. A table stores each plane of a row in one of
the formats; a plane is the row's weights, or one slot of D values. 8-bit formats are rounded in the same way.

A new value between two bfloat16 numbers is rounded up or down, with probabilities that preserve the mean. So updates
far smaller than the gap between the two numbers are not lost. bits(rounded) = (bits(x) + r) with the low 16 bits
cleared, r in [0, 2^16). Exact values are unchanged, including infinities; NaN becomes the quiet NaN. Sources: Gupta et
al., "Deep Learning with Limited Numerical Precision", ICML 2015; Zamirai et al., "Revisiting BFloat16 Training", 2020.

r is a pure function of (key of the table's step, row id, plane, column): a 32-bit hash yields r for a pair of columns,
16 bits for each. r does not depend on threads, order, rank or the row's address. 8-bit slots use the same r
(`eight_bits`).

Shapes: N or U rows of dimension D, S optimizer slots of D values. Plane 0 of a row has its weights, and plane 1 + s has
its slot s.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types, uint16, uint32, uint64
from numba.extending import intrinsic

from hostdev.kernels.arrays import AnyIds, Rows
from hostdev.kernels.counter import hashed, mix32
from hostdev.kernels.eight_bits import round_plane, to_nearest
from hostdev.kernels.jit import bare, bare_bits, inline_code, kernel
from hostdev.kernels.plane_formats import BFLOAT16, EIGHT_BITS, FLOAT32, UNSIGNED_8
from hostdev.kernels.pool import get_grain, parallel_for

Bfloat16 = npt.NDArray[np.uint16]
_WORD, _HALF = ir.IntType(32), ir.IntType(16)
WEYL = 0x9E3779B9  # difference between the counters of adjacent pairs of columns


def _to_float32(typing_context: Any, value: Any) -> Any:
    """Convert a stored number, float32 or bfloat16 (as uint16), to float32."""
    found = value if isinstance(value, types.Float) else types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if found is value:
            return arguments[0]
        return builder.bitcast(builder.shl(builder.zext(arguments[0], _WORD), _WORD(16)), ir.FloatType())

    return found(value), generate


def _convert(to: Any, x: Any, shorten: Callable[[Any, Any], Any]) -> Any:
    """Return the signature and the code of an intrinsic that converts x to the format of the array `to`.

    `shorten` gets LLVM's builder and a float32, and returns the bits of a bfloat16.
    """
    found = x if isinstance(to.dtype, types.Float) else types.uint16

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[1] if found is x else shorten(builder, arguments[1])

    return found(to, x if found is x else types.float32), generate


def _as_exact(typing_context: Any, to: Any, x: Any) -> Any:
    """Return x in the format of the array `to`, float32 or bfloat16, which must be able to represent x exactly."""
    return _convert(to, x, lambda b, value: b.trunc(b.lshr(b.bitcast(value, _WORD), _WORD(16)), _HALF))


def _as_stored(typing_context: Any, to: Any, x: Any) -> Any:
    """Return x rounded to the format of the array `to`, float32 or bfloat16.

    It is rounded to nearest, ties to even, like torch; NaN becomes the quiet NaN.
    """

    def shorten(builder: Any, value: Any) -> Any:
        bits = builder.bitcast(value, _WORD)
        odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _WORD(0x7FFF)), odd), _WORD(16))
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.select(is_nan, _HALF(0x7FC0), builder.trunc(rounded, _HALF))

    return _convert(to, x, shorten)


to_float32: Any = intrinsic(_to_float32)
as_exact: Any = intrinsic(_as_exact)
as_stored: Any = intrinsic(_as_stored)


@functools.cache
def steps_of(dim: int, planes: int = 1) -> npt.NDArray[np.uint32]:
    """Return the counter of each pair of columns in each plane, uint32 [planes, ceil(D / 2)]."""
    pairs = (dim + 1) // 2
    return np.arange(planes * pairs, dtype=np.uint32).reshape(planes, pairs) * np.uint32(WEYL)


@inline_code
def draw(word, steps, words):
    """Fill words, uint32 [ceil(D / 2)], with a plane's random numbers, one word for each pair of columns.

    The low 16 bits of a word are for the even column. `word` is the hash of the key and the row's id.
    """
    low, high = uint32(word), uint32(word >> uint64(32))
    for pair in range(np.uint64(len(words))):
        words[pair] = uint32(mix32(uint32(low ^ steps[pair])) ^ high)


@inline_code
def rounded_bits(bits, r):
    """Return the bfloat16 bits to which the random number r rounds the float32 with the given bits."""
    kept = uint32(uint32(bits + uint32(r)) >> uint32(16))
    return uint16(0x7FC0) if (bits & uint32(0x7FFFFFFF)) > uint32(0x7F800000) else uint16(kept)


@kernel
def _round_rows(start, stop, ids, row_ids, key, formats, steps, block):
    D = np.uint64(block.shape[2])
    block, steps = bare(block), bare(steps)
    bits = bare_bits(block, np.uint32)
    words, codes = np.empty(steps.shape[1], np.uint32), np.empty(block.shape[2], np.uint8)
    random = bare_bits(words, np.uint16)
    for i in range(np.uint64(start), np.uint64(stop)):
        word = hashed(key, np.uint64(row_ids[i]))
        for plane in range(np.uint64(len(formats))):
            kind = formats[plane]
            if kind == FLOAT32:
                continue
            draw(word, steps[plane], words)
            if kind == BFLOAT16:
                values = bits[np.uint64(ids[i]), plane]
                for j in range(D):
                    values[j] = uint32(uint32(rounded_bits(values[j], random[j])) << uint32(16))
            else:
                round_plane(block[np.uint64(ids[i]), plane], kind == UNSIGNED_8, random, codes)


@kernel
def _round_into(start, stop, first_row, ids, key, steps, values, out):
    D = np.uint64(values.shape[2])
    bits = bare_bits(values, np.uint32)
    words = np.empty(steps.shape[1], np.uint32)
    random = bare_bits(words, np.uint16)
    for i in range(np.uint64(start), np.uint64(stop)):
        row_id = np.uint64(first_row) + i if ids is None else np.uint64(ids[i])
        draw(hashed(key, row_id), steps[0], words)
        weights, to = bits[i, 0], out[i]
        for j in range(D):
            to[j] = rounded_bits(weights[j], random[j])


def round_rows(block: Rows, ids: AnyIds, row_ids: AnyIds, key: int, formats: tuple[int, ...]) -> None:
    """Round planes of rows, in place, to values that the planes' formats can represent; the array remains float32.

    Args:
        block: float32 [any, 1 + S, D], C-contiguous.
        ids: int32 or int64 [U], unique: the block's rows to round.
        row_ids: int32 or int64 [U], the ids of these rows in their table.
        key: The key of the table's step, 64 bits.
        formats: The formats of the first planes, each one of `plane_formats`; further planes are not changed.
    """
    planes, D = block.shape[1:]
    args = ids, row_ids, np.uint64(key), np.array(formats, np.uint8), steps_of(D, planes), block
    parallel_for(_round_rows, len(ids), *args, grain=get_grain(block.strides[0]))


def round_into(values: Rows, out: Bfloat16, key: int, *, first_row: int = 0, ids: AnyIds | None = None) -> None:
    """Round weights, float32 [N, 1, D], to bfloat16, and write them to out, bfloat16 [N, D].

    The ids of the rows are `ids`, int64 [N], or first_row, first_row + 1, ... if `ids` is None.
    """
    args = np.int64(first_row), ids, np.uint64(key), steps_of(out.shape[1]), values, out
    parallel_for(_round_into, len(values), *args, grain=get_grain(values.strides[0]))


def require_exact(values: Rows, table: str, plane: int, kind: int) -> None:
    """Raise ValueError unless new values of a plane can be stored in the plane's format without rounding.

    Args:
        values: The new values, float32 [N, D].
        table: The table's name, for the error.
        plane: The number of the plane, 0 for weights.
        kind: The format of the plane, one of `plane_formats`.
    """
    values, what = np.ascontiguousarray(values), "slots" if plane else "weights"
    if kind == BFLOAT16 and not _are_bfloat16(values):
        raise ValueError(
            f"table {table!r} stores {what} as bfloat16, which cannot represent all new {what}; round the new {what} "
            "first, for example with torch's tensor.bfloat16().float()"
        )
    if kind in EIGHT_BITS:
        unsigned = kind == UNSIGNED_8
        if to_nearest(values, unsigned=unsigned).tobytes() != values.tobytes():
            raise ValueError(
                f"table {table!r} stores slots in 8 bits, which cannot represent all new slots; round the new slots "
                f"first, with hostdev.kernels.eight_bits.to_nearest(values, unsigned={unsigned})"
            )


def round_to_nearest(block: Rows, formats: tuple[int, ...]) -> None:
    """Round planes of rows, float32 [N, 1 + S, D], in place to the nearest values that their formats can represent.

    NaN is not allowed.
    """
    for plane, kind in enumerate(formats):
        if kind == BFLOAT16:
            bits = block[:, plane].view(np.uint32)
            bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            bits &= np.uint32(0xFFFF0000)
        elif kind in EIGHT_BITS:
            block[:, plane] = to_nearest(block[:, plane], unsigned=kind == UNSIGNED_8)


@kernel
def _are_bfloat16(values):
    bits = bare_bits(values, np.uint32)
    for i in range(np.uint64(len(values))):
        row, lost = bits[i], uint32(0)
        for j in range(np.uint64(len(row))):
            lost |= row[j] & uint32(0xFFFF)
        if lost:
            return False
    return True
