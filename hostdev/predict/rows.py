"""What a program gives to `Predictor` as rows, dicts, pandas' frames and Arrow's tables: to one record batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from hostdev.core.errors import UserError, in_words
from hostdev.core.progress import counted
from hostdev.data.schema import Schema


def as_mapping(rows: Any) -> Any:
    """Return a pandas Series as a dict of its values: it is one row; anything else as it is."""
    return rows.to_dict() if _is_pandas(rows, "Series") else rows


def as_columns(rows: Mapping[Any, Any], schema: Schema) -> dict[str, Any]:
    """Return the columns that are needed, each with a value for each row; single values are one row.

    A bag may have a list of its values where all other columns have single values.

    Raises UserError for columns of other lengths.
    """
    plain = [name for name in _names(schema) if name not in schema.bags]
    one = bool(plain) and all(_is_single(rows[name]) for name in plain)
    columns = {}
    for name in _names(schema):
        values = rows[name]
        is_list = not _is_single(values)
        if not is_list or (one and name in schema.bags and all(map(_is_single, values))):
            columns[name] = [values]
        else:
            columns[name] = values
    n = max(map(len, columns.values()), default=0)
    longest = next((name for name, values in columns.items() if len(values) == n), "")
    for name, values in columns.items():
        if len(values) == n:
            continue
        what = f"{counted(len(values), 'value')}" if not _is_single(rows[name]) else "a single value"
        raise UserError(f"column {name!r} has {what}, and column {longest!r} has {n:,}; give one for each row")
    return columns


def as_batch(rows: Any, schema: Schema) -> pa.RecordBatch:
    """Return the columns that are needed of rows that have them.

    rows  a dict of columns as of `as_columns`, a pandas DataFrame, a pyarrow Table or RecordBatch

    Raises UserError for a column that Arrow does not take.
    """
    names = _names(schema)
    if isinstance(rows, pa.RecordBatch):
        return _valid(rows.select([name for name in names if name in rows.schema.names]))
    if isinstance(rows, pa.Table):
        columns = [rows[name].combine_chunks() for name in names]
        arrays = [column.chunk(0) if isinstance(column, pa.ChunkedArray) else column for column in columns]
    else:
        numbers = set(schema.dense)
        arrays = [_array(name, rows[name], "numbers" if name in numbers else "values") for name in names]
    return _valid(pa.RecordBatch.from_arrays(arrays, names=names))


def _valid(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows whose offsets, indices and texts are what Arrow says; UserError where they are not."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise UserError(f"column {name!r} is not a valid array of Arrow's: {in_words(error)}") from None
    return batch


def names_of(rows: Any) -> Sequence[Any]:
    """Return the names of the columns of rows; TypeError for what has none."""
    if isinstance(rows, pa.RecordBatch | pa.Table):
        return list(rows.schema.names)
    if isinstance(rows, Mapping) or _is_pandas(rows, "DataFrame"):
        return list(rows.keys())
    raise TypeError(
        f"rows are a dict, a pandas DataFrame, a pyarrow Table or RecordBatch, not of type {type(rows).__name__}"
    )


def _names(schema: Schema) -> list[str]:
    return [*schema.dense, *(column.name for column in schema.columns)]


def _array(name: str, values: Any, what: str) -> pa.Array:
    """Return values as an array; None and NaN are missing."""
    if getattr(values, "ndim", 1) == 2:
        values = list(values)
    elif hasattr(values, "__array__") and not _is_pandas(values, "Series") and not isinstance(values, pa.Array):
        values = np.asarray(values)
    try:
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"column {name!r} does not have {what} of one kind: {first}") from None
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array


def _is_single(value: Any) -> bool:
    return not hasattr(value, "__len__") or isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0


def _is_pandas(value: Any, kind: str) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and type(value).__name__ == kind
