"""Comparison of a column with a number or a time (`--test-after`)."""

import math
import re
from datetime import time
from decimal import ROUND_FLOOR, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data.preprocess.columns import (
    MISSING_NUMBERS,
    WrongValueError,
    cast,
    cast_where_possible,
    classify_type,
    decoded,
    trimmed,
)
from hostdev.data.preprocess.naming import short
from hostdev.kernels.arrays import Array, Mask

_TIME_OF_DAY = re.compile(r"(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?", re.ASCII)
_FLAG = "--test-after"
_EXACT = 2.0**53  # a float64 of this size or more may represent several integers
_DIGITS = 400  # enough digits to round a limit: up to 309 before the point (float64) and 76 after it (decimals)


def is_after(array: pa.Array, value: str, flag: str = _FLAG) -> Mask:
    """Return a mask, bool [n], of the values that are later (times) or larger (numbers) than `value`.

    Integers and decimals are compared exactly; numbers in text with a point or an exponent are compared as float64.
    `flag` is the option that error messages name.

    Raises:
        WrongValueError: A value of the array is missing or cannot be compared.
        UserError: `value` cannot be compared with the array's type.
    """
    later, wrong = is_after_where_readable(array, value, flag)
    if not wrong.any():
        return later
    row = int(np.flatnonzero(wrong)[0])
    array = decoded(array)
    text = "" if not array[row].is_valid else str(array[row].as_py())
    if text.strip() in MISSING_NUMBERS:
        raise WrongValueError(row, f"the value is missing, but {flag} needs a value in every row")
    what = "a number" if _find_type(value) == pa.float64() else f"a time like {value}"
    raise WrongValueError(row, f"{short(repr(text), 43)} is not {what}")


def is_after_where_readable(array: pa.Array, value: str, flag: str = _FLAG) -> tuple[Mask, Mask]:
    """Return two masks, bool [n].

    The first mask marks values that are later (times) or larger (numbers) than `value`; the second marks missing and
    unreadable values.

    Raises UserError if `value` cannot be compared with the array's type.
    """
    array = decoded(array)
    wrong = np.zeros(len(array), np.bool_)
    if classify_type(array.type) == "text":
        array, wrong = cast_where_possible(array, pa.string())
        array = trimmed(array)
    found = array.type if pa.types.is_temporal(array.type) else _find_type(value)
    if found is None or (pa.types.is_temporal(found) and classify_type(array.type) in ("number", "bool")):
        raise UserError(
            f"{flag}: {value!r} is neither a number nor a date or time such as 2024-12-31 or 2024-12-31T12:00:00"
        )
    limit: Any = None
    if pa.types.is_temporal(found):
        try:
            if pa.types.is_time(found):
                found, limit = pa.time64("ns"), _parse_time_of_day(value)
            else:
                limit = pa.scalar(value).cast(found)
        except (ValueError, pa.ArrowNotImplementedError):
            raise UserError(
                f"{flag}: {value!r} cannot be compared with a column of type {found}; write it like {_example(found)}"
            ) from None
    try:
        as_found, not_cast = array.cast(found, safe=False), np.zeros(len(array), np.bool_)
    except pa.ArrowInvalid:
        as_found, not_cast = cast_where_possible(array, found)
    wrong = wrong | not_cast | as_found.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    later = np.zeros(len(array), np.bool_)
    known = pa.array(~wrong)
    if limit is None:
        later[~wrong] = _is_larger(array.filter(known), value)
    else:
        later[~wrong] = pc.greater(as_found.filter(known), limit).to_numpy(zero_copy_only=False)
    return later, wrong


def _is_larger(array: pa.Array, value: str) -> Mask:
    """Return a mask, bool [n], of the numbers above `value`. Numbers may be text; no number may be missing."""
    kind = array.type
    if pa.types.is_decimal(kind) and np.isfinite(float(value)):
        with localcontext(prec=_DIGITS):
            limit = Decimal(value).quantize(Decimal(1).scaleb(-kind.scale), ROUND_FLOOR)
        try:
            return pc.greater(array, pa.scalar(limit, kind)).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
        except pa.ArrowInvalid:  # the limit has more digits than the column's type
            return np.full(len(array), limit < 0)
    if pa.types.is_integer(kind):
        return _is_integer_larger(array.to_numpy(zero_copy_only=False), value)
    numbers = cast(array, pa.float64(), "a number").to_numpy(zero_copy_only=False)
    larger: Mask = numbers > _float_at_most(value)
    if pa.types.is_string(kind):
        large = np.flatnonzero(np.abs(numbers) >= _EXACT)
        texts = array.take(pa.array(large))
        whole = pc.match_substring_regex(texts, "^[+-]?[0-9]+$").to_numpy(zero_copy_only=False)
        texts, large = texts.filter(pa.array(whole)), large[whole]
        try:
            larger[large] = _is_integer_larger(texts.cast(pa.int64()).to_numpy(zero_copy_only=False), value)
        except pa.ArrowInvalid:
            larger[large] = _is_integer_larger(
                np.array([int(Decimal(text)) for text in texts.to_pylist()], object), value
            )
    return larger


def _is_integer_larger(numbers: Array, value: str) -> Mask:
    """Return a mask of the integers larger than `value`, compared exactly."""
    limit = float(value)
    if not np.isfinite(limit):
        return np.full(len(numbers), limit < 0)
    floor = int(Decimal(value).to_integral_value(ROUND_FLOOR))
    if numbers.dtype != object:
        bounds = np.iinfo(numbers.dtype)
        if not bounds.min <= floor <= bounds.max:
            return np.full(len(numbers), floor < bounds.min)
        return numbers > numbers.dtype.type(floor)  # type: ignore[no-any-return]
    return np.array([number > floor for number in numbers], np.bool_)


def _float_at_most(value: str) -> float:
    """Return the largest float not above `value` if `value` is an integer, otherwise the float nearest to `value`."""
    found = float(value)
    if np.isfinite(found) and (exact := Decimal(value)) == exact.to_integral_value() and found > exact:
        return float(np.nextafter(found, -np.inf))
    return found


def _parse_time_of_day(value: str) -> pa.Scalar:
    """Parse a time of day; raise ValueError for any other text, such as a time with a time zone."""
    found = _TIME_OF_DAY.fullmatch(value)
    if found is None:
        raise ValueError(value)
    hour, minute, second, fraction = found.groups("0")
    at = time(int(hour), int(minute), int(second))
    seconds = 3600 * at.hour + 60 * at.minute + at.second
    return pa.scalar(seconds * 10**9 + int(fraction.ljust(9, "0")), pa.time64("ns"))


def _find_type(value: str) -> pa.DataType | None:
    """Return the type for comparing text with `value`: float64 or a timestamp; None if `value` is not such text."""
    for found in (pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            pa.scalar(value).cast(found)
        except pa.ArrowInvalid:
            continue
        return found if found != pa.float64() or _is_ordered(value) else None
    return None


def _is_ordered(value: str) -> bool:
    """Return whether Python's `float` accepts `value`, as Arrow does, and the result is not NaN."""
    try:
        return not math.isnan(float(value))
    except ValueError:  # such as nan(abc), which Arrow accepts
        return False


def _example(found: pa.DataType) -> str:
    if pa.types.is_timestamp(found):
        return "2024-12-31T12:00:00Z" if found.tz else "2024-12-31T12:00:00"
    if pa.types.is_time(found):
        return "12:00:00"
    return "2024-12-31" if pa.types.is_date(found) else "one of the column's values"
