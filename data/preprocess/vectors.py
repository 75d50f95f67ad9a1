"""Vector columns: each row has a list of N numbers, which become N numeric columns of the data set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import WrongValueError
from hostdev.data.preprocess.reading import ReadSettings, readable
from hostdev.kernels.arrays import Mask, Numbers

MOST = 1 << 16  # numbers in a vector


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
    """Return the reading settings of all features, where the numeric columns of vectors read elements of a list.

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
        names: Names of the data set's numeric columns; those of a vector are consecutive.
        readings: Reading settings by name.
        get: Returns the values [n] of the file's column with a name.
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
    """Yield each vector and each other numeric column: its first column's index and name, and its number of columns."""
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
