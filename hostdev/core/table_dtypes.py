"""Dtypes of stored weights and optimizer state, and the arguments of a table's update other than the gradients."""

from typing import Any, NamedTuple

from hostdev.kernels.clock import Clock
from hostdev.kernels.plane_formats import plane_bytes

FP32, BF16, EIGHT_BIT = "fp32", "bf16", "8bit"
TABLE_DTYPES = (FP32, BF16)  # of weights, as files and options name them
SLOT_DTYPES = (FP32, BF16, EIGHT_BIT)  # of the optimizer's state columns
_ALIASES = {"bfloat16": BF16}  # the public name; "bf16" is accepted for one release


class Rounding(NamedTuple):
    """The rounding of a table's new values at one step.

    Attributes:
        key: 64-bit key of the random numbers.
        formats: The stored format of each plane of a row (0: the weights; 1, ...: the slots), one of
            `kernels.plane_formats`.
    """

    key: int
    formats: tuple[int, ...]


class TableStep(NamedTuple):
    """The arguments that a table's updates at one step have in common, on the host and on the device.

    Attributes:
        scalars: The optimizer's scalars.
        rounding: How new values are rounded to those that the table can store; None: they are not.
        clip: float32, the mean square above which a row's gradient is clipped; None: it never is.
        clock: Brings rows up to date before the update; None: steps change the rows of their batches only.
    """

    scalars: tuple[Any, ...]
    rounding: Rounding | None = None
    clip: Any = None
    clock: Clock | None = None


def require_table_dtype(dtype: str, table: str) -> str:
    """Return a dtype of weights, one of TABLE_DTYPES; raise ValueError unless it is fp32, bfloat16 or bf16."""
    found = _ALIASES.get(dtype, dtype)
    if found not in TABLE_DTYPES:
        raise ValueError(f"table {table!r}: dtype must be fp32 or bfloat16, not {dtype!r}")
    return found


def require_slots_dtype(slots: str, table: str, dim: int) -> str:
    """Return how slots of `dim` values are stored, one of SLOT_DTYPES; raise ValueError for an unknown name.

    8 bits of one value would need 4 more bytes for its scale, so slots of one value are then stored as float32.
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
