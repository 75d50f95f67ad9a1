"""Dtypes of stored weights, and the arguments of a table's update other than the gradients."""

from typing import Any, NamedTuple

FP32, BF16 = "fp32", "bf16"
TABLE_DTYPES = (FP32, BF16)  # as files and options name them
_ALIASES = {"bfloat16": BF16}  # the public name; "bf16" is accepted for one release


class TableStep(NamedTuple):
    """The arguments that a table's updates at one step have in common, on the host and on the device.

    Attributes:
        scalars: The optimizer's scalars.
        rounding: 64-bit key of the random numbers that round new weights to bfloat16; None: no rounding.
        clip: float32, the mean square above which a row's gradient is clipped; None: it never is.
    """

    scalars: tuple[Any, ...]
    rounding: int | None = None
    clip: Any = None


def require_table_dtype(dtype: str, table: str) -> str:
    """Return the dtype of stored weights, one of TABLE_DTYPES; raise ValueError unless it is fp32, bfloat16 or bf16."""
    found = _ALIASES.get(dtype, dtype)
    if found not in TABLE_DTYPES:
        raise ValueError(f"table {table!r}: dtype must be fp32 or bfloat16, not {dtype!r}")
    return found


def weight_bytes(dtype: str) -> int:
    """Return the bytes of one stored weight."""
    return 4 if dtype == FP32 else 2
