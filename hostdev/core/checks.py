"""Checks of arrays before they reach a table's rows: dtype, shape, and finite values."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Rows
from hostdev.kernels.finite import largest


def check_rows(what: str, array: Rows, shape: tuple[int, ...], table: str) -> None:
    """Raise TypeError or ValueError unless an array is float32, has this shape and is C-contiguous.

    Messages name the table and call the array `what`.
    """
    if array.dtype != np.float32:
        raise TypeError(f"table {table!r}: {what} must be float32, not {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"table {table!r}: {what} must have shape {shape}, not {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"table {table!r}: {what} must be C-contiguous")


def require_size(rows: int, dim: int, table: str) -> None:
    """Raise ValueError unless a table has at least one row and one column."""
    if rows < 1 or dim < 1:
        raise ValueError(f"table {table!r} needs at least one row and one column, not {rows} x {dim}")


def require_finite(table: str, ids: npt.NDArray[Any], *values: Rows) -> None:
    """Raise ValueError if a value is not finite; the message names the first row with such a value.

    Args:
        table: The table's name.
        ids: [N], the rows to which the values are to be written.
        values: Arrays [N, ...].
    """
    for array in values:
        if largest(array) < np.inf:
            continue
        wrong = ~np.isfinite(array).reshape(len(array), -1)
        row = int(np.flatnonzero(wrong.any(1))[0])
        value = array.reshape(len(array), -1)[row][wrong[row]][0]
        raise ValueError(
            f"table {table!r}: {value} cannot be written to row {ids[row]}: values must be finite; nothing was written"
        )


def require_last(table: str, ids: npt.NDArray[Any], last: Rows, steps: int) -> None:
    """Raise ValueError unless `last`, float32 [N], the step of each row's last write, has integers in 0..`steps`."""
    wrong = ~((last >= 0) & (last <= steps) & (last == np.floor(last)))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"table {table!r}: {last[row]} cannot be written to `last` of row {ids[row]}: it must be an integer "
            f"from 0 to {steps}, the table's step count; nothing was written"
        )


def require_gradients(table: str, ids: npt.NDArray[Any], grads: Rows, limit: float, *, summed: bool) -> None:
    """Raise ValueError if a gradient is not finite or exceeds `limit`; the message names the first row with one.

    Args:
        table: The table's name.
        ids: [N], the row of each gradient.
        grads: float32 [N, D].
        limit: Largest absolute value that the optimizer accepts.
        summed: Whether each id occurs only once; otherwise the sum of each id's gradients is checked, too.
    """
    most = largest(grads)
    if most * (1 if summed else max(1, len(ids))) <= limit:
        return
    if not summed and most <= limit:
        rows, inverse = np.unique(ids, return_inverse=True)
        sums = np.zeros((len(rows), grads.shape[1]), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add.at(sums, inverse, grads)  # in order of occurrence, like the update
        if largest(sums) <= limit:
            return
        ids, grads = rows, sums
    wrong = ~(np.abs(grads) <= limit)
    row = int(np.flatnonzero(wrong.any(1))[0])
    value = grads[row][wrong[row]][0]
    what = f"more than {limit:.3g}, its optimizer's limit" if np.isfinite(value) else "which is not finite"
    raise ValueError(f"table {table!r}: a gradient of row {ids[row]} is {value}, {what}; no row was updated")
