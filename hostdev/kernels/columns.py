"""Columns of a table that lies row by row."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel


@kernel
def _place(codes: Any, values: Any, rows: Any, column: Any) -> None:
    at = np.uint64(column)
    for i in range(np.uint64(0), np.uint64(len(codes))):
        rows[i, at] = values[np.uint64(codes[i])]


@kernel
def _copy(values: Any, rows: Any, column: Any) -> None:
    at = np.uint64(column)
    for i in range(np.uint64(0), np.uint64(len(values))):
        rows[i, at] = values[i]


def place_column(
    codes: npt.NDArray[Any], values: npt.NDArray[Any] | None, rows: npt.NDArray[Any], column: int
) -> None:
    """Write a column of rows [n, C]: values[codes] [n], or the codes themselves."""
    if values is None:
        _copy(codes, rows, column)
    else:
        _place(codes, values, rows, column)
