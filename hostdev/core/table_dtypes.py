"""Dtypes of stored weights, and the arguments of an update besides gradients."""

from typing import Any, NamedTuple

FP32, BF16 = "fp32", "bf16"
TABLE_DTYPES = (FP32, BF16)


class TableStep(NamedTuple):
    """A step of a table, for its updates on the host and on the device.

    Attributes:
        scalars: The optimizer's scalars.
        rounding: 64-bit key of the random numbers that round new weights to bfloat16; None: no rounding.
    """

    scalars: tuple[Any, ...]
    rounding: int | None = None


def require_table_dtype(dtype: str, table: str) -> str:
    """Return the dtype of stored weights; ValueError unless it is one of TABLE_DTYPES."""
    if dtype not in TABLE_DTYPES:
        raise ValueError(
            f"table {table!r}: the dtype of its weights is one of {', '.join(TABLE_DTYPES)}, not {dtype!r}"
        )
    return dtype


def weight_bytes(dtype: str) -> int:
    """Return the bytes of a weight."""
    return 2 if dtype == BF16 else 4
