"""What a table's weights are stored as, and what an update of them needs to know beside its gradients."""

from typing import Any, NamedTuple

FP32, BF16 = "fp32", "bf16"
TABLE_DTYPES = (FP32, BF16)


class TableStep(NamedTuple):
    """A step of a table, as its updates take it, on the host and on the device.

    scalars   the optimizer's
    rounding  64 bits, the key of the random numbers by which new weights are rounded to bfloat16; None: they are not
    """

    scalars: tuple[Any, ...]
    rounding: int | None = None


def require_table_dtype(dtype: str, table: str) -> str:
    """Return what weights are to be stored as; ValueError where it is none of TABLE_DTYPES."""
    if dtype not in TABLE_DTYPES:
        raise ValueError(
            f"table {table!r}: the dtype of its weights is one of {', '.join(TABLE_DTYPES)}, not {dtype!r}"
        )
    return dtype


def weight_bytes(dtype: str) -> int:
    """Return the bytes of a weight."""
    return 2 if dtype == BF16 else 4
