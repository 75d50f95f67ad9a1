"""Arrow columns to what a data set is made of: text by number, numbers, labels, bags, times."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data import ragged

Codes = npt.NDArray[np.int32]

MISSING_NUMBERS = ("", "NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "NaN", "nan", "-NaN", "-nan")
_TRUE_OR_FALSE: dict[str | Decimal, float] = {Decimal(0): 0.0, Decimal(1): 1.0, "false": 0.0, "true": 1.0}
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": np.greater_equal,
    "<=": np.less_equal,
    ">": np.greater,
    "<": np.less,
}
_BINARY = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
TEXT_OR_WHOLE = "text or whole numbers"  # of `written_as`
_SHOWN = 40  # characters of a wrong value in a message


def bytes_of(texts: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """Return texts without nulls as offsets, int32 or int64 [n + 1], and bytes."""
    _, offsets, data = texts.buffers()
    dtype = np.dtype(np.int64 if pa.types.is_large_string(texts.type) else np.int32)
    begin = np.zeros(1, dtype)
    if len(texts):
        begin = np.frombuffer(offsets, dtype, len(texts) + 1, dtype.itemsize * texts.offset)
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return begin, content


def text_from(offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> pa.LargeStringArray:
    """Return the texts that `bytes_of` gave."""
    return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


class WrongValueError(Exception):
    """A value that the column may not have: its row in the chunk, from 0, and what is wrong with it."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def check_text(array: pa.Array) -> None:
    """Raise WrongValueError for the first text, alone or in a list, that is not UTF-8; pa.ArrowInvalid for others."""
    try:
        array.validate(full=True)
        return
    except pa.ArrowInvalid:
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if (kind := kind_of(array.type)) not in ("text", "list"):
            raise
    if kind == "text":
        cast(array.cast(_BINARY.get(array.type, array.type)), pa.string(), "text in UTF-8")
        return
    try:
        check_text(array.flatten())
    except WrongValueError as error:
        error.row = row_of(error.row, list_lengths(array))
        raise


def row_of(value: int, lengths: npt.NDArray[Any]) -> int:
    """Return which of lists of these lengths has the value of this number."""
    return int(np.searchsorted(ragged.offsets_of(lengths), value, "right")) - 1


@dataclass(frozen=True)
class Positive:
    """Which labels are positive: those that are `op` `value`; op is one of >, >=, <, <=, = and !=."""

    op: str
    value: str

    def __post_init__(self) -> None:
        if self.orders and not _is_number(self.value):
            raise UserError(f"--positive {self.op}{self.value}: {self.value!r} is not a number")

    @property
    def orders(self) -> bool:
        """Whether it compares numbers by size."""
        return self.op in _ORDERS

    @staticmethod
    def parse(text: str) -> "Positive":
        """Read ">3", "!=no" or "yes"."""
        for op in (">=", "<=", "!=", "==", ">", "<", "="):
            if text.startswith(op):
                return Positive("=" if op == "==" else op, text.removeprefix(op).strip())
        return Positive("=", text.strip())


def kind_of(found: pa.DataType) -> str:
    """Return "text", "number", "bool", "other" (dates, times), "list" or "nested" for a column's type."""
    if pa.types.is_dictionary(found):
        return kind_of(found.value_type)
    if any(test(found) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        return "nested" if pa.types.is_nested(found.value_type) else "list"
    if pa.types.is_nested(found):
        return "nested"
    if pa.types.is_boolean(found):
        return "bool"
    if pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found):
        return "number"
    if pa.types.is_temporal(found) and not pa.types.is_duration(found):
        return "other"
    readable = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_null,
    )
    return "text" if any(test(found) for test in readable) else "nested"


def list_lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return how many values the list of each row has, int64 [n]; 0 where there is none."""
    if kind_of(array.type) != "list":
        return np.zeros(len(array), np.int64)
    return _whole_numbers(pc.list_value_length(array))


def text_lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return how many bytes of text each row has, in lists too, int64 [n]."""
    found = array.type
    if kind_of(found) == "list":
        ends = ragged.offsets_of(text_lengths(array.flatten()))[ragged.offsets_of(list_lengths(array))]
        return np.diff(ends)
    if pa.types.is_dictionary(found):
        of_values = pa.array(text_lengths(array.dictionary))
        return _whole_numbers(of_values.take(array.indices))
    if pa.types.is_string_view(found):
        views = np.frombuffer(array.buffers()[1], np.int32, 4 * len(array), 16 * array.offset)  # begin with a length
        return np.where(array.is_valid().to_numpy(zero_copy_only=False), views[::4], 0).astype(np.int64)
    if kind_of(found) == "text" and not pa.types.is_null(found):
        return _whole_numbers(pc.binary_length(array))
    return np.zeros(len(array), np.int64)


def _whole_numbers(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return integers as int64 [n], 0 for null."""
    return pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def written_as(found: pa.DataType) -> str | None:
    """Return a name that types share which write equal values as the same text (of lists, their values); None: all.

    Text is taken for that of whole numbers, as those of CSV are.
    """
    if pa.types.is_dictionary(found) or kind_of(found) == "list":
        return written_as(found.value_type)
    if pa.types.is_null(found):
        return None
    if pa.types.is_decimal(found):
        return f"decimals with {found.scale} digits after the point" if found.scale else TEXT_OR_WHOLE
    return TEXT_OR_WHOLE if kind_of(found) in ("text", "number") else str(found)


def as_text(array: pa.Array) -> tuple[Codes, pa.StringArray]:
    """Return values as text, by number: codes int32 [n] and the texts they stand for, "" for a missing one.

    A float must be a whole number, and is written as one. Raises WrongValueError.
    """
    array = decoded(array)
    if kind_of(array.type) == "text":
        array = cast(array, pa.string(), "text in UTF-8")
    codes, values = distinct(array)
    try:
        return codes, as_plain_text(values)
    except WrongValueError as error:
        raise WrongValueError(int(np.flatnonzero(codes == error.row)[0]), str(error)) from None


def distinct(array: pa.Array) -> tuple[Codes, pa.Array]:
    """Return values by number: codes int32 [n] and the values they stand for, a missing one among them."""
    encoded = array.dictionary_encode("encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32, copy=False), encoded.dictionary


def as_plain_text(values: pa.Array) -> pa.StringArray:
    """Return values as text, "" for a missing one, as `as_text` does."""
    return pc.fill_null((_whole(values) if pa.types.is_floating(values.type) else values).cast(pa.string()), "")


def decoded(array: pa.Array) -> pa.Array:
    """Return values without a dictionary, and small decimals as those that Arrow can compute with."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal32(array.type) or pa.types.is_decimal64(array.type):
        return array.cast(pa.decimal128(array.type.precision, array.type.scale))
    return array


def _whole(values: pa.Array) -> pa.Array:
    """Return floats as int64, NaN as missing."""
    whole_numbers_below_limit(values)
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    missing = np.isnan(numbers)
    wrong = np.flatnonzero(~missing & ~(np.floor(numbers) == numbers))
    if len(wrong):
        at = int(wrong[0])
        raise WrongValueError(at, f"{numbers[at]:g} is not a whole number; a categorical value is one, or text")
    return pa.array(np.where(missing, 0, numbers).astype(np.int64), mask=missing)


def whole_numbers_below_limit(values: pa.Array) -> None:
    """Raise WrongValueError for a float that is infinite, or so large that it may stand for several integers."""
    digits = {16: 11, 32: 24, 64: 53}[values.type.bit_width]
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if len(wrong := np.flatnonzero(np.isinf(numbers))):
        raise WrongValueError(
            int(wrong[0]), f"{numbers[wrong[0]]} is not a whole number; a categorical value is one, or text"
        )
    if len(wrong := np.flatnonzero(np.abs(numbers) >= 2.0**digits)):
        at = int(wrong[0])
        raise WrongValueError(
            at,
            f"{numbers[at]:.17g} is a {values.type} of 2^{digits} or more, which may stand for "
            "several whole numbers; write the column as integers, or as text",
        )


def as_numbers(array: pa.Array) -> npt.NDArray[np.float64]:
    """Return numbers, or text that is numbers, as float64 [n], NaN where missing. Raises WrongValueError.

    true and false are 1 and 0, as text in any case, too: a column of booleans has the same numbers in CSV and Parquet.
    """
    array = decoded(array)
    is_text = kind_of(array.type) == "text"
    if is_text:
        array = trimmed(cast(array, pa.string(), "text in UTF-8"))
    try:
        found = cast(array, pa.float64(), "a number", safe=False)
    except WrongValueError:
        if not is_text:
            raise
        found = cast(_booleans_as_digits(array), pa.float64(), "a number", safe=False)
    numbers: npt.NDArray[np.float64] = found.to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(np.isinf(numbers))
    if len(wrong):
        raise WrongValueError(int(wrong[0]), f"{numbers[wrong[0]]} is not a finite number")
    return numbers


def numbers_where_readable(array: pa.Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return numbers as `as_numbers` does, float64 [n], and which values are none, bool [n]: NaN, too."""
    try:
        return as_numbers(array), np.zeros(len(array), np.bool_)
    except WrongValueError:
        pass
    array = decoded(array)
    wrong = np.zeros(len(array), np.bool_)
    if kind_of(array.type) == "text":
        array, wrong = _cast_where_possible(array, pa.string())
        array = _booleans_as_digits(trimmed(array))
    found, not_cast = _cast_where_possible(array, pa.float64())
    numbers = found.to_numpy(zero_copy_only=False)
    wrong = wrong | not_cast | np.isinf(numbers)
    return np.where(wrong, np.nan, numbers), wrong


def trimmed(texts: pa.Array) -> pa.Array:
    """Return texts without spaces around them, null where that stands for a number that is missing."""
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.is_in(texts, value_set=pa.array(MISSING_NUMBERS)), pa.scalar(None, pa.string()), texts)


def _booleans_as_digits(texts: pa.Array) -> pa.Array:
    """Return texts with 1 and 0 in place of true and false."""
    lower = pc.utf8_lower(texts)
    for word, digit in (("true", "1"), ("false", "0")):
        texts = pc.if_else(pc.fill_null(pc.equal(lower, word), False), digit, texts)
    return texts


def as_labels(array: pa.Array, positive: Positive | None) -> npt.NDArray[np.float32]:
    """Return labels 0 or 1, float32 [n]: as they are, or by the rule. Raises WrongValueError."""
    if positive is not None and positive.orders:
        numbers = as_numbers(array)
        if len(missing := np.flatnonzero(np.isnan(numbers))):
            raise WrongValueError(int(missing[0]), "it is missing")
        return _ORDERS[positive.op](numbers, float(positive.value)).astype(np.float32)  # type: ignore[no-any-return]
    array = decoded(array)
    if pa.types.is_floating(array.type):
        array = array.cast(pa.string())  # which writes whole numbers as such
    codes, values = as_text(array)
    texts = [text.strip() for text in values.to_pylist()]
    labels = _meanings(texts, positive)[codes]
    if len(wrong := np.flatnonzero(np.isnan(labels))):
        text = texts[codes[wrong[0]]]
        raise WrongValueError(
            int(wrong[0]),
            "it is missing"
            if text in MISSING_NUMBERS
            else f"{text[:_SHOWN]!r} is not 0 or 1, true or false; say which labels are positive, "
            "such as --positive '>3' or --positive yes",
        )
    return labels


def labels_where_readable(array: pa.Array, positive: Positive | None) -> npt.NDArray[np.float32]:
    """Return labels as `as_labels` does, float32 [n], NaN for those that are missing or none."""
    kind = kind_of(array.type)
    if kind in ("list", "nested"):
        return np.full(len(array), np.nan, np.float32)
    if positive is not None and positive.orders:
        if kind == "other":
            return np.full(len(array), np.nan, np.float32)
        numbers, _ = numbers_where_readable(array)
        return np.where(np.isnan(numbers), np.nan, _ORDERS[positive.op](numbers, float(positive.value))).astype("f4")
    array = decoded(array)
    if kind == "text":
        array, _ = _cast_where_possible(array, pa.string())
    elif pa.types.is_floating(array.type):
        array = array.cast(pa.string())
    codes, values = as_text(array)
    return _meanings([text.strip() for text in values.to_pylist()], positive)[codes]


def _meanings(texts: list[str], positive: Positive | None) -> npt.NDArray[np.float32]:
    """Return which labels texts are, float32 [n], NaN for none: 5, 5.0 and 5e0 are the same."""
    if positive is None:
        return np.array([_TRUE_OR_FALSE.get(_known(text.lower()), np.nan) for text in texts], np.float32)
    value = _known(positive.value)
    missing = {*MISSING_NUMBERS} - {positive.value}
    return np.array(
        [np.nan if text in missing else (_known(text) == value) == (positive.op == "=") for text in texts], np.float32
    )


def as_bags(array: pa.Array, separator: str | None) -> tuple[Codes, pa.StringArray, Codes]:
    """Return lists, or text split by the separator, as text by number: codes [N], texts, and lengths int32 [n].

    Missing and empty values are left out. Raises WrongValueError.
    """
    if kind_of(array.type) == "list":
        lengths = list_lengths(array).astype(np.int32)
        try:
            codes, texts = as_text(array.flatten())
        except WrongValueError as error:
            error.row = row_of(error.row, lengths)
            raise
    else:
        assert separator is not None
        which, whole = as_text(array)
        lists = pc.split_pattern(whole, separator)
        codes, texts = as_text(lists.flatten())
        codes, lengths = ragged.take(codes, ragged.offsets_of(pc.list_value_length(lists).to_numpy()), which)
    there = pc.not_equal(texts, "").to_numpy(zero_copy_only=False)[codes]
    kept = ragged.offsets_of(there)[ragged.offsets_of(lengths)]
    return codes[there], texts, np.diff(kept).astype(np.int32)


def flat_values(array: pa.Array, separator: str | None) -> tuple[pa.Array, Codes]:
    """Return the values of lists, or of text split by the separator, end to end [N], and their lengths int32 [n]."""
    if kind_of(array.type) == "list":
        return array.flatten(), list_lengths(array).astype(np.int32)
    assert separator is not None
    codes, whole = as_text(array)
    lists = pc.split_pattern(whole, separator)
    ends = ragged.offsets_of(pc.list_value_length(lists).to_numpy())
    values, lengths = ragged.take(np.arange(ends[-1]), ends, codes)
    return lists.flatten().take(pa.array(values)), lengths


def _known(text: str) -> str | Decimal:
    """Return the number that a text is, exactly, or the text where it is none."""
    return Decimal(text) if _NUMBER.fullmatch(text) else text


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def cast(array: pa.Array, to: pa.DataType, what: str, *, safe: bool = True) -> pa.Array:
    """Cast, or raise WrongValueError for the first value that is not `what`."""
    try:
        return array.cast(to, safe=safe)
    except pa.ArrowInvalid:
        low, high = 0, len(array)  # the first wrong one is among these
        while high - low > 1:
            middle = (low + high) // 2
            try:
                array[low:middle].cast(to, safe=safe)
                low = middle
            except pa.ArrowInvalid:
                high = middle
        wrong = array[low].as_py()
        shown = repr(wrong if len(str(wrong)) <= _SHOWN else str(wrong)[:_SHOWN] + "...")
        raise WrongValueError(low, f"{shown} is not {what}") from None


def _cast_where_possible(array: pa.Array, to: pa.DataType) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """Return an array cast, null where a value cannot be, and which these are, bool [n]."""
    encoded = array.dictionary_encode()  # many wrong values are the same one
    parts: list[pa.Array] = []

    def add(part: pa.Array) -> None:
        try:
            parts.append(part.cast(to, safe=False))
        except pa.ArrowInvalid:
            if len(part) == 1:
                parts.append(pa.nulls(1, to))
                return
            middle = len(part) // 2
            add(part[:middle])
            add(part[middle:])

    add(encoded.dictionary)
    found = pa.concat_arrays(parts).take(encoded.indices)
    return found, pc.and_(array.is_valid(), found.is_null()).to_numpy(zero_copy_only=False)
