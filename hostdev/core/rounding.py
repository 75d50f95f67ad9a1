"""The rounding of weights and optimizer state to bfloat16: keys of its random numbers, and initial state."""

import numpy as np
import numpy.typing as npt

from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.table_dtypes import FP32, Rounding, rounded_planes
from hostdev.kernels.counter import key64, mix64


def rounding_key(seed: int, table: str, step: int) -> int:
    """Return the key for rounding a table's values at its step 1, 2, 3, ...; step 0 is for the initial weights."""
    return key64(seed, "bfloat16", table) ^ int(mix64(np.array([step]))[0])


def get_rounding(
    seed: int, table: str, step: int, dtype: str, slots_dtype: str, optimizer: SparseOptimizer
) -> Rounding | None:
    """Return how a table's new values are rounded at a step; None if all are float32."""
    planes = rounded_planes(dtype, slots_dtype, len(optimizer.slots))
    return None if planes is None else Rounding(rounding_key(seed, table, step), *planes)


def initial_slots(optimizer: SparseOptimizer, slots_dtype: str) -> npt.NDArray[np.float32]:
    """Return the initial values of an optimizer's S slots, float32 [S]; as bfloat16, they are rounded to nearest."""
    values = np.array(list(optimizer.slots.values()), np.float32)
    if slots_dtype == FP32:
        return values
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
