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
