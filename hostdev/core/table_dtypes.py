"""Dtypes of stored weights and optimizer state, and the arguments of a table update other than gradients."""

from typing import Any, NamedTuple

from hostdev.kernels.clock import Clock
from hostdev.kernels.plane_formats import plane_bytes

FP32, BF16, EIGHT_BIT = "fp32", "bf16", "8bit"
TABLE_DTYPES = (FP32, BF16)  # dtypes of weights, as files and options name them
SLOT_DTYPES = (FP32, BF16, EIGHT_BIT)  # dtypes of the optimizer's state columns
_ALIASES = {"bfloat16": BF16}  # "bfloat16" is the public name; "bf16" is still accepted for one release


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
