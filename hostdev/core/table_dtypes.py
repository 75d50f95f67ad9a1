"""Dtypes of stored weights and optimizer state, their rounding, and what a table update takes besides gradients."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.optimizers import SparseOptimizer
from hostdev.kernels.clock import Clock
from hostdev.kernels.counter import key64, mix64
from hostdev.kernels.eight_bits import LEAST_SCALE
from hostdev.kernels.plane_formats import BFLOAT16, FLOAT32, SIGNED_8, UNSIGNED_8, plane_bytes

FP32, BF16, EIGHT_BIT = "fp32", "bf16", "8bit"
TABLE_DTYPES = (FP32, BF16)  # of weights; names in files and options
SLOT_DTYPES = (FP32, BF16, EIGHT_BIT)  # of the optimizer's state columns
_ALIASES = {"bfloat16": BF16}  # the public name; "bf16" is accepted for one release


class Rounding(NamedTuple):
    """The rounding of a table's new values at one step.

    Attributes:
        key: 64-bit key of the random numbers.
        formats: The stored format of each plane of a row (0: the weights; 1, ...: the slots); see
            `kernels.plane_formats`.
    """

    key: int
    formats: tuple[int, ...]


class TableStep(NamedTuple):
    """The arguments shared by all updates of a table at one step, on the host and on the device.

    Attributes:
        scalars: The scalar arguments of the optimizer's kernel.
        rounding: The rounding of new values to the storage formats, or None if all are float32.
        clip: float32, the mean square above which a row's gradient is clipped, or None for no clipping.
        clock: The step history, from which each row's missed steps are applied before its update; None if a step
            changes only its batch's rows.
    """

    scalars: tuple[Any, ...]
    rounding: Rounding | None = None
    clip: Any = None
    clock: Clock | None = None

    @property
    def key(self) -> int:
        """The key of the random numbers for rounding, or 0 without rounding."""
        return 0 if self.rounding is None else self.rounding.key


def require_table_dtype(dtype: str, table: str) -> str:
    """Return the weights' dtype, one of TABLE_DTYPES; raise ValueError unless `dtype` is fp32, bfloat16 or bf16."""
    found = _ALIASES.get(dtype, dtype)
    if found not in TABLE_DTYPES:
        raise ValueError(f"table {table!r}: dtype must be fp32 or bfloat16, not {dtype!r}")
    return found


def require_slots_dtype(slots: str, table: str, dim: int) -> str:
    """Return the dtype for slots of `dim` values, one of SLOT_DTYPES; raise ValueError for an unknown name.

    An 8-bit slot needs 4 more bytes for its scale, so slots of a single value are stored as float32 instead.
    """
    found = _ALIASES.get(slots, slots)
    if found not in SLOT_DTYPES:
        raise ValueError(f"table {table!r}: slots must be fp32, bfloat16 or 8bit, not {slots!r}")
    return FP32 if found == EIGHT_BIT and dim == 1 else found


def weight_bytes(dtype: str) -> int:
    """Return the bytes of one stored weight."""
    return 4 if dtype == FP32 else 2


def slot_bytes(dtype: str, dim: int) -> int:
    """Return the bytes of one stored slot of `dim` values."""
    return plane_bytes(dim) if dtype == EIGHT_BIT else dim * weight_bytes(dtype)


def rounding_key(seed: int, table: str, step: int) -> int:
    """Return the random number key for rounding at a table's step, from 1; step 0 is for the initial weights."""
    return key64(seed, "bfloat16", table) ^ int(mix64(np.array([step]))[0])


def plane_formats(dtype: str, slots_dtype: str, optimizer: SparseOptimizer) -> tuple[int, ...] | None:
    """Return the storage format of each plane of a row (weights, then slots), or None if all are float32."""
    found = [FLOAT32 if dtype == FP32 else BFLOAT16]
    for name in optimizer.slots:
        eight = UNSIGNED_8 if name in optimizer.non_negative else SIGNED_8
        found.append({FP32: FLOAT32, BF16: BFLOAT16, EIGHT_BIT: eight}[slots_dtype])
    return tuple(found) if any(found) else None


def get_rounding(
    seed: int, table: str, step: int, dtype: str, slots_dtype: str, optimizer: SparseOptimizer
) -> Rounding | None:
    """Return the rounding of a table's new values at a step, or None if all are stored as float32."""
    formats = plane_formats(dtype, slots_dtype, optimizer)
    return None if formats is None else Rounding(rounding_key(seed, table, step), formats)


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
