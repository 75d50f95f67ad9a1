"""Conversions of Arrow columns to dictionary-encoded text, numbers, labels and bags."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data import ragged
from hostdev.kernels.arrays import Mask
from hostdev.kernels.unique import id_map

Codes = npt.NDArray[np.int32]

MISSING_NUMBERS = ("", "NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "NaN", "nan", "-NaN", "-nan")
_TRUE_OR_FALSE: dict[str | Decimal, float] = {Decimal(0): 0.0, Decimal(1): 1.0, "false": 0.0, "true": 1.0}
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
_COMPARISON = re.compile(r"([^<>=!]*[^<>=!\s])\s*((?:[<>]=?|[!=]?=)\s*[^<>=!]+)")  # such as rating>=4
_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": np.greater_equal,
    "<=": np.less_equal,
    ">": np.greater,
    "<": np.less,
}
_BINARY = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
TEXT_OR_WHOLE = "text or integers"  # a result of `get_written_form`
_FEW_LABELS = 20  # `distinct_numbers` returns none if there are more distinct values
_SHOWN = 40  # maximum characters of an invalid value in a message
NO_INTEGER = "is not an integer; categorical values must be integers or text"


def get_buffers(texts: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """Return the offsets, int32 or int64 [n + 1], and the bytes of n texts, none of which may be null."""
    _, offsets, data = texts.buffers()
    dtype = np.dtype(np.int64 if pa.types.is_large_string(texts.type) else np.int32)
    begin = np.zeros(1, dtype)
    if len(texts):
        begin = np.frombuffer(offsets, dtype, len(texts) + 1, dtype.itemsize * texts.offset)
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return begin, content


def make_texts(offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> pa.LargeStringArray:
    """Return texts from offsets and bytes."""
    return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


class WrongValueError(Exception):
    """An invalid value in a column; `row` is its row in the chunk, from 0."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def reject(wrong: Mask, describe: Callable[[int], str]) -> None:
    """Raise WrongValueError for the first row that a mask marks, if any; `describe(row)` returns the reason."""
    for row in np.flatnonzero(wrong)[:1].tolist():
        raise WrongValueError(row, describe(row))


def check_text(array: pa.Array) -> None:
    """Check that an array of any type is valid, and that its texts are UTF-8.

    Raises WrongValueError if a text, in the array or in its lists, is not UTF-8, and pa.ArrowInvalid for other damage.
    """
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if pa.types.is_dictionary(array.type):
            check_text(array.dictionary_decode())
        elif (kind := classify_type(array.type)) == "list":
            with in_lists(list_lengths(array)):
                check_text(array.flatten())
        else:
            if kind == "text":
                cast(array.cast(_BINARY.get(array.type, array.type)), pa.string(), "text in UTF-8")
            raise


def combined(array: Any) -> pa.Array:
    """Return an array unchanged, and a chunked array as a single array."""
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array  # still chunked with older pyarrows


@contextmanager
def in_lists(lengths: npt.NDArray[Any]) -> Iterator[None]:
    """Replace the `row` of a WrongValueError, an index into concatenated lists, with the row of the list at fault."""
    try:
        yield
    except WrongValueError as error:
        error.row = find_row(error.row, lengths)
        raise


def find_row(value: int, lengths: npt.NDArray[Any]) -> int:
    """Return the index of the list that contains element `value` of the concatenated lists."""
    return int(np.searchsorted(ragged.offsets_of(lengths), value, "right")) - 1


@dataclass(frozen=True)
class Positive:
    """A rule for which labels are positive: the comparison `op` (>, >=, <, <=, = or !=) with `value`."""

    op: str
    value: str

    def __post_init__(self) -> None:
        if self.orders and not _is_number(self.value):
            text = f"{self.op}{self.value}"
            raise UserError(
                f"--positive {text}: {self.value!r} is not a number; if labels are the text {text!r}, write '={text}'"
            )

    @property
    def orders(self) -> bool:
        """Whether the rule compares numbers by size."""
        return self.op in _ORDERS

    @staticmethod
    def parse(text: str) -> "Positive":
        """Parse a rule such as ">3", "!=no" or "yes"; raise UserError for an invalid one, such as "rating>3"."""
        for op in (">=", "<=", "!=", "==", ">", "<", "="):
            if text.startswith(op):
                return Positive("=" if op == "==" else op, text.removeprefix(op).strip())
        if (found := _COMPARISON.fullmatch(text)) is not None:
            raise UserError(
                f"--positive {text}: give only the comparison, '{found[2]}', which applies to the --label column; "
                f"if labels are the text {text!r}, write '={text}'"
            )
        return Positive("=", text.strip())


def classify_type(found: pa.DataType) -> str:
    """Return a type's class: "text" (or binary, null), "number", "bool", "other" (dates, times), "list" or "nested"."""
    if pa.types.is_dictionary(found):
        return classify_type(found.value_type)
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
    """Return the length of each row's list, int64 [n]; 0 for a missing list, and for values that are not lists."""
    if classify_type(array.type) != "list":
        return np.zeros(len(array), np.int64)
    return _whole_numbers(pc.list_value_length(array))


def text_lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return the number of text bytes in each row, int64 [n], including texts in lists."""
    found = array.type
    if classify_type(found) == "list":
        ends = ragged.offsets_of(text_lengths(array.flatten()))[ragged.offsets_of(list_lengths(array))]
        return np.diff(ends)
    if pa.types.is_dictionary(found):
        lengths = pa.array(text_lengths(array.dictionary))
        return _whole_numbers(lengths.take(array.indices))
    if pa.types.is_string_view(found):
        views = np.frombuffer(
            array.buffers()[1], np.int32, 4 * len(array), 16 * array.offset
        )  # a view begins with its length
        return np.where(array.is_valid().to_numpy(zero_copy_only=False), views[::4], 0).astype(np.int64)
    if classify_type(found) == "text" and not pa.types.is_null(found):
        return _whole_numbers(pc.binary_length(array))
    return np.zeros(len(array), np.int64)


def _whole_numbers(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return integers as int64 [n], 0 for null."""
    return pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def get_written_form(found: pa.DataType) -> str | None:
    """Return a name for how a type's values become text. Types with the same name turn equal values into equal texts.

    A list has the name of its values' type. Text and numbers share a name, since CSV stores numbers as text;
    decimals with digits after the point have another name. Arrow's null type fits all types; its name is None.
    """
    if pa.types.is_dictionary(found) or classify_type(found) == "list":
        return get_written_form(found.value_type)
    if pa.types.is_null(found):
        return None
    if pa.types.is_decimal(found):
        return f"decimals with {found.scale} digits after the point" if found.scale else TEXT_OR_WHOLE
    return TEXT_OR_WHOLE if classify_type(found) in ("text", "number") else str(found)


def as_text(array: pa.Array, clean: Callable[[pa.Array], pa.Array] | None = None) -> tuple[Codes, pa.StringArray]:
    """Dictionary-encode values as text; return codes, int32 [n], and the texts, with "" for a missing value.

    Floats must be integers small enough to be exact, and are written without a decimal point. Raises WrongValueError
    for any other float and for text that is not UTF-8.

    `clean`, if given, maps the distinct values before they become text. It may make several values equal, and so the
    returned texts may repeat.
    """
    array = decoded(array)
    if classify_type(array.type) == "text":
        array = cast(array, pa.string(), "text in UTF-8")
    codes, values = distinct(array)
    try:
        return codes, as_plain_text(values if clean is None else clean(values))
    except WrongValueError as error:
        raise WrongValueError(int(np.flatnonzero(codes == error.row)[0]), str(error)) from None


def distinct(array: pa.Array) -> tuple[Codes, pa.Array]:
    """Return codes, int32 [n], and the distinct values, which may include null, in order of first occurrence."""
    if pa.types.is_integer(array.type) and not pa.types.is_uint64(array.type) and not array.null_count:
        ids = array.cast(pa.int64()).to_numpy(zero_copy_only=False)  # `id_map` is faster than Arrow's encoding
        seen = id_map(ids)
        codes = seen.add(ids)
        return codes, pa.array(seen.ids.copy()).cast(array.type)
    encoded = _encode(array)
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32, copy=False), encoded.dictionary.cast(
        array.type
    )


def _encode(array: pa.Array) -> pa.DictionaryArray:
    """Dictionary-encode values and nulls; half floats become float32, since pyarrow 19 cannot encode them."""
    return (array.cast(pa.float32()) if pa.types.is_float16(array.type) else array).dictionary_encode("encode")


def as_plain_text(values: pa.Array) -> pa.StringArray:
    """Return values as text, as `as_text` writes them; "" for a missing value."""
    return pc.fill_null((_whole(values) if pa.types.is_floating(values.type) else values).cast(pa.string()), "")


def decoded(array: pa.Array) -> pa.Array:
    """Decode a dictionary; widen decimal32 and decimal64 to decimal128, which Arrow can compute with."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal32(array.type) or pa.types.is_decimal64(array.type):
        return array.cast(pa.decimal128(array.type.precision, array.type.scale))
    return array


def _whole(values: pa.Array) -> pa.Array:
    """Return floats as int64, null for NaN; raise WrongValueError for a fraction or a number that is too large."""
    whole_numbers_below_limit(values)
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    missing = np.isnan(numbers)
    reject(~missing & ~(np.floor(numbers) == numbers), lambda row: f"{numbers[row]:g} {NO_INTEGER}")
    return pa.array(np.where(missing, 0, numbers).astype(np.int64), mask=missing)


def whole_numbers_below_limit(values: pa.Array) -> None:
    """Raise WrongValueError for a float that is infinite, or so large that it may represent several integers."""
    digits = {16: 11, 32: 24, 64: 53}[values.type.bit_width]
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    reject(np.isinf(numbers), lambda row: f"{numbers[row]} {NO_INTEGER}")
    large = f"is a {values.type} of 2^{digits} or more, which may represent several integers"
    reject(
        np.abs(numbers) >= 2.0**digits,
        lambda row: f"{numbers[row]:.17g} {large}; write the column as integers or text",
    )


def as_numbers(array: pa.Array) -> npt.NDArray[np.float64]:
    """Convert numbers, or texts of numbers, to float64 [n], NaN for a missing value.

    Booleans, and the texts "true" and "false" in upper or lower case, become 1 and 0, so that CSV and Parquet give the
    same numbers. Raises WrongValueError for values that are not finite numbers.
    """
    array = decoded(array)
    is_text = classify_type(array.type) == "text"
    if is_text:
        array = trimmed(cast(array, pa.string(), "text in UTF-8"))
    try:
        found = cast(array, pa.float64(), "a number", safe=False)
    except WrongValueError:
        if not is_text:
            raise
        found = cast(_booleans_as_digits(array), pa.float64(), "a number", safe=False)
    numbers: npt.NDArray[np.float64] = found.to_numpy(zero_copy_only=False)
    reject(np.isinf(numbers), lambda row: f"{numbers[row]} is not a finite number")
    return numbers


def numbers_where_readable(array: pa.Array) -> tuple[npt.NDArray[np.float64], Mask]:
    """Convert like `as_numbers`, but convert invalid values to NaN.

    Returns the numbers, float64 [n], and a mask of the invalid values, bool [n].
    """
    try:
        return as_numbers(array), np.zeros(len(array), np.bool_)
    except WrongValueError:
        pass
    array = decoded(array)
    wrong = np.zeros(len(array), np.bool_)
    if classify_type(array.type) == "text":
        array, wrong = cast_where_possible(array, pa.string())
        array = _booleans_as_digits(trimmed(array))
    found, not_cast = cast_where_possible(array, pa.float64())
    numbers = found.to_numpy(zero_copy_only=False)
    wrong = wrong | not_cast | np.isinf(numbers)
    return np.where(wrong, np.nan, numbers), wrong


def trimmed(texts: pa.Array) -> pa.Array:
    """Strip whitespace from texts; replace missing-value markers with null."""
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.is_in(texts, value_set=pa.array(MISSING_NUMBERS)), pa.scalar(None, pa.string()), texts)


def _booleans_as_digits(texts: pa.Array) -> pa.Array:
    """Replace "true" and "false", in any mix of upper and lower case, with "1" and "0"."""
    lower = pc.utf8_lower(texts)
    for word, digit in (("true", "1"), ("false", "0")):
        texts = pc.if_else(pc.fill_null(pc.equal(lower, word), False), digit, texts)
    return texts


def as_labels(array: pa.Array, positive: Positive | None) -> npt.NDArray[np.float32]:
    """Convert values to labels 0 or 1, float32 [n], by the rule `positive`.

    If it is None, the values must be 0, 1, true or false. Raises WrongValueError for a missing or invalid value.
    """
    if positive is not None and positive.orders:
        numbers = as_numbers(array)
        reject(np.isnan(numbers), lambda row: "the value is missing")
        return _ORDERS[positive.op](numbers, float(positive.value)).astype(np.float32)  # type: ignore[no-any-return]
    array = decoded(array)
    if positive is None and pa.types.is_integer(array.type) and not array.null_count:
        given = array.to_numpy(zero_copy_only=False)
        if not len(given) or (given.min() >= 0 and given.max() <= 1):
            return np.asarray(given, np.float32)
    if pa.types.is_floating(array.type):
        array = array.cast(pa.string())  # `as_text` would reject fractions, which `_parse_labels` handles
    codes, values = as_text(array)
    texts = [text.strip() for text in values.to_pylist()]
    labels = _parse_labels(texts, positive)[codes]
    reject(np.isnan(labels), lambda row: _label_reason(texts[codes[row]], positive))
    return labels


def _label_reason(text: str, positive: Positive | None) -> str:
    """Return why a text is no label."""
    if text in MISSING_NUMBERS:
        return "the value is missing"
    if positive is None:
        hint = "give a rule for positive labels, such as --positive '>3' or --positive yes"
        return f"{text[:_SHOWN]!r} is not 0 or 1, true or false; {hint}"
    return (
        f"{text[:_SHOWN]!r} is not a number, so it cannot be compared with --positive {positive.value}; "
        "remove the row, or select rows with `preprocess query`"
    )


def labels_where_readable(array: pa.Array, positive: Positive | None) -> npt.NDArray[np.float32]:
    """Convert like `as_labels`, but with NaN for missing and invalid values."""
    kind = classify_type(array.type)
    if kind in ("list", "nested"):
        return np.full(len(array), np.nan, np.float32)
    if positive is not None and positive.orders:
        if kind == "other":
            return np.full(len(array), np.nan, np.float32)
        numbers, _ = numbers_where_readable(array)
        return np.where(np.isnan(numbers), np.nan, _ORDERS[positive.op](numbers, float(positive.value))).astype("f4")
    array = decoded(array)
    if kind == "text":
        array, _ = cast_where_possible(array, pa.string())
    elif pa.types.is_floating(array.type):
        array = array.cast(pa.string())
    codes, values = as_text(array)
    return _parse_labels([text.strip() for text in values.to_pylist()], positive)[codes]


def distinct_numbers(array: pa.Array) -> list[Decimal]:
    """Return the distinct numbers in values [N]; empty unless there are 2 to 20 distinct values."""
    if classify_type(array.type) == "text":
        array, _ = cast_where_possible(array, pa.string())
    values = pc.unique(array)
    if not 2 <= len(values) <= _FEW_LABELS:
        return []
    found = (parse_exactly(str(value).strip()) for value in values.to_pylist() if value is not None)
    return [value for value in found if isinstance(value, Decimal)]


def _parse_labels(texts: list[str], positive: Positive | None) -> npt.NDArray[np.float32]:
    """Return the label of each text, float32 [n], NaN for an invalid text; 5, 5.0 and 5e0 are the same value."""
    if positive is None:
        return np.array([_TRUE_OR_FALSE.get(parse_exactly(text.lower()), np.nan) for text in texts], np.float32)
    value = parse_exactly(positive.value)
    missing = {*MISSING_NUMBERS} - {positive.value}

    def label(text: str) -> float:
        found = parse_exactly(text)
        if text in missing or (positive.op == "=" and isinstance(value, Decimal) and isinstance(found, str)):
            return np.nan  # a missing value, or a text such as ? among numbers: unknown, not negative
        return float((found == value) == (positive.op == "="))

    return np.array([label(text) for text in texts], np.float32)


def parse_exactly(text: str) -> str | Decimal:
    """Parse a number exactly; return any other text unchanged."""
    return Decimal(text) if _NUMBER.fullmatch(text) else text


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def cast(array: pa.Array, to: pa.DataType, what: str, *, safe: bool = True) -> pa.Array:
    """Cast an array; raise WrongValueError ("... is not `what`") for the first invalid value."""
    try:
        return array.cast(to, safe=safe)
    except pa.ArrowInvalid:
        low, high = 0, len(array)  # the first wrong value is in this range
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


def cast_where_possible(array: pa.Array, to: pa.DataType) -> tuple[pa.Array, Mask]:
    """Cast an array. Return it with null for each value that cannot be cast, and a mask of those values, bool [n]."""
    is_text = pa.types.is_string(to)
    encoded = _encode(
        array.cast(_BINARY.get(array.type, array.type)) if is_text else array
    )  # invalid values often repeat, and each distinct value is cast once
    parts: list[pa.Array] = []

    def add(part: pa.Array) -> None:
        try:
            parts.append(part.cast(to, safe=is_text))  # an unsafe cast to text keeps what is not UTF-8
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
