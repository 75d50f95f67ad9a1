"""Ids from users: their type, their shape, their range."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.kernels.lookup import first_outside
from hostdev.kernels.unique import check_ids


def checked_ids(ids: npt.ArrayLike, rows: int, table: str) -> npt.NDArray[Any]:
    """Return ids [N] as a C-contiguous array; TypeError, ValueError or UserError unless they are ids of the table.

    rows   of the table
    table  its name, for the message
    """
    try:
        array = np.ascontiguousarray(check_ids(ids))
    except (TypeError, ValueError) as error:
        raise type(error)(f"table {table!r}: {error}") from None
    position = first_outside(array, rows)
    if position >= 0:
        raise UserError(f"table {table!r}: id {array[position]} at position {position} is outside 0..{rows - 1}")
    return array


def checked_positions(positions: Any, n: int, rows: int, table: str) -> npt.NDArray[Any] | None:
    """Return positions [n], each in [0, rows), as a C-contiguous array; None for None.

    rows   of the array that they are positions in
    table  its name, for the message

    Raises TypeError or ValueError for what is none.
    """
    if positions is None:
        return None
    try:
        array = np.ascontiguousarray(check_ids(positions))
    except (TypeError, ValueError) as error:
        raise type(error)(f"table {table!r}: positions: {error}") from None
    if len(array) != n:
        raise ValueError(f"table {table!r}: {len(array)} positions for {n} ids")
    place = first_outside(array, rows)
    if place >= 0:
        raise ValueError(f"table {table!r}: position {array[place]} at {place} is outside 0..{rows - 1}")
    return array
