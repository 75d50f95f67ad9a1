"""Converts `Predictor`'s input (dicts, pandas frames and Arrow tables) to a record batch."""

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hostdev.core.errors import UserError, in_words
from hostdev.core.progress import counted
from hostdev.data.preprocess.columns import combined

if TYPE_CHECKING:
    from hostdev.data.preprocess.encoding import Encoding
    from hostdev.data.preprocess.query.raw_rows import RawPlan

    Columns = Encoding | RawPlan  # both say which columns are read, and which of these have lists, or only numbers


def as_mapping(rows: Any) -> Any:
    """Return a pandas Series (one row) as a dict; return anything else unchanged."""
    return rows.to_dict() if _is_pandas(rows, "Series") else rows


def as_columns(rows: Mapping[Any, Any], encoding: "Columns") -> dict[str, Any]:
    """Return the required columns, each with a value per row; single values mean one row.

    In the column of a bag, a list of single values is one row's bag if all columns that are not bags have single
    values. If all columns are bags, `_is_one_row` decides.

    Args:
        rows: Columns by name.
        encoding: Says which columns to read, and which of them are bags.

    Raises:
        UserError: Columns have different lengths, or it is ambiguous whether lists are one row or several.
    """
    bags = encoding.separators
    plain = [name for name in encoding.columns() if name not in bags]
    one = all(_is_scalar(rows[name]) for name in plain) if plain else _is_one_row(rows, bags)
    columns = {}
    for name in encoding.columns():
        values = rows[name]
        is_list = not _is_scalar(values)
        if not is_list or (one and name in bags and all(map(_is_scalar, values))):
            columns[name] = [values]
        else:
            columns[name] = values
    n = max(map(len, columns.values()), default=0)
    longest = next((name for name, values in columns.items() if len(values) == n), "")
    for name, values in columns.items():
        if len(values) == n:
            continue
        what = f"{counted(len(values), 'value')}" if not _is_scalar(rows[name]) else "a single value"
        raise UserError(f"column {name!r} has {what}, but column {longest!r} has {n:,}; give one value for each row")
    return columns


def _is_one_row(rows: Mapping[Any, Any], separators: Mapping[str, str | None]) -> bool:
    """Return whether rows that have only bags are a single row; raise UserError if that is ambiguous.

    `separators` has, for each bag, the separator of its values in text, or None for lists.
    """
    lists = {name: rows[name] for name in separators if isinstance(rows[name], list | tuple)}
    if len(lists) < len(separators) or not all(map(_is_scalar, (v for values in lists.values() for v in values))):
        return False
    for name, values in lists.items():
        separator = separators.get(name)
        if separator and any(isinstance(value, str) and separator in value for value in values):
            return False
    for name, values in lists.items():
        if separators.get(name) and len(values) > 1:
            raise UserError(
                f"column {name!r} has a list of {len(values)} values, which may be one row or several; give a list "
                "of lists, one for each row"
            )
    return any(len(values) > 1 for values in lists.values())


def as_batch(rows: Any, encoding: "Columns") -> pa.RecordBatch:
    """Return the required columns of `rows`: a dict from `as_columns`, a DataFrame, or a pyarrow Table or RecordBatch.

    Raises:
        UserError: A column is not a valid Arrow array, or cannot be converted to one.
    """
    names = encoding.columns()
    if isinstance(rows, pa.RecordBatch | pa.Table):
        arrays = []
        for name in names:
            _require_valid(name, rows[name])
            arrays.append(combined(rows[name]))
    else:
        numbers = encoding.numeric_columns
        arrays = [_array(name, rows[name], "numbers" if name in numbers else "values") for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def join_lists(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]] | None:
    """Return the columns `names` of several sets of rows as one set, or None if a column is not a list."""
    if not all(type(rows[name]) is list for rows in parts for name in names):
        return None
    return {name: list(chain.from_iterable([rows[name] for rows in parts])) for name in names}


def concatenate_rows(parts: Sequence[pa.RecordBatch], encoding: "Columns") -> pa.RecordBatch:
    """Return several sets of rows, from `as_batch`, as one set.

    Raises:
        UserError: A column's types differ between the sets, so that a value would change if they were joined.
    """
    numbers, columns = encoding.numeric_columns, []
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
    for name in parts[0].schema.names:
        arrays = [part[name] for part in parts]
        if name in numbers and all(any(test(array.type) for test in plain) for array in arrays):
            arrays = [array.cast(pa.float64()) for array in arrays]  # all numbers are read as float64 later
        if any(array.type != arrays[0].type for array in arrays):
            raise UserError(f"column {name!r} has other types in other rows")
        columns.append(pa.concat_arrays(arrays))
    return pa.RecordBatch.from_arrays(columns, names=parts[0].schema.names)


def get_column_names(rows: Any) -> Sequence[Any]:
    """Return the names of the columns of `rows`; raise TypeError for a type that `Predictor` does not accept."""
    if isinstance(rows, pa.RecordBatch | pa.Table):
        return list(rows.schema.names)
    if isinstance(rows, Mapping) or _is_pandas(rows, "DataFrame"):
        return list(rows.keys())
    raise TypeError(
        f"rows must be a dict, a pandas DataFrame, or a pyarrow Table or RecordBatch, not a {type(rows).__name__}"
    )


def as_array(name: str, values: Any) -> pa.Array:
    """Return a column of any accepted type as an Arrow array; None and NaN in lists and frames become nulls.

    Raises:
        UserError: The column is not a valid Arrow array, or cannot be converted to one.
    """
    return _array(name, values, "values")


def _array(name: str, values: Any, what: str) -> pa.Array:
    """Return values as an Arrow array; None and NaN become nulls. `what` is "numbers" for numeric columns."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        _require_valid(name, values)
        return combined(values)
    if getattr(values, "ndim", 1) == 2:
        values = list(values)
    elif hasattr(values, "__array__") and not _is_pandas(values, "Series"):
        values = np.asarray(values)
    try:
        if isinstance(values, list | tuple):
            values = _round_integers(values) if what == "numbers" else _protect_values(name, values)
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"column {name!r} does not have {what} of one type: {first}") from None
    return combined(array)


def _round_integers(values: Sequence[Any]) -> Sequence[Any]:
    """Convert numbers to floats if Arrow might not convert some integers; numbers are read as floats in any case."""
    kinds = set(map(type, values))
    if int not in kinds or not kinds <= {int, float, type(None)}:
        return values
    if float in kinds or _exceed_int64(values):
        return [None if value is None else float(value) for value in values]
    return values


def _exceed_int64(values: Sequence[Any]) -> bool:
    return any(value is not None and abs(value) >= 2**63 for value in values)


def _protect_values(name: str, values: Sequence[Any]) -> Any:
    """Protect values that Arrow would change: large integers become text, and NumPy dates become an array.

    Raises:
        UserError: Dates are mixed with times, times with and without zones are mixed, or times have nanoseconds.
    """
    kinds = {type(value) for value in values}
    if int in kinds and kinds <= {int, type(None)} and _exceed_int64(values):
        return [None if value is None else str(value) for value in values]
    if np.datetime64 in kinds and kinds <= {np.datetime64, type(None)}:
        return np.array(["NaT" if value is None else value for value in values], "datetime64")
    times = [value for value in values if isinstance(value, datetime) and value == value]  # NaT != NaT
    if not times:
        return values
    if any(isinstance(value, date) and not isinstance(value, datetime) for value in values):
        raise UserError(f"column {name!r} mixes dates and times; give only times, or only dates")
    if len({value.tzinfo is None for value in times}) > 1:
        raise UserError(f"column {name!r} mixes times with and without a time zone; give only one kind")
    if any(getattr(value, "nanosecond", 0) for value in times):
        raise UserError(f"column {name!r} has times finer than a microsecond; give them as a pandas Series")
    return values


def _require_valid(name: str, values: Any) -> None:
    """Raise UserError for an Arrow array whose offsets or values lie outside its memory."""
    try:
        values.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"column {name!r} is not a valid Arrow array: {in_words(error)}") from None


def _is_scalar(value: Any) -> bool:
    return not hasattr(value, "__len__") or isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0


def _is_pandas(value: Any, kind: str) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and type(value).__name__ == kind
