"""Rounding of weights and optimizer state: storage formats, random number keys, and initial state."""

import numpy as np
import numpy.typing as npt

from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.table_dtypes import BF16, EIGHT_BIT, FP32
from hostdev.kernels.counter import key64, mix64
from hostdev.kernels.eight_bits import LEAST_SCALE
from hostdev.kernels.plane_formats import BFLOAT16, FLOAT32, SIGNED_8, UNSIGNED_8


def rounding_key(seed: int, table: str, step: int) -> int:
    """Return the random number key for rounding at a table's step, counted from 1; 0 is for the initial weights."""
    return key64(seed, "bfloat16", table) ^ int(mix64(np.array([step]))[0])


def plane_formats(dtype: str, slots_dtype: str, optimizer: SparseOptimizer) -> tuple[int, ...] | None:
    """Return the storage format of each plane of a row (weights, then slots), or None if all are float32."""
    found = [FLOAT32 if dtype == FP32 else BFLOAT16]
    for name in optimizer.slots:
        eight = UNSIGNED_8 if name in optimizer.non_negative else SIGNED_8
        found.append({FP32: FLOAT32, BF16: BFLOAT16, EIGHT_BIT: eight}[slots_dtype])
    return tuple(found) if any(found) else None


def initial_slots(optimizer: SparseOptimizer, slots_dtype: str) -> npt.NDArray[np.float32]:
    """Return the initial values of an optimizer's S slots, float32 [S].

    bfloat16 values are rounded to nearest. An 8-bit slot stores equal values exactly, except that magnitudes below
    2^-90 become 0.
    """
    values = np.array(list(optimizer.slots.values()), np.float32)
    if slots_dtype == FP32:
        return values
    if slots_dtype == EIGHT_BIT:
        return np.where(np.abs(values) < LEAST_SCALE, np.float32(0), values)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
