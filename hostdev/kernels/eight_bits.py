"""8-bit slots: dynamic quantization of each row's slots, with stochastic rounding.

A stored slot has a float32 scale and D codes; a value is map[code] * scale. The scale is the slot's value of largest
magnitude, with its sign (positive if both signs have that magnitude). So all quotients value / scale are in [-1, 1],
and the map has a code for 1. If the scale's magnitude is below 2^-90, all values of the slot are stored as 0. A stored
0 is always +0.

The map has seven decades. Decade i = 0..6 begins at 10^(i - 7), and its codes are equally spaced::

    map[2^i + k]         = 10^(i - 7) * (1 + 9 * k / 2^i)        k = 0..2^i - 1,      signed
    map[2 * 2^i - 1 + k] = 10^(i - 7) * (1 + 9 * k / (2 * 2^i))  k = 0..2 * 2^i - 1,  slots that are never negative

map[0] = 0, and map[last code] = 1. In the signed map, code 256 - c has the value -map[c], for c = 1..127.

Let t be the inverse of the map, linear between codes. Its slope changes only where a decade begins, and each of these
points has a code. So t is a quotient's exact position between two codes. Rounding t + u down, with u uniform in [0, 1),
yields the upper code with the probability that preserves the mean. u has 12 bits, and its distance from 0 and from 1 is
at least 2^-13, more than the error of t (below 2^-14). Values that have a code therefore never change: if a slot is
read and stored again, its codes and scale stay the same. The mean is not preserved in two ranges: quotients below
-0.986 become -0.986, and in a slot that is never negative, quotients from 2^-100 to 10^-7 become 10^-7. They never
become 0, since Adam divides by the square root of such a slot.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, section 2 and bitsandbytes'
`create_dynamic_map`. Deviations: a decade's codes stand for the lower ends of its intervals instead of their middles,
so that the slope changes at codes; each slot of a row is a block; the scale is signed; rounding is stochastic.

Shapes: V rows, S slots of D values, P = `plane_formats.plane_bytes(D)`. A stored slot is a plane, uint8 [P]: it begins
with D codes and ends with the 4 bytes of the scale.
"""

import numpy as np
import numpy.typing as npt
from numba import float32, int32, uint8, uint32

from hostdev.kernels.arrays import Rows
from hostdev.kernels.jit import bare_bits, inline_code, kernel, prefetch_to_read
from hostdev.kernels.pool import get_grain, parallel_for

Codes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.uint8]  # for each slot, whether it is never negative

# A slot v with a smaller scale has no effect, since sqrt(v) is far below Adam's eps. With this scale or a larger one,
# all codes except 0 have values far above the denormal numbers.
LEAST_SCALE = np.float32(2.0**-90)
_DECADES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # where each decade begins

# t = (y * slope + offset) * s - base, at least 1, and at most a * near_zero; see `_place`. The first row is for signed
# slots (linear to 0), the second for slots that are never negative (never 0).
CONSTANTS = np.array([[64 / 0.9, 64 * 8 / 9, 0, 1e7], [128 / 0.9, 128 * 8 / 9, 1, 2.0**100]], np.float32)
TO_LAST_DECADE = ((1e-3, 1e3, 0.125), (1e-2, 1e2, 0.25), (1e-1, 1e1, 0.5))  # if y < first: y *= second, s *= third
STEP, HALF_STEP = np.float32(2.0**-12), np.float32(2.0**-13)  # u = random 12 bits * STEP + HALF_STEP
NEAREST = 0x8000  # the random number that rounds to nearest

_AHEAD = 8  # prefetch distance in rows
_ABSOLUTE = 0x7FFFFFFF


def _make_map(unsigned: int) -> Rows:
    """Return the map, float32 [256]: signed if `unsigned` is 0, or for slots that are never negative if it is 1."""
    values = [0.0]
    for i, begin in enumerate(_DECADES):
        n = 2 ** (i + unsigned)
        values += [begin * (1 + 9 * k / n) for k in range(n)]
    values.append(1.0)
    if not unsigned:
        values += [-values[256 - code] for code in range(129, 256)]
    return np.array(values, np.float32)


MAPS: Rows = np.stack([_make_map(0), _make_map(1)])  # float32 [2, 256]: the signed map, then the unsigned one


@inline_code
def find_scale(values):
    """Return a slot's scale: its value of largest magnitude, positive if both signs have this magnitude.

    If the magnitude is below 2^-90, return 0.
    """
    bits = bare_bits(values, np.int32)
    largest, positive = int32(0), int32(0)
    for j in range(np.uint64(len(bits))):
        largest = max(largest, int32(bits[j] & int32(_ABSOLUTE)))
        positive = max(positive, bits[j])
    scale = np.int32(largest).view(np.float32)
    if scale < LEAST_SCALE:
        return float32(0)
    return scale if positive == largest else float32(-scale)


@inline_code
def _place(a, slope, offset, base, near_zero):
    """Return t, the position of a quotient `a` among the codes; `a` must be in [0, 1]."""
    s, y = float32(1), a
    for below, factor, part in TO_LAST_DECADE:
        low = y < float32(below)
        y = float32(y * float32(factor)) if low else y
        s = float32(s * float32(part)) if low else s
    t = float32(float32(float32(float32(y * slope) + offset) * s) - base)
    t = t if t > float32(1) else float32(1)
    least = float32(a * near_zero)
    return least if least < t else t


@inline_code
def encode(values, scale, unsigned, random, codes):
    """Write the codes of values, float32 [D], to codes, uint8 [D].

    `random`, uint16 [D or more], has a random number per value; `scale` must not be 0.
    """
    constants = CONSTANTS[np.uint64(unsigned)]
    slope, offset, base, near_zero = constants[0], constants[1], constants[2], constants[3]
    for j in range(np.uint64(len(codes))):
        x = float32(values[j] / scale)
        t = _place(abs(x), slope, offset, base, near_zero)
        u = float32(float32(float32(uint32(random[j]) >> uint32(4)) * STEP) + HALF_STEP)
        code = int32(float32(t + u))
        negative = int32(-code) if code < int32(127) else int32(-127)
        codes[j] = uint8(negative if x < float32(0) else code)


@inline_code
def _decode(codes, scale, unsigned, out):
    """Write the values of codes, uint8 [D], to out, float32 [D]."""
    values = MAPS[np.uint64(unsigned)]
    for j in range(np.uint64(len(out))):
        out[j] = float32(float32(values[codes[j]] * scale) + float32(0))


@inline_code
def decode_plane(plane, unsigned, out):
    """Write the values of a stored slot, uint8 [P], to out, float32 [D], and return `out`."""
    _decode(plane, bare_bits(plane[len(plane) - 4 :], np.float32)[0], unsigned, out)
    return out


@inline_code
def store_plane(values, unsigned, random, plane):
    """Quantize values, float32 [D], and store them in the slot `plane`, uint8 [P]; `random` is as in `encode`."""
    scale, D = find_scale(values), len(values)
    bare_bits(plane[len(plane) - 4 :], np.float32)[0] = scale
    if scale == float32(0):
        plane[:D] = 0
    else:
        encode(values, scale, unsigned, random, plane[:D])


@inline_code
def round_plane(values, unsigned, random, codes):
    """Round values, float32 [D], in place to values that a slot can store; codes, uint8 [D], is scratch memory."""
    scale = find_scale(values)
    if scale == float32(0):
        values[:] = float32(0)
    else:
        encode(values, scale, unsigned, random, codes)
        _decode(codes, scale, unsigned, values)


@kernel
def _to_nearest(values, unsigned):
    rows, D = values.shape
    random, codes = np.full(D, NEAREST, np.uint16), np.empty(D, np.uint8)
    for i in range(np.uint64(rows)):
        round_plane(values[i], unsigned, random, codes)


def to_nearest(values: npt.ArrayLike, *, unsigned: bool) -> Rows:
    """Return a copy of the values, float32 [N, D], rounded to the nearest values that an 8-bit slot can store.

    Args:
        values: [N, D], one slot per row.
        unsigned: Whether the slot is never negative, like Adam's v.
    """
    found = np.array(values, np.float32, order="C")
    _to_nearest(found, int(unsigned))
    return found


def decode_rows(planes: Codes, dim: int, unsigned: bool) -> Rows:
    """Return the values of stored slots, uint8 [N, P], as float32 [N, D]."""
    scales = np.ascontiguousarray(planes[:, -4:]).view(np.float32)
    found: Rows = MAPS[int(unsigned)][planes[:, :dim]]
    found *= scales
    found += np.float32(0)
    return found


@kernel
def decode_to_columns(start, stop, first, ids, slots, unsigned, out):
    """Copy rows to columns as `bits.copy_to_columns` does: slots is uint8 [V, S, P], out float32 [S, N, D]."""
    for i in range(np.uint64(start), np.uint64(stop)):
        if ids is None:
            row = np.uint64(first) + i
        else:
            row = np.uint64(ids[i])
            ahead = i + np.uint64(_AHEAD)
            if ahead < np.uint64(stop):
                prefetch_to_read(slots, ids[ahead], slots.strides[0])
        for s in range(np.uint64(slots.shape[1])):
            decode_plane(slots[row, s], unsigned[s], out[s, i])


@kernel
def _fill(start, stop, row, slots):
    for i in range(np.uint64(start), np.uint64(stop)):
        to = slots[i]
        for s in range(np.uint64(row.shape[0])):
            for j in range(np.uint64(row.shape[1])):
                to[s, j] = row[s, j]


def fill(slots: Codes, values: Rows, dim: int, unsigned: Flags) -> None:
    """Fill slots, uint8 [V, S, P]: all values of slot s become values[s].

    `values` is float32 [S], each 0 or at least 2^-90; `unsigned` says for each slot whether it is never negative.
    """
    row = np.zeros(slots.shape[1:], np.uint8)
    row[:, :dim] = np.where(values, np.where(unsigned, 255, 128), 0)[:, None]  # the code of the value 1
    row[:, -4:] = values.view(np.uint8).reshape(-1, 4)
    parallel_for(_fill, len(slots), row, slots, grain=get_grain(slots.strides[0]))
