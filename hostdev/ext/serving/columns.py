"""Describes the columns that a model reads as inputs of the protocol, and converts requests to columns to encode.

Values reach the encoder with the types that they have in a request, so that it finds the same ids as `Predictor`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.naming import listed
from hostdev.ext.predict.predictor import Predictor
from hostdev.ext.serving.json_input import PIECE_BYTES, is_unicode, parse_json, scan
from hostdev.ext.serving.refused import Limits, bad, too_large
from hostdev.ext.serving.tensors import BYTES, Tensor, shown

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawPlan

_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
_MOST_ROW_VALUES = 1 << 18
_TEXT, _NUMBER = {str, type(None)}, {int, float, type(None)}

Columns = dict[str, Any]  # by name: for n rows, a list [n], or an array [n] or, if each row has k values, [n, k]


@dataclass(frozen=True)
class RawColumn:
    """A column that a model, or its query, reads from a request's rows.

    Attributes:
        kind: "id" (one value per row), "bag" (any number of values), "number", "vector" or "weights" (of a bag).
        datatype: The data type that the protocol's metadata shows; other data types are accepted, too.
        shape: The shape that the metadata shows; -1 stands for any number.
        separator: Separates the values of a bag, a vector or weights in text; None if the text is a JSON list.
    """

    name: str
    kind: str
    datatype: str
    shape: tuple[int, ...]
    separator: str | None = None

    @cached_property
    def has_lists(self) -> bool:
        """Whether a row has a list of values."""
        return self.kind in ("bag", "vector", "weights")


def describe_inputs(predictor: Predictor) -> dict[str, RawColumn]:
    """Return the columns that a model reads, by name, in the data set's order."""
    encoding, schema = predictor.encoding, predictor.data.schema
    columns = {encoding.source(column.name): column for column in schema.columns}
    numbers: dict[str, int] = {}
    for name in schema.dense:
        numbers[encoding.source(name)] = numbers.get(encoding.source(name), 0) + 1
    separators = encoding.separators
    found = {}
    for name in encoding.columns():
        separator = separators.get(name)
        if (column := columns.get(name)) is not None:
            is_integer = column.kind == "id" and _is_integer(encoding, column.space)
            datatype = "INT64" if is_integer else BYTES
            found[name] = RawColumn(name, column.kind, datatype, (-1,), separator)
        elif name not in separators:
            found[name] = RawColumn(name, "number", "FP64", (-1,))
        elif name in numbers:
            found[name] = RawColumn(name, "vector", "FP64", (-1, numbers[name]), separator)
        else:
            found[name] = RawColumn(name, "weights", BYTES, (-1,), separator)
    return found


def describe_raw_inputs(plan: "RawPlan", inputs: Mapping[str, RawColumn]) -> dict[str, RawColumn]:
    """Return the columns that a plan reads from raw rows, by name; `inputs` has the columns of the data set."""
    found = {}
    for name, source in plan.taken.items():
        found[source] = replace(inputs[name], name=source)
    for name in plan.raw:
        kind = plan.type_of(name)
        if kind.is_list:
            found[name] = RawColumn(name, "bag", BYTES, (-1,))
        else:
            is_text = not (pa.types.is_integer(kind.kind) or pa.types.is_floating(kind.kind))
            datatype = BYTES if is_text else "INT64" if pa.types.is_integer(kind.kind) else "FP64"
            found[name] = RawColumn(name, "id" if is_text else "number", datatype, (-1,))
    return found


def names_in(content: Any) -> list[str] | None:
    """Return the names of the columns of a JSON document, or None if it has another form, or no rows."""
    if not isinstance(content, dict):
        return None
    rows, columns = content.get("rows"), content.get("columns")
    first = rows[0] if isinstance(rows, list) and rows else columns
    return list(first) if isinstance(first, dict) else None


def _is_integer(encoding: Encoding, space: str) -> bool:
    types = encoding.written[space].types
    return bool(types) and set(types) <= _INTEGERS


def from_tensors(tensors: Sequence[Tensor], inputs: Mapping[str, RawColumn]) -> Columns:
    """Return the columns of a request's tensors.

    Raises:
        RefusedError: An input is missing or unknown, or its shape does not fit the column.
    """
    given = {tensor.name: tensor for tensor in tensors}
    for name in given:
        if name not in inputs:
            raise bad(f"the model has no input {name!r}; its inputs are {listed(list(inputs))}")
    _require_all(given, inputs)
    return {name: _from_tensor(given[name], about) for name, about in inputs.items()}


def _from_tensor(tensor: Tensor, about: RawColumn) -> Any:
    values, name, is_flat = tensor.values, tensor.name, len(tensor.shape) == 1
    if not is_flat and tensor.shape[1] == 1 and (tensor.datatype == BYTES or not about.has_lists):
        values, is_flat = [row[0] for row in values] if isinstance(values, list) else values[:, 0], True
    if not is_flat and not about.has_lists:
        raise bad(f"input {name!r} has {tensor.shape[1]} values per row; it needs [rows] or [rows, 1]")
    if is_flat and about.has_lists:
        if tensor.datatype != BYTES:
            raise bad(f"input {name!r}: {tensor.datatype} needs the shape [rows, values of a row]; BYTES may be [rows]")
        assert isinstance(values, list)
        if about.separator is None:
            return [_parse_list(text, row, name) for row, text in enumerate(values)]
    if isinstance(values, list):
        return values
    if (is_flat and (about.kind == "number" or values.dtype.kind in "iub")) or not values.size:
        return values.tolist()  # the encoder is faster on lists
    return values.astype("float32") if values.dtype == "float16" else values


def _parse_list(text: str | None, row: int, name: str) -> list[Any] | None:
    if text is None or text == "":
        return None
    where = f"row {row + 1}, column {name!r}"
    content = text.encode()
    structure = scan(content, where) if len(content) > PIECE_BYTES else None
    if structure is not None and structure.containers > 1:
        raise bad(f"{where}: a list has a list or an object; give single values")
    found = parse_json(content, where, structure)
    if not isinstance(found, list):
        raise bad(f"{where}: {shown(found)} is not a list; write the row's values as a JSON list")
    return found


def from_rows(
    content: Any, inputs: Mapping[str, RawColumn], limits: Limits, *, has_escapes: bool = True
) -> tuple[Columns, int, int]:
    """Return the columns of a JSON document, its number of rows, and the number of values in its lists.

    Args:
        content: {"rows": [{NAME: VALUE, ...}, ...]} or {"columns": {NAME: [VALUE, ...], ...}}. Other columns, such as
            the label, are ignored: only those in `inputs` are read.
        inputs: The columns that the model reads.
        limits: The limits of requests.
        has_escapes: Whether the document may have characters that were written as \\u and digits; only these can be
            halves of surrogate pairs.

    Raises:
        RefusedError: The document has another form or too many rows or values, or a value is missing or of a wrong
            type.
    """
    if not isinstance(content, dict) or len(content) != 1 or not content.keys() <= {"rows", "columns"}:
        raise bad('the body must be {"rows": [{NAME: VALUE, ...}, ...]} or {"columns": {NAME: [VALUE, ...], ...}}')
    given = content.get("rows")
    if "rows" in content:
        if not isinstance(given, list):
            raise bad("`rows` must be a list of objects")
        rows = len(given)
        _require_few(rows, limits)
        columns = _transpose(given, inputs)
    else:
        given = content["columns"]
        if not isinstance(given, dict):
            raise bad("`columns` must be an object with a list for each column")
        _require_all(given, inputs)
        columns = {name: given[name] for name in inputs}
        for name, values in columns.items():
            if not isinstance(values, list):
                raise bad(f"column {name!r} must be a list with one value per row")
        rows = len(next(iter(columns.values()), []))
        _require_few(rows, limits)
        for name, values in columns.items():
            if len(values) != rows:
                first = next(iter(columns))
                raise bad(f"column {name!r} has {len(values):,} values, but column {first!r} has {rows:,}")
    in_lists = count_values(columns, inputs, limits)
    _require_right(columns, inputs, has_escapes=has_escapes)
    return columns, rows, in_lists


def count_values(columns: Columns, inputs: Mapping[str, RawColumn], limits: Limits) -> int:
    """Return the number of values in the lists and separated texts of a request's columns.

    Raises:
        RefusedError: A row or the request has too many values. A vector may have as many as the model demands.
    """
    total = most = 0
    for name, about in inputs.items():
        if not about.has_lists:
            continue
        values, separator = columns[name], about.separator
        if isinstance(values, np.ndarray):
            counts = [values.size // max(1, len(values))] * len(values)
        else:
            counts = [
                len(value)
                if type(value) is list
                else value.count(separator) + 1
                if separator and type(value) is str
                else 1
                for value in values
            ]
        longest = max(counts, default=0)
        if longest > max(_MOST_ROW_VALUES, about.shape[-1]):
            raise too_large(
                f"row {counts.index(longest) + 1}, column {name!r} has {longest:,} values, more than "
                f"{_MOST_ROW_VALUES:,}"
            )
        total += sum(counts)
        most += max(0, about.shape[-1]) * len(counts)
    if total > limits.most_values:
        limits.require_few("the request", total, most)
    return total


def _require_right(columns: Columns, inputs: Mapping[str, RawColumn], *, has_escapes: bool) -> None:
    """Raise RefusedError unless all values of a column have one JSON type and are in range; null is a missing value."""
    texts: list[str] = []  # texts to check together; to check them one by one takes much longer
    numbers: list[float | None] = []
    for name, about in inputs.items():
        values = columns[name]
        kinds = set(map(type, values))
        if kinds <= _TEXT and (not about.has_lists or about.separator is not None):
            if has_escapes:
                texts += filter(None, values)
        elif kinds <= _NUMBER and not about.has_lists:
            numbers += values
        else:
            _require_alike(values, about)
    if not (_are_in_range(numbers) and is_unicode(texts)):
        for name, about in inputs.items():
            _require_alike(columns[name], about)


def _are_in_range(numbers: Sequence[float | None]) -> bool:
    """Return whether all numbers, integers and others, are at least -2**63 and below 2**64; None is skipped."""
    some = [number for number in numbers if number is not None]
    return not some or (min(some) >= -(1 << 63) and max(some) < 1 << 64)


def _transpose(rows: list[Any], inputs: Mapping[str, RawColumn]) -> Columns:
    try:
        return {name: [row[name] for row in rows] for name in inputs}
    except (KeyError, TypeError, IndexError):
        pass
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise bad(f"row {number} is {shown(row)}; it must be an object with a value for each column")
        for name in inputs:
            if name not in row:
                raise bad(f"row {number} has no column {name!r}; give null for a missing value")
    raise AssertionError("all rows have all columns")


def _require_alike(values: list[Any], about: RawColumn) -> None:
    """Raise RefusedError if a value is an object, an unexpected list or out of range, or if value types differ."""
    first = None
    for row, value in enumerate(values):
        if value is None:
            continue
        where = f"row {row + 1}, column {about.name!r}"
        if type(value) is dict or (type(value) is list and not about.has_lists):
            raise bad(f"{where}: {shown(value)} is not accepted; give one value")
        if about.has_lists and type(value) is not list and (type(value) is not str or about.separator is None):
            raise bad(f"{where}: {shown(value)} is not a list of values")
        kind = _KINDS[type(value)]
        first = first or kind
        if kind != first:
            given = kind if type(value) is list else f"{shown(value)} is {kind}"
            way = (
                f"; give {first} in each row, or {kind} in each row" if about.has_lists else "; give values of one type"
            )
            raise bad(f"{where}: {given}, but values above it are {first}{way}")
        for one in value if type(value) is list else (value,):
            _require_plain(one, where)


def _require_plain(value: Any, where: str) -> None:
    if isinstance(value, list | dict):
        raise bad(f"{where}: a list has {shown(value)}; give single values")
    if type(value) is int and abs(value) >= 1 << 64:
        raise bad(f"{where}: {shown(value)} has more than 64 bits; give it as text")
    if type(value) is str and not is_unicode([value]):
        raise bad(f"{where}: the text has half of a surrogate pair")


def _require_all(given: Mapping[str, Any], inputs: Mapping[str, RawColumn]) -> None:
    for name in inputs:
        if name not in given:
            raise bad(f"the request has no column {name!r}; the model reads {listed(list(inputs))}")


def _require_few(rows: int, limits: Limits) -> None:
    if rows > limits.most_rows:
        raise too_large(f"the request has {rows:,} rows, more than {limits.most_rows:,}; send them in several requests")
