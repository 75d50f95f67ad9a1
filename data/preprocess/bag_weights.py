"""Weights of a bag's values: numbers after a separator in the values' text, or lists in a column of their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.progress import counted
from hostdev.data import ragged
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import Codes, WrongValueError
from hostdev.data.preprocess.naming import short
from hostdev.data.preprocess.reading import Reading

_LARGEST = float(np.finfo(np.float32).max)

Get = Callable[[str], pa.Array]


class WeightedValues(NamedTuple):
    """The N values of a weighted bag in n rows, including missing values.

    Attributes:
        values: The concatenated values of all rows, without their weights [N].
        lengths: The number of values of each row, int32 [n].
        weights: The weights, float64 [N]; NaN if unreadable.
        wrong: Mask of the rows with an invalid weight, bool [n]; the weight of a missing value is ignored.
    """

    values: pa.Array
    lengths: Codes
    weights: npt.NDArray[np.float64]
    wrong: npt.NDArray[np.bool_]


def read_weighted(reading: Reading, name: str, get: Get) -> WeightedValues:
    """Read a weighted bag.

    Args:
        reading: Settings of the bag, with `weights` or `weights_column`.
        name: The feature's name, which is its column's name unless `reading` has another.
        get: Returns the file's column with a name [n].

    Raises:
        WrongValueError: Text is not UTF-8, or a column has another type than lists or text.
    """
    values, lengths = reading.flat_values(get(reading.column or name))
    if reading.weights is not None:
        values, texts = _split(values, reading.weights)
        uneven = np.zeros(len(lengths), np.bool_)
    else:
        assert reading.weights_column is not None
        texts, sizes = reading.flat_values(get(reading.weights_column))
        uneven = sizes != lengths
        if uneven.any():
            texts = _fitted(texts, sizes, lengths, uneven)
    weights, _ = Reading(decimal=reading.decimal).numbers_where_readable(texts)  # markers are for the values
    cleaned = reading.clean(arrow.decoded(values))
    is_missing = pc.is_null(cleaned, nan_is_null=True).to_numpy(zero_copy_only=False)
    if pa.types.is_string(cleaned.type):
        is_missing = is_missing | pc.fill_null(pc.equal(cleaned, ""), True).to_numpy(zero_copy_only=False)
    invalid = ~is_missing & ~((weights >= 0) & (weights <= _LARGEST))  # NaN is neither
    wrong = uneven.copy()
    wrong[np.repeat(np.arange(len(lengths)), lengths)[invalid]] = True
    return WeightedValues(values, lengths, weights, wrong)


def encode_weighted(
    reading: Reading, name: str, get: Get
) -> tuple[Codes, pa.StringArray, Codes, npt.NDArray[np.float32]]:
    """Dictionary-encode a weighted bag as `Reading.bags` does; also return the weights, float32 [N].

    The arguments are those of `read_weighted`; no weight may be invalid.
    """
    found = read_weighted(reading, name, get)
    try:
        codes, texts = reading.values(found.values)
    except WrongValueError as error:
        error.row = arrow.find_row(error.row, found.lengths)
        raise
    there = pc.not_equal(texts, "").to_numpy(zero_copy_only=False)[codes]
    codes, lengths = reading.known(codes, found.lengths, there)
    weights, _ = reading.known(found.weights, found.lengths, there)
    return codes, texts, lengths, weights.astype(np.float32)


def require_weights(reading: Reading, name: str, get: Get) -> None:
    """Raise WrongValueError for the first row of a weighted bag that has an invalid weight."""
    found = read_weighted(reading, name, get)
    if found.wrong.any():
        row = int(np.flatnonzero(found.wrong)[0])
        raise WrongValueError(row, _reason(reading, name, lambda column: get(column).slice(row, 1)))


def _reason(reading: Reading, name: str, get: Get) -> str:
    """Describe the first invalid weight of a single row."""
    found = read_weighted(reading, name, get)
    values, count = found.values.to_pylist(), counted(len(found.values), "value")
    if reading.weights_column is not None:
        given = reading.flat_values(get(reading.weights_column))[0].to_pylist()
        if len(given) != len(values):
            return f"{count}, but {counted(len(given), 'weight')} in column {reading.weights_column!r}"
    else:
        given = _split(reading.flat_values(get(reading.column or name))[0], reading.weights or "")[1].to_pylist()
    for value, weight, number in zip(values, given, found.weights.tolist(), strict=True):
        if weight is None and value not in (None, "", *reading.missing):
            where = f" after {reading.weights!r}" if reading.weights is not None else ""
            return f"value {short(repr(value))} has no weight{where}"
        if not 0 <= number <= _LARGEST and value not in (None, "", *reading.missing):
            return (
                f"value {short(repr(value))} has the weight {short(repr(weight))}, which is not a number of at least 0"
            )
    return "a weight cannot be read"


def _split(values: pa.Array, separator: str) -> tuple[pa.Array, pa.Array]:
    """Split texts [N] at their last separator; return the values and the weights, null where there is no separator."""
    values = arrow.decoded(values)
    if pa.types.is_null(values.type):
        return values, values
    if arrow.classify_type(values.type) != "text":
        raise WrongValueError(0, f"of type {values.type}, which is not text with weights after {separator!r}")
    values = arrow.cast(values, pa.string(), "text in UTF-8")
    parts = pc.split_pattern(pc.fill_null(values, ""), separator, max_splits=1, reverse=True)
    sizes, flat = pc.list_value_length(parts).to_numpy(zero_copy_only=False), parts.flatten()
    starts = ragged.offsets_of(sizes)[:-1]
    first = pc.if_else(pc.is_null(values), pa.scalar(None, pa.string()), flat.take(pa.array(starts)))
    return first, flat.take(pa.array(starts + 1, mask=sizes < 2))


def _fitted(texts: pa.Array, sizes: Any, lengths: Codes, uneven: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the weights [N], with nulls in rows that have more or fewer weights than values."""
    places = np.full(int(lengths.sum(dtype=np.int64)), -1, np.int64)
    places[np.repeat(~uneven, lengths)] = np.flatnonzero(np.repeat(~uneven, sizes))
    return texts.take(pa.array(places, mask=places < 0))
