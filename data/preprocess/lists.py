"""Columns of lists of numbers: vectors, whose N numbers become N numeric columns; and the weights of a bag's values.

Weights are numbers after a separator in the values' text, or lists in a column of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data import ragged
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import Codes, WrongValueError
from hostdev.data.preprocess.naming import short
from hostdev.data.preprocess.reading import ReadSettings, readable
from hostdev.kernels.arrays import Mask, Numbers, Values

MOST = 1 << 16  # maximum numbers in a vector
_LARGEST = float(np.finfo(np.float32).max)
Get = Callable[[str], pa.Array]


class Vector(NamedTuple):
    """A vector feature: its length, and the separator of its numbers in text (None means commas or whitespace)."""

    length: int
    separator: str | None = None

    def as_json(self) -> list[Any]:
        """Return the entry for the manifest; `vectors_in` parses it."""
        return list(self)

    def names(self, name: str) -> list[str]:
        """Return the names of the numeric columns that the feature `name` becomes."""
        return [f"{name}[{i}]" for i in range(self.length)]


def elements(vectors: Mapping[str, Vector]) -> tuple[str, ...]:
    """Return the names of the numeric columns into which vectors are split."""
    return tuple(part for name, vector in vectors.items() for part in vector.names(name))


def check_length(where: str, length: int) -> None:
    """Raise UserError, which begins with `where`, if a vector cannot have this many numbers."""
    if not 1 <= length <= MOST:
        raise UserError(f"{where}: a vector has 1 to {MOST:,} numbers, not {length}")


def with_elements(
    readings: Mapping[str, ReadSettings], vectors: Mapping[str, Vector], settings: Mapping[str, ReadSettings]
) -> dict[str, ReadSettings]:
    """Return the reading settings of all features; the numeric columns of a vector read the elements of its list.

    Args:
        readings: Settings by feature. A vector's columns have only the settings that apply to all columns.
        vectors: The vectors, by name.
        settings: Each feature's own settings. For a vector, its column's name and missing-value markers are used.
    """
    found = dict(readings)
    for name, vector in vectors.items():
        own = settings.get(name, ReadSettings())
        for element, part in enumerate(vector.names(name)):
            if part in found:
                before = found[part]
                found[part] = replace(
                    before,
                    column=own.column or name,
                    missing=tuple(dict.fromkeys([*before.missing, *own.missing])),
                    separator=vector.separator,
                    length=vector.length,
                    element=element,
                )
    return found


def vectors_in(options: Mapping[str, Any]) -> dict[str, Vector]:
    """Parse the manifest's entry on vectors; raise UserError if it is invalid."""
    try:
        return {name: Vector(*one) for name, one in dict(options.get("vectors") or {}).items()}
    except (TypeError, ValueError):
        raise UserError("manifest.json has invalid settings of vectors; preprocess the data again") from None


def read_numbers(
    names: Sequence[str], readings: Mapping[str, ReadSettings], get: Callable[[str], pa.Array], n: int
) -> tuple[Numbers, Mask]:
    """Return numeric columns [n, columns], NaN where a number is missing, and the mask of unreadable rows [n].

    Args:
        names: Names of the data set's numeric columns; a vector's columns are consecutive.
        readings: Reading settings by name.
        get: Called with a column's name in the file; returns the column [n].
    """
    found, unread = np.empty((n, len(names))), np.zeros(n, np.bool_)
    for place, name, width in _columns(names, readings):
        reading = readings[name]
        column = get(reading.column or name)
        if reading.element is None:
            found[:, place], wrong = reading.numbers_where_readable(column)
        else:
            found[:, place : place + width], wrong = _read_vectors(column, reading)
        unread |= wrong
    return found, unread


def require_numbers(
    names: Sequence[str], readings: Mapping[str, ReadSettings], get: Callable[[str], pa.Array], n: int
) -> Numbers:
    """Return numeric columns as `read_numbers` does; raise WrongNumberError for the first unreadable value."""
    found = np.empty((n, len(names)))
    for place, name, width in _columns(names, readings):
        reading = readings[name]
        column = reading.column or name
        try:
            if reading.element is None:
                found[:, place] = reading.numbers(get(column))
            else:
                found[:, place : place + width] = _require_vectors(get(column), reading)
        except WrongValueError as error:
            raise WrongNumberError(column, error) from None
    return found


class WrongNumberError(Exception):
    """The file's column `column` has an unreadable number or vector in row `row` of the chunk, from 0."""

    def __init__(self, column: str, error: WrongValueError) -> None:
        super().__init__(str(error))
        self.column, self.row = column, error.row


def _columns(names: Sequence[str], readings: Mapping[str, ReadSettings]) -> Iterator[tuple[int, str, int]]:
    """Yield the first column's index and name, and the column count, of each vector and each other numeric column."""
    for place, name in enumerate(names):
        reading = readings[name]
        if not reading.element:  # not a later element of a vector
            yield place, name, 1 if reading.element is None else reading.length or 1


def _read_vectors(column: pa.Array, reading: ReadSettings) -> tuple[Numbers, Mask]:
    """Return vectors [n, length], NaN where a vector is missing, and the mask of rows with an unreadable vector [n]."""
    lists, unread = _lists(column, reading)
    length = reading.length or 1
    lengths = arrow.list_lengths(lists)
    is_missing = pc.is_null(lists).to_numpy(zero_copy_only=False)
    good = np.flatnonzero((lengths == length) & ~is_missing & ~unread)
    found = np.full((len(column), length), np.nan)
    values, wrong = replace(reading, separator=None, element=None).numbers_where_readable(
        lists.take(pa.array(good)).flatten()
    )
    found[good] = values.reshape(len(good), length)
    unread = unread | ((lengths != length) & ~is_missing)
    unread[good] |= wrong.reshape(len(good), length).any(axis=1)
    return found, unread


def _require_vectors(column: pa.Array, reading: ReadSettings) -> Numbers:
    """Return vectors [n, length], NaN where a vector is missing; raise WrongValueError if a vector is unreadable."""
    found, unread = _read_vectors(column, reading)
    for row in np.flatnonzero(unread)[:1].tolist():
        lists, no_text = _lists(column.slice(row, 1), reading)
        if no_text[0]:
            raise WrongValueError(row, "the value is not text in UTF-8")
        if (length := int(arrow.list_lengths(lists)[0])) != reading.length:
            raise WrongValueError(row, f"the vector has {counted(length, 'number')}, not {reading.length}")
        try:
            replace(reading, separator=None, element=None).numbers(lists.flatten())
        except WrongValueError as error:
            raise WrongValueError(row, str(error)) from None
        raise WrongValueError(row, "the vector has a number that cannot be read")
    return found


def _lists(column: pa.Array, reading: ReadSettings) -> tuple[pa.Array, Mask]:
    """Return a column of lists or text as lists, null where missing, and the mask of rows that are not UTF-8."""
    column = arrow.decoded(column)
    kind = arrow.classify_type(column.type)
    if kind == "list":
        return column, np.zeros(len(column), np.bool_)
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), pa.list_(pa.float64())), np.zeros(len(column), np.bool_)
    if kind != "text":
        raise WrongValueError(0, f"it is of type {column.type}, not a list of numbers")
    column, no_text = readable(column)
    texts = reading.clean(column)
    texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
    texts = pc.replace_substring_regex(texts, r"^\[\s*|\s*\]$", "")
    if reading.separator is None:
        return pc.split_pattern_regex(pc.replace_substring_regex(texts, r"\s*,\s*", " "), r"\s+"), no_text
    return pc.split_pattern(texts, reading.separator), no_text


class WeightedValues(NamedTuple):
    """The N values of a weighted bag in n rows, including missing values.

    Attributes:
        values: The concatenated values of all rows, without their weights [N].
        lengths: The number of values of each row, int32 [n].
        weights: The weights, float64 [N]; NaN if invalid or missing.
        wrong: Mask of the rows with an invalid weight or text, or with more or fewer weights than values, bool [n]; the
            weight of a missing value is ignored.
    """

    values: pa.Array
    lengths: Codes
    weights: Numbers
    wrong: Mask


def can_be_weights(found: pa.DataType, separator: str | None) -> bool:
    """Return whether a column of this type can have a bag's weights; `separator` is the bag's, or None for lists."""
    kind = arrow.classify_type(found)
    if kind == "list":
        return arrow.classify_type(found.value_type) in ("number", "text", "bool")
    return pa.types.is_null(found) or (kind == "text" and separator is not None)


def read_weighted(reading: ReadSettings, name: str, get: Get) -> WeightedValues:
    """Read a weighted bag.

    Args:
        reading: Settings of the bag, with `weights` or `weights_column`.
        name: The feature's name, which is its column's name unless `reading` has another.
        get: Called with a column's name in the file; returns the column [n].
    """
    return _read(reading, name, get)[0]


def encode_weighted(reading: ReadSettings, name: str, get: Get) -> tuple[Codes, pa.StringArray, Codes, Values]:
    """Dictionary-encode a weighted bag as `ReadSettings.bags` does; also return the weights, float32 [N].

    The arguments are those of `read_weighted`. Raises WrongValueError for an invalid weight or value.
    """
    found = require_weighted(reading, name, get)
    with arrow.in_lists(found.lengths):
        codes, texts = reading.values(found.values)
    there = pc.not_equal(texts, "").to_numpy(zero_copy_only=False)[codes]
    codes, lengths = reading.known(codes, found.lengths, there)
    weights, _ = reading.known(found.weights, found.lengths, there)
    return codes, texts, lengths, weights.astype(np.float32)


def require_weighted(reading: ReadSettings, name: str, get: Get) -> WeightedValues:
    """Read a weighted bag; raise WrongValueError for the first row of `WeightedValues.wrong`."""
    found, invalid, given, sizes = _read(reading, name, get)
    if not found.wrong.any():
        return found
    row = int(np.flatnonzero(found.wrong)[0])
    length, size = int(found.lengths[row]), int(sizes[row])
    if length != size:
        counts = f"{counted(length, 'value')}, but {counted(size, 'weight')}"
        raise WrongValueError(row, f"{counts} in column {reading.weights_column!r}")
    start = int(found.lengths[:row].sum(dtype=np.int64))
    at = start + np.flatnonzero(invalid[start : start + length])[:1]
    if not len(at):
        raise WrongValueError(row, "not text in UTF-8")
    value, weight = (short(repr(array[int(at[0])].as_py())) for array in (found.values, given))
    if given[int(at[0])].as_py() is None:
        where = f" after {reading.weights!r}" if reading.weights is not None else ""
        raise WrongValueError(row, f"value {value} has no weight{where}")
    number, _ = ReadSettings(decimal=reading.decimal).numbers_where_readable(given.slice(int(at[0]), 1))
    what = "too large" if number[0] > _LARGEST else "not a number of at least 0"
    raise WrongValueError(row, f"value {value} has the weight {weight}, which is {what}")


def _read(reading: ReadSettings, name: str, get: Get) -> tuple[WeightedValues, Mask, pa.Array, Codes]:
    """Read a weighted bag.

    Returns the values; the mask of the values with an invalid weight [N]; the weights as the file has them, null where
    a value has none [N]; and each row's number of weights [n].
    """
    values, lengths, wrong = _flat(reading, get(reading.column or name))
    if reading.weights is not None:
        values, given = _split(values, reading)
        sizes = lengths
    else:
        assert reading.weights_column is not None
        given, sizes, unreadable = _flat(reading, get(reading.weights_column))
        uneven = sizes != lengths
        if uneven.any():
            given = _fitted(given, sizes, lengths, uneven)
        wrong = wrong | unreadable | uneven
    unmarked = ReadSettings(decimal=reading.decimal)  # no missing-value markers, which apply only to values
    weights, _ = unmarked.numbers_where_readable(given)
    cleaned = reading.clean(arrow.decoded(values))
    is_missing = pc.is_null(cleaned, nan_is_null=True).to_numpy(zero_copy_only=False)
    if pa.types.is_string(cleaned.type):
        is_missing = is_missing | pc.fill_null(pc.equal(cleaned, ""), True).to_numpy(zero_copy_only=False)
    valid = (weights >= 0) & (weights <= _LARGEST)  # false for NaN
    invalid = ~is_missing & ~valid
    rows = np.repeat(np.arange(len(lengths)), lengths)
    invalid &= ~wrong[rows]
    wrong = wrong.copy()
    wrong[rows[invalid]] = True
    return WeightedValues(values, lengths, np.where(valid, weights, np.nan), wrong), invalid, given, sizes


def _flat(reading: ReadSettings, array: pa.Array) -> tuple[pa.Array, Codes, Mask]:
    """Return the concatenated values of lists or texts, each row's number of values, and the mask of rows not in UTF-8.

    An empty text has no values.
    """
    array = arrow.decoded(array)
    if arrow.classify_type(array.type) == "list":
        values, bad = readable(arrow.decoded(array.flatten()))
        lengths = arrow.list_lengths(array).astype(np.int32)
        wrong = np.zeros(len(array), np.bool_)
        wrong[np.repeat(np.arange(len(array)), lengths)[bad]] = True
        return values, lengths, wrong
    texts, wrong = readable(array)
    values, lengths = reading.flat_values(texts)
    plain = pc.fill_null(texts.cast(pa.string()), "")
    is_empty = pc.equal(pc.utf8_trim_whitespace(plain), "").to_numpy(zero_copy_only=False) & (lengths == 1)
    if is_empty.any():
        values = values.filter(pa.array(np.repeat(~is_empty, lengths)))
        lengths = np.where(is_empty, 0, lengths).astype(np.int32)
    return values, lengths, wrong


def _split(values: pa.Array, reading: ReadSettings) -> tuple[pa.Array, pa.Array]:
    """Split texts [N] at their last separator; return the values and the weights, null where there is no separator."""
    assert reading.weights is not None
    if pa.types.is_null(values.type):
        return values, values
    if arrow.classify_type(values.type) != "text":
        raise WrongValueError(0, f"of type {values.type}, which is not text with weights after {reading.weights!r}")
    values = values.cast(pa.string())
    plain = pc.fill_null(values, "")
    if reading.trimmed:
        plain = pc.utf8_trim_whitespace(plain)
    parts = pc.split_pattern(plain, reading.weights, max_splits=1, reverse=True)
    sizes, flat = pc.list_value_length(parts).to_numpy(zero_copy_only=False), parts.flatten()
    starts = ragged.offsets_of(sizes)[:-1]
    first = pc.if_else(pc.is_null(values), pa.scalar(None, pa.string()), flat.take(pa.array(starts)))
    return first, flat.take(pa.array(starts + 1, mask=sizes < 2))


def _fitted(given: pa.Array, sizes: Codes, lengths: Codes, uneven: Mask) -> pa.Array:
    """Return the weights [N], with nulls in rows that have more or fewer weights than values."""
    places = np.full(int(lengths.sum(dtype=np.int64)), -1, np.int64)
    places[np.repeat(~uneven, lengths)] = np.flatnonzero(np.repeat(~uneven, sizes))
    return given.take(pa.array(places, mask=places < 0))
