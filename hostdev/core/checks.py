"""Checks of users' ids and of arrays before they reach a table's rows: dtype, shape, range, and finite values."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.kernels.arrays import Rows
from hostdev.kernels.lookup import first_outside
from hostdev.kernels.norm import largest
from hostdev.kernels.unique import check_ids

_LARGEST = 2**63 - 1


class BeyondInt64Error(ValueError):
    """An integer that does not fit into int64 and is therefore outside every table."""

    def __init__(self, value: int, position: int) -> None:
        super().__init__(f"{value} at position {position} is beyond int64 and therefore outside every table")
        self.value, self.position = value, position


def to_int64(given: Any, padding: int | None = None) -> npt.NDArray[Any]:
    """Convert uint64 arrays and lists of large integers to int64; return anything else as an array of its own dtype.

    A `padding` id beyond int64 keeps its 64 bits; see `wrap_padding`.

    Raises:
        BeyondInt64Error: An integer other than `padding` does not fit; the error names the first such integer.
        ValueError: `given` cannot be converted to an array, for example because nested lists differ in length.
    """
    array = np.asarray(given)
    if array.dtype.kind in "fO" and array.size and not hasattr(given, "dtype"):
        exact = np.array(given, object)  # numpy converts a list with both 2^63 and -1 to floats
        if not all(type(one) is int for one in exact.flat):
            return array
        array = exact
    elif array.dtype != np.uint64:
        return array
    beyond = np.flatnonzero((array.reshape(-1) > _LARGEST) | (array.reshape(-1) < -_LARGEST - 1))
    if not len(beyond):
        return array.astype(np.int64)
    flat = array.reshape(-1).astype(object)
    for position in beyond.tolist():
        if padding is None or (flat[position] - padding) % 2**64:
            raise BeyondInt64Error(int(flat[position]), position)
        flat[position] = wrap_padding(padding)
    return flat.astype(np.int64).reshape(array.shape)


def to_keys(given: Any, what: str) -> npt.NDArray[np.int64]:
    """Return keys of a table by key, any integers of 64 bits, as a C-contiguous int64 array of the same shape.

    Keys from 2^63 on keep their 64 bits and become negative.

    Raises:
        TypeError: The keys are not integers; the message begins with `what`.
        ValueError: A key does not fit into 64 bits, or nested lists differ in length.
    """
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise ValueError(f"{what} cannot be converted to an array ({error})") from None
    if array.dtype.kind in "fO" and array.size and not hasattr(given, "dtype"):
        exact = np.array(given, object)  # numpy converts a list with both 2^63 and -1 to floats
        if all(type(one) is int for one in exact.flat):
            beyond = [one for one in exact.flat if not -_LARGEST - 1 <= one < 2**64]
            if beyond:
                raise ValueError(f"{what}: {beyond[0]} does not fit into 64 bits")
            wrapped = [one - 2**64 if one > _LARGEST else one for one in exact.flat]
            array = np.array(wrapped, np.int64).reshape(exact.shape)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # float64 is NumPy's dtype for an empty list
    if array.dtype.kind not in "iu":
        text = "; for text, pass hostdev.hash_ids(values)" if array.dtype.kind in "OSUT" else ""
        raise TypeError(f"{what} must be integers, not {array.dtype}{text}")
    return np.ascontiguousarray(array.view(np.int64) if array.dtype == np.uint64 else array, np.int64)


def wrap_padding(padding: int) -> int:
    """Return a padding id as it appears among int64 ids; an id beyond int64 keeps its 64 bits and becomes negative."""
    return padding if padding <= _LARGEST else padding - 2**64


def checked_ids(ids: npt.ArrayLike, rows: int, table: str) -> npt.NDArray[Any]:
    """Check ids [N] of a table with `rows` rows, and return them as a C-contiguous array.

    Raises:
        TypeError, ValueError: The ids have a wrong dtype or shape.
        UserError: An id is outside the table.
    """
    try:
        array = np.ascontiguousarray(check_ids(to_int64(ids)))
    except BeyondInt64Error as error:
        raise UserError(
            f"table {table!r}: id {error.value} at position {error.position} is outside 0..{rows - 1}"
        ) from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"table {table!r}: {error}") from None
    position = first_outside(array, rows)
    if position >= 0:
        raise UserError(f"table {table!r}: id {array[position]} at position {position} is outside 0..{rows - 1}")
    return array


def checked_positions(positions: Any, n: int, rows: int, table: str) -> npt.NDArray[Any] | None:
    """Check positions [n], indices into an array of `rows` rows; return them as a C-contiguous array, or None for None.

    Raises:
        TypeError, ValueError: The positions have a wrong dtype or shape, or one is outside the array.
    """
    if positions is None:
        return None
    try:
        array = np.ascontiguousarray(check_ids(positions))
    except (TypeError, ValueError) as error:
        raise type(error)(f"table {table!r}: positions: {error}") from None
    if len(array) != n:
        raise ValueError(f"table {table!r}: there are {len(array)} positions for {n} ids; give one per id")
    place = first_outside(array, rows)
    if place >= 0:
        raise ValueError(f"table {table!r}: positions[{place}] is {array[place]}, which is outside 0..{rows - 1}")
    return array


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
    """Raise ValueError unless the steps of the rows' last writes, `last` float32 [N], are integers in 0..`steps`."""
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
