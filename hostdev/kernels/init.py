"""Initial weights: each is a pure function of (key, row, column), with identical bits on every IEEE machine.

Normal numbers are computed by the method of Box & Muller (1958): two 32-bit hashes yield the numbers for a pair of
columns. Logarithm, sine and cosine are Cephes' polynomials (Moshier: logf.c, sinf.c), written out here because the
results of math libraries differ.

S: number of optimizer state columns of D values per row.
"""

import numpy as np
from numba import float32, int32, uint32, uint64

from hostdev.kernels.arrays import LongIds, Rows
from hostdev.kernels.counter import hashed, mix32
from hostdev.kernels.jit import inline, kernel
from hostdev.kernels.pool import parallel_for

_f = np.float32
_HALF, _ONE, _TWO = _f(0.5), _f(1), _f(2)
_TO_UNIT = _f(2.0**-23)
_HALF_PI = _f(np.pi / 2)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_LN2_HIGH, _LN2_LOW = _f(0.693359375), _f(-2.12194440e-4)
_LOG = tuple(
    map(
        _f,
        (
            7.0376836292e-2,
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ),
    )
)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = _LOG
_S0, _S1, _S2 = _f(-1.9515295891e-4), _f(8.3321608736e-3), _f(-1.6666654611e-1)
_C0, _C1, _C2 = _f(2.443315711809948e-5), _f(-1.388731625493765e-3), _f(4.166664568298827e-2)
_ROWS = 256
_PAIRS = 640  # pairs of columns at a time; their numbers fit the L1 cache


@inline
def _normal_pair(a, b, std):
    """Compute two independent normal numbers with standard deviation `std` from the random 32-bit words a and b."""
    u = np.float32((float32(int32(a >> uint32(9))) + _HALF) * _TO_UNIT)  # in (0, 1): 23 random bits, exact
    bits = u.view(np.int32)
    exponent = int32(int32(bits - _SQRT_HALF_BITS) >> int32(23))
    x = np.int32(bits - int32(exponent << int32(23))).view(np.float32) - _ONE  # u = (1 + x) * 2^exponent
    e = float32(exponent)
    z = x * x
    y = _L0 * x + _L1
    y = y * x + _L2
    y = y * x + _L3
    y = y * x + _L4
    y = y * x + _L5
    y = y * x + _L6
    y = y * x + _L7
    y = y * x + _L8
    y = y * x * z
    y = y + e * _LN2_LOW
    y = y - _HALF * z
    log_u = (x + y) + e * _LN2_HIGH
    radius = np.sqrt(-_TWO * log_u) * std
    # The angle: 23 bits within the quarter turn around 0; one bit selects the opposite quarter, one bit the adjacent.
    t = ((float32(int32((b >> uint32(7)) & uint32(0x7FFFFF))) + _HALF) * _TO_UNIT - _HALF) * _HALF_PI
    tt = t * t
    sin = ((_S0 * tt + _S1) * tt + _S2) * tt * t + t
    cos = ((_C0 * tt + _C1) * tt + _C2) * tt * tt - _HALF * tt + _ONE
    radius = -radius if (b & uint32(0x40000000)) != 0 else radius
    swap = (b & uint32(0x80000000)) != 0
    return radius * (sin if swap else cos), radius * (cos if swap else sin)


@inline
def _words(low, high, pair):
    a = mix32(uint32(low ^ uint32(uint32(pair) * uint32(0x9E3779B9))))
    b = mix32(uint32(high ^ uint32(uint32(pair) * uint32(0x85EBCA6B))))
    return a, b


@kernel
def _fill_normal(start, stop, first_row, ids, key, std, block, slots):
    """Fill several rows at a time, so that their pairs of columns fill SIMD vectors even if a row has few columns."""
    D, one = np.uint64(block.shape[2]), np.uint64(1)
    pairs = (D + one) // np.uint64(2)
    rows = max(one, np.uint64(_PAIRS) // pairs)
    a, b = np.empty(rows * pairs, np.uint32), np.empty(rows * pairs, np.uint32)
    normal = np.empty(2 * len(a), np.float32)
    for first in range(np.uint64(start), np.uint64(stop), rows):
        n = min(rows, np.uint64(stop) - first)
        for i in range(n):
            row_id = np.uint64(first_row) + first + i if ids is None else np.uint64(ids[first + i])
            word = hashed(key, row_id)
            low, high = uint32(word), uint32(word >> uint64(32))
            row_a, row_b = a[i * pairs : (i + one) * pairs], b[i * pairs : (i + one) * pairs]
            for p in range(pairs):
                row_a[p], row_b[p] = _words(low, high, p)
        for p in range(n * pairs):
            normal[np.uint64(2) * p], normal[np.uint64(2) * p + one] = _normal_pair(a[p], b[p], std)
        for i in range(n):
            row, values = block[first + i], normal[np.uint64(2) * i * pairs :]
            weights = row[0]
            for j in range(D):
                weights[j] = values[j]
            for s in range(len(slots)):
                slot = row[1 + s]
                for j in range(D):
                    slot[j] = slots[s]


@kernel
def _fill_constant(start, stop, values, block):
    for i in range(start, stop):
        for s in range(len(values)):
            for j in range(block.shape[2]):
                block[i, s, j] = values[s]


def fill_normal(
    block: Rows, key: int, std: float, slots: Rows, *, first_row: int = 0, ids: LongIds | None = None
) -> None:
    """Fill rows with normal weights N(0, std^2) and constant slots.

    Args:
        block: float32 [V, 1 + S, D], overwritten.
        key: 64 bits, from `counter.key64(seed, table name)`.
        std: The standard deviation.
        slots: float32 [S], the initial value of each slot.
        first_row: The first row's id, if `ids` is None.
        ids: int64 [V], the rows' ids in their table, or None for first_row, first_row + 1, ...
    """
    args = (np.int64(first_row), ids, np.uint64(key), np.float32(std), block, slots)
    parallel_for(_fill_normal, len(block), *args, grain=_ROWS)


def fill_constant(block: Rows, weight: float, slots: Rows) -> None:
    """Fill rows: all weights become `weight`, and slot s of each row becomes slots[s]; see `fill_normal` for shapes."""
    values = np.concatenate([np.array([weight], np.float32), slots])
    parallel_for(_fill_constant, len(block), values, block, grain=_ROWS)


@kernel
def _fill_uniform(start, stop, first_row, ids, key, low, width, block, slots):
    D, one = np.uint64(block.shape[2]), np.uint64(1)
    for i in range(np.uint64(start), np.uint64(stop)):
        row_id = np.uint64(first_row) + i if ids is None else np.uint64(ids[i])
        word = hashed(key, row_id)
        row = block[i]
        for p in range((D + one) // np.uint64(2)):
            a, b = _words(uint32(word), uint32(word >> uint64(32)), p)
            j = np.uint64(2) * p
            row[0, j] = np.float32(low + width * np.float64(a >> uint32(8)))
            if j + one < D:
                row[0, j + one] = np.float32(low + width * np.float64(b >> uint32(8)))
        for s in range(len(slots)):
            for k in range(D):
                row[1 + s, k] = slots[s]


def fill_uniform(
    block: Rows, key: int, low: float, high: float, slots: Rows, *, first_row: int = 0, ids: LongIds | None = None
) -> None:
    """Fill rows with constant slots and weights low + k * (high - low) / 2^24, for random integers k in [0, 2^24).

    Weights are computed in float64 and rounded to float32 once. `init.fill_normal` describes the other arguments.
    """
    width = (np.float64(high) - np.float64(low)) * 2.0**-24
    args = (np.int64(first_row), ids, np.uint64(key), np.float64(low), width, block, slots)
    parallel_for(_fill_uniform, len(block), *args, grain=_ROWS)
