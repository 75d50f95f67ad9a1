"""Values of raw rows in the types that they had when a query read them in training.

DuckDB guesses a text file's types from its values. A few rows to predict may suggest other types, so the types of the
training files are kept. Text that does not fit the type, or 3.7 for an integer, is an error; numbers are rounded to a
floating-point or decimal type as DuckDB rounds text.
"""

from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.printable import printable
from hostdev.data.preprocess.columns import WrongValueError, combined, reject
from hostdev.data.preprocess.query.engine import Engine, in_one_line
from hostdev.data.preprocess.query.spelling import quoted

_INTEGERS = frozenset(
    f"{sign}{name}" for sign in ("", "U") for name in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
)
_SHOWN = 40
_TEXTS = "hostdev texts"  # name of the table with the texts to parse
_ERRORS = (pa.ArrowException, ValueError, TypeError, OverflowError)


class RawType(NamedTuple):
    """A column's type in training.

    Attributes:
        name: DuckDB's name, such as "BIGINT".
        kind: The type of such a column as an Arrow array.
        format: Format of dates or times in text, for DuckDB's `strptime`; None for ISO 8601.
    """

    name: str
    kind: pa.DataType
    format: str | None

    @property
    def is_text(self) -> bool:
        """Whether values are text."""
        return bool(pa.types.is_string(self.kind))

    @property
    def is_list(self) -> bool:
        """Whether values are lists."""
        return bool(pa.types.is_list(self.kind))


def convert(engine: Engine, values: pa.Array, wanted: RawType, *, empty_is_missing: bool) -> pa.Array:
    """Return values [n] of any type as an array [n] of the type in training.

    Args:
        engine: Parses text; no other thread may use it during the call.
        values: The values.
        wanted: The type.
        empty_is_missing: Whether empty text is a missing value also if `wanted` is text, as in CSV files.

    Raises:
        WrongValueError: A value is not of this type, and is not equal to a value of it.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), wanted.kind)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or values.type == pa.string_view():
        texts = values.cast(pa.string())
        if not wanted.is_text or empty_is_missing:
            texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        return texts if wanted.is_text else _parse(engine, texts, wanted)
    if values.type == wanted.kind:
        return values
    found = _cast(values, wanted)
    if found is None:
        row = _first_wrong(values, wanted)
        shown = printable(str(values[row].as_py()), _SHOWN)
        hint = "; give it as text, as written in training" if wanted.is_text else ""
        raise WrongValueError(
            row, f"{shown} is of type {values.type}, but the column was {wanted.name} in training{hint}"
        )
    return found


def _parse(engine: Engine, texts: pa.Array, wanted: RawType) -> pa.Array:
    """Parse texts [n] as DuckDB does; raise WrongValueError for text that has no value of the type."""
    name = wanted.name
    value = f"TRY_CAST(text AS {name})"
    if wanted.format is not None:
        value = f"TRY_CAST(try_strptime(text, {quoted(wanted.format)}) AS {name})"
    elif name in _INTEGERS:  # TRY_CAST rounds 3.7
        value = f"CASE WHEN regexp_full_match(trim(text), '[+-]?[0-9]+') THEN TRY_CAST(trim(text) AS {name}) END"
    elif name == "DATE":  # TRY_CAST drops the time of day
        value = f"CASE WHEN TRY_CAST(text AS TIMESTAMP) = {value} THEN {value} END"
    with in_one_line():
        engine.connection.register(_TEXTS, pa.table({"text": texts}))
        found = engine.connection.sql(f'SELECT {value} AS value FROM "{_TEXTS}"').to_arrow_table()["value"]
    array = combined(found) if found.num_chunks else pa.nulls(0, wanted.kind)
    wrong = pc.and_(array.is_null(), texts.is_valid()).to_numpy(zero_copy_only=False)
    form = "" if wanted.format is None else f" in the format {wanted.format}"
    was = f"of type {name}{form}, as the column was in training"
    reject(wrong, lambda row: f"{printable(texts[row].as_py(), _SHOWN)!r} is not {was}")
    return array


def _cast(values: pa.Array, wanted: RawType) -> pa.Array | None:
    """Cast values [n] of a type other than text to the type in training; return None if a value does not fit it."""
    kind, types = wanted.kind, pa.types
    if values.null_count == len(values):
        return pa.nulls(len(values), kind)
    if wanted.is_text:
        return values.cast(kind) if types.is_integer(values.type) else None
    if getattr(values.type, "tz", None) is None and getattr(kind, "tz", None) is not None:
        return None
    if getattr(values.type, "tz", None) is not None and getattr(kind, "tz", None) is None:
        return None
    is_number = types.is_integer(values.type) or types.is_floating(values.type) or types.is_decimal(values.type)
    try:
        if is_number and (types.is_floating(kind) or types.is_decimal(kind)):
            return values.cast(kind, safe=False)
        found = values.cast(kind)  # raises for an integer with a fraction
        if types.is_nested(kind) or (is_number and types.is_integer(kind)):
            return found
        return found if found.cast(values.type).equals(values) else None
    except _ERRORS:
        return None


def _first_wrong(values: pa.Array, wanted: RawType) -> int:
    """Return the index of the first value that `_cast` refuses."""
    low, high = 0, len(values)  # the first `low` values all fit, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if _cast(values.slice(0, middle), wanted) is None:
            high = middle
        else:
            low = middle
    return low


def array_of(values: Any, wanted: RawType) -> pa.Array | None:
    """Return a list of plain values as an array of the type in training, or None if `convert` has to check them."""
    kind = wanted.kind
    if type(values) is not list:
        return None
    kinds = set(map(type, values))
    right = (
        (pa.types.is_string(kind) and kinds <= {str, type(None)} and "" not in values)
        or (pa.types.is_integer(kind) and kinds <= {int, type(None)})
        or (pa.types.is_floating(kind) and kinds <= {float, int, type(None)})
    )
    try:
        return pa.array(values, kind, from_pandas=True) if right else None
    except _ERRORS:
        return None
