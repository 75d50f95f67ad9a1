"""Dtypes of stored weights and optimizer state, and the arguments of a table's update other than the gradients."""

from typing import Any, NamedTuple

FP32, BF16 = "fp32", "bf16"
TABLE_DTYPES = (FP32, BF16)  # as files and options name them
_ALIASES = {"bfloat16": BF16}  # the public name; "bf16" is accepted for one release


class Rounding(NamedTuple):
    """The rounding of a table's new values to bfloat16 at one step.

    Attributes:
        key: 64-bit key of the random numbers.
        first: The first plane of a row that is rounded: 0, the weights, or 1, the first slot.
        stop: The plane after the last one.
    """

    key: int
    first: int
    stop: int


class TableStep(NamedTuple):
    """The arguments that a table's updates at one step have in common, on the host and on the device.

    Attributes:
        scalars: The optimizer's scalars.
        rounding: How new values are rounded to bfloat16; None: they are not.
        clip: float32, the mean square above which a row's gradient is clipped; None: it never is.
    """

    scalars: tuple[Any, ...]
    rounding: Rounding | None = None
    clip: Any = None


def require_table_dtype(dtype: str, table: str, what: str = "dtype") -> str:
    """Return a dtype of stored values, one of TABLE_DTYPES; raise ValueError unless it is fp32, bfloat16 or bf16.

    `what` is the argument's name: "dtype", of the weights, or "slots", of the optimizer state.
    """
    found = _ALIASES.get(dtype, dtype)
    if found not in TABLE_DTYPES:
        raise ValueError(f"table {table!r}: {what} must be fp32 or bfloat16, not {dtype!r}")
    return found


def value_bytes(dtype: str) -> int:
    """Return the bytes of one stored value."""
    return 4 if dtype == FP32 else 2


def rounded_planes(dtype: str, slots_dtype: str, slots: int) -> tuple[int, int] | None:
    """Return the planes of a row (0: weights; 1, ...: slots) that are stored as bfloat16, as first and stop."""
    first, stop = int(dtype == FP32), 1 if slots_dtype == FP32 else 1 + slots
    return (first, stop) if first < stop else None
