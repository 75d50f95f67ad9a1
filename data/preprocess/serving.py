"""Conversion of served values of any type to the texts that they may have had in training, for lookup or hashing.

A value may be served with a different type than in training: 1.0 for "1", or a timestamp in another unit. A served
value is therefore cast to its column's type, and formatted in each form in which the column's values were written in
training. Values of types that cannot match are rejected.
"""

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import forms as form
from hostdev.data.preprocess.columns import WrongValueError, reject
from hostdev.data.preprocess.forms import Forms, Written
from hostdev.kernels.arrays import Mask

_SHOWN = 40
_LARGEST_EXPONENT = 400  # largest decimal exponent of a number that is normalized; floats have smaller ones
_BOOLS = {form.TITLE: ("True", "False"), form.LOWER: ("true", "false"), form.UPPER: ("TRUE", "FALSE")}
_BITS = ["false", "0", "0.0", "true", "1", "1.0"]
_TRUE = 3  # index in _BITS of the first text that means true
_READABLE = {"number": form.NUMBERS | form.BOOLS, "time": form.TIMES, "timestamp": form.TIMESTAMPS}
_SPELLED = form.WHOLES | form.FRACTIONS | form.PADDED  # forms of numbers with a given number of digits
_SHOWN_KINDS = {
    "bool": "true or false",
    "time": "a time of day such as 23:59:58",
    "timestamp": "a date or time such as 2024-12-31",
}
_DAY = 10  # characters of a date
_SECONDS = 19  # characters of a date and a time to the second
_MIDNIGHT = " 00:00:00.000000000"  # the time that follows a date without a time


class WrongTypeError(Exception):
    """A column's values, because of their type, cannot match values in training, or could match several of them."""


class Texts(NamedTuple):
    """The texts that N values may have had in training.

    `texts` has an array [N] for each form, with null where a value cannot have that form; the first array also has the
    text of missing values. `fallback` [N] has the texts to use where all these arrays have null. `doubtful` [N] marks
    values that may have had yet another form.
    """

    texts: list[pa.StringArray]
    fallback: pa.StringArray
    doubtful: npt.NDArray[np.bool_]


def format_texts(values: pa.Array, written: Written, *, hashed: bool) -> Texts:
    """Return the texts that values [N] of any type may have had in training.

    If `hashed` is true, each value must have exactly one text, because there is no vocabulary to look up several texts.
    Raises WrongTypeError if the type does not fit the values in training, and WrongValueError if a single value does
    not.
    """
    if arrow.classify_type(values.type) == "text":
        values = pc.fill_null(arrow.cast(values, pa.string(), "text in UTF-8"), "")
        found = _convert_text(values, written)
    else:
        missing = values.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
        found = _with_missing(_format(values, written), missing, written)
    if hashed:
        several = sum(each.is_valid().to_numpy(zero_copy_only=False).astype(np.int32) for each in found.texts) > 1
        if several.any() or found.doubtful.any():
            raise WrongTypeError(
                f"is of type {values.type}, but its values were {written.shown} in training, so the match is "
                "ambiguous; give it as text, as written in training"
            )
    return found


def _with_missing(found: Texts, missing: Mask, written: Written) -> Texts:
    """Replace the texts of missing values with the text that missing values had in training."""
    if not missing.any():
        return found
    if written.missing is None:
        several = "the value is missing, but missing values had several texts in training; give the text that applies"
        reject(missing, lambda row: several)
    mask, word = pa.array(missing), pa.scalar(written.missing)
    texts = [pc.if_else(mask, word, found.texts[0]), *(pc.if_else(mask, None, each) for each in found.texts[1:])]
    return Texts(texts, pc.if_else(mask, word, found.fallback), found.doubtful & ~missing)


def require_type(found: pa.DataType, written: Written) -> None:
    """Raise WrongTypeError if no value of a type can match a value in training."""
    kind, was = arrow.classify_type(found), written.kind
    if was == "unknown" or kind in ("text", "list", "nested"):
        return
    right = {
        "number": was in ("number", "bool", "text"),
        "bool": bool(written.forms & form.BOOLS) or was == "number",
        "other": bool(written.forms & (form.TIMES if pa.types.is_time(found) else form.TIMESTAMPS)),
    }
    if not right[kind]:
        raise WrongTypeError(
            f"is of type {found}, but its values were {written.shown} in training; give it as "
            f"{'that type' if written.is_typed else 'text, as written in training'}"
        )


def _convert_text(values: pa.StringArray, written: Written) -> Texts:
    """Convert texts whose form did not occur in training to forms that did, where possible; leave others unchanged."""
    plain = Texts([values], values, np.zeros(len(values), np.bool_))
    if not written.has_type:
        return plain
    forms = form.each_form(values)
    unlike = ~np.isin(forms, list(written.forms))
    if widths := written.forms & form.PADDED:  # training may have written 1 as 01
        short = pc.less(pc.utf8_length(values), max(widths) - form.PADDED_TO).to_numpy(zero_copy_only=False)
        unlike |= (forms == form.INTEGER) & short
    if not unlike.any():
        return plain
    if written.is_typed:
        values = pc.if_else(pa.array(unlike), pc.utf8_trim_whitespace(values), values)
        forms = form.each_form(values)
    missing = unlike & np.isin(forms, list(form.MISSING))
    texts, values, doubtful = _with_missing(Texts([values], values, plain.doubtful), missing, written)
    for chosen, found in _parse(values, forms, unlike & ~missing, written):
        texts += [pa.nulls(len(values), pa.string()) for _ in found.texts[len(texts) :]]
        for i, each in enumerate(found.texts):
            texts[i] = pc.replace_with_mask(texts[i], pa.array(chosen), each)
        doubtful[chosen] = found.doubtful
    return Texts(texts, values, doubtful)


def _parse(values: pa.Array, forms: Forms, some: Mask, written: Written) -> Iterator[tuple[Mask, Texts]]:
    """Cast the texts that `some` selects to the column's type; yield masks of values with their texts in training."""
    kind = written.kind
    if kind == "bool":
        bits = pc.index_in(pc.utf8_lower(values), value_set=pa.array(_BITS)).fill_null(-1).to_numpy()
        readable = bits >= 0
    else:
        readable = np.isin(forms, list(_READABLE[kind]))
    if written.is_typed and kind in _SHOWN_KINDS:
        was = f"{_SHOWN_KINDS[kind]}, but the column's values were {written.shown} in training"
        reject(some & ~readable, lambda row: f"{values[row].as_py()[:_SHOWN]!r} is not {was}")
    chosen = some & readable
    texts = values.filter(pa.array(chosen))
    if kind == "bool":
        yield chosen, _bool_texts(pa.array(bits[chosen] >= _TRUE), written.forms)
    elif kind == "time":
        yield chosen, _time_texts(texts, written.forms)
    elif kind == "number":
        reject(chosen & (forms == form.LARGE_FLOAT), lambda row: large_float(values[row].as_py()))
        numbers = texts.to_pylist()
        if np.isin(forms[chosen], list(form.BOOLS)).any():
            numbers = [{"true": "1", "false": "0"}.get(text.lower(), text) for text in numbers]
        yield chosen, _number_texts(_shortest(numbers), written.forms)
    else:
        zoned = form.find_zone(forms) != form.NAIVE
        for part, zone in ((chosen & zoned, "UTC"), (chosen & ~zoned, None)):
            if part.any():
                yield part, _parse_timestamps(values.filter(pa.array(part)), zone, np.flatnonzero(part), written)


def _parse_timestamps(texts: pa.Array, zone: str | None, rows: npt.NDArray[np.int64], written: Written) -> Texts:
    """Return the texts that timestamps, all with or all without a zone, may have had; `rows` has their row numbers."""
    fine = pc.any(pc.match_substring_regex(texts, r"\.\d{7,9}(Z|[+-]|$)")).as_py()
    try:
        stamps = arrow.cast(texts, pa.timestamp("ns" if fine else "us", zone), "an existing date")
        return _format(stamps, written, shown=repr(texts[0].as_py()))
    except WrongTypeError as error:
        raise WrongValueError(int(rows[0]), str(error)) from None
    except WrongValueError as error:
        raise WrongValueError(int(rows[error.row]), str(error)) from None


def _format(values: pa.Array, written: Written, shown: str | None = None) -> Texts:
    """Return the texts that values of a type other than text may have had in training.

    `shown` is the value to name in an error message about its time zone; None to name the type.
    """
    if written.kind == "unknown":
        return _plain([arrow.as_plain_text(values)])
    require_type(values.type, written)
    kind = arrow.classify_type(values.type)
    if kind == "other":
        if pa.types.is_time(values.type):
            return _time_texts(values.cast(pa.string()), written.forms)
        return _timestamp_texts(values, written, shown)
    if kind == "bool":
        if written.forms & form.BOOLS:
            return _bool_texts(values, written.forms)
        numbers = pc.if_else(values, "1", "0")
    else:
        numbers = _shortest_numbers(values)
    if written.kind == "bool":
        wrong = pc.invert(pc.is_in(numbers, value_set=pa.array(["0", "1", None])))
        was = f"is neither true nor false, but the column's values were {written.shown} in training"
        reject(wrong.to_numpy(zero_copy_only=False), lambda row: f"{numbers[row]} {was}")
        return _bool_texts(pc.equal(numbers, "1"), written.forms)
    found = _number_texts(numbers, written.forms, allow_fractions=False)
    found.doubtful[:] = form.NUMBER in written.forms and written.kind == "number"
    return found


def _shortest_numbers(values: pa.Array) -> pa.StringArray:
    """Return integers, floats or decimals as text without trailing zeros and exponents; null if missing."""
    if pa.types.is_floating(values.type):
        arrow.whole_numbers_below_limit(values)
        numbers = values.to_numpy(zero_copy_only=False)
        return _shortest(None if np.isnan(one) else np.format_float_positional(one, trim="-") for one in numbers)
    texts = values.cast(pa.string())
    return _shortest(texts.to_pylist()) if pa.types.is_decimal(values.type) else texts


def _shortest(texts: Iterable[str | None]) -> pa.StringArray:
    """Normalize decimal numbers: no trailing zeros, no exponent.

    A number beyond the largest exponent stays unchanged; it is out of vocabulary either way.
    """

    def normalize(text: str) -> str:
        number = Decimal(text)
        if abs(number.adjusted()) > _LARGEST_EXPONENT:
            return text
        found = format(number, "f")
        if "." in found:
            found = found.rstrip("0").rstrip(".")
        return "0" if found == "-0" else found

    return pa.array([None if text is None else normalize(text) for text in texts], pa.string())


def _number_texts(numbers: pa.StringArray, forms: frozenset[int], *, allow_fractions: bool = True) -> Texts:
    """Return the texts that numbers, given by their shortest texts, may have had in training.

    If training had no fractions, raise WrongValueError for a fraction, unless they are allowed.
    """
    is_fraction, has_fractions = pc.match_substring(numbers, "."), bool(forms & form.FRACTIONS)
    if not has_fractions:
        rows = is_fraction.fill_null(False).to_numpy(zero_copy_only=False)
        if not allow_fractions:
            reject(rows, lambda row: f"{numbers[row]} {arrow.NO_INTEGER}")
        has_fractions = bool(rows.any())
    integers = pc.if_else(is_fraction, None, numbers) if has_fractions else numbers
    fractions = pc.if_else(is_fraction, numbers, None) if has_fractions else None
    texts = [integers] if form.INTEGER in forms else []
    for number in sorted(forms & _SPELLED):
        if number in form.WHOLES:
            texts.append(_join(integers, "." + "0" * (number - form.WHOLE)))
        elif number in form.FRACTIONS:
            digits = number - form.FRACTION  # a number with more digits cannot have the form
            padded = _join(fractions, "0" * digits)
            padded = pc.replace_substring_regex(padded, rf"(\.\d{{{digits}}})0*$", r"\1")
            end = pc.subtract(pc.binary_length(padded), pc.find_substring(padded, "."))
            texts.append(pc.if_else(pc.equal(end, 1 + digits), padded, None))
        else:  # zeros before an integer, unless it is negative or has `width` digits or more
            width = number - form.PADDED_TO
            is_shorter = pc.and_(pc.less(pc.utf8_length(integers), width), pc.invert(pc.starts_with(integers, "-")))
            texts.append(pc.if_else(is_shorter, pc.utf8_lpad(integers, width, "0"), None))
    return _plain(texts or [numbers], numbers)


def _bool_texts(values: pa.BooleanArray, forms: frozenset[int]) -> Texts:
    """Return the texts that booleans may have had in training."""
    return _plain([pc.if_else(values, *_BOOLS[number]) for number in sorted(forms & form.BOOLS)])


def _time_texts(times: pa.StringArray, forms: frozenset[int]) -> Texts:
    """Return the texts that times of day, given as text, may have had in training."""
    with_seconds = pc.if_else(pc.equal(pc.utf8_length(times), 5), _join(times, ":00"), times)
    full = _full(_join("2000-01-01 ", with_seconds))
    ends = [_end(number - form.TIME) for number in sorted(forms & form.TIMES)]
    return _plain([pc.utf8_slice_codeunits(_cut(full, end), _DAY + 1) for end in ends], times)


def _timestamp_texts(values: pa.Array, written: Written, shown: str | None) -> Texts:
    """Format dates or timestamps in the forms that occurred in training, with a time zone only if the values have one.

    Raises WrongTypeError if there is no such form, and WrongValueError if training had only dates and a value has a
    time.
    """
    fallback, is_aware = values.cast(pa.string()), getattr(values.type, "tz", None) is not None
    forms = {number: int(form.find_zone(number)) for number in sorted(written.forms & form.TIMESTAMPS)}
    forms = {number: zone for number, zone in forms.items() if (zone != form.NAIVE) == is_aware}
    if not forms:
        has, had, give = ("a", "no", "without") if is_aware else ("no", "a", "with")
        typed = f"is of type {values.type}, with{'' if is_aware else 'out'} a"
        raise WrongTypeError(
            f"{f'{shown} has {has}' if shown else typed} time zone, but the column's values had {had} time zone in "
            f"training; give it {give} one"
        )
    suffixes = [""]
    if is_aware:
        full = _full(pc.utf8_rtrim(values.cast(pa.timestamp(values.type.unit, "UTC")).cast(pa.string()), "Z"))
        here = values.cast(pa.timestamp(values.type.unit, written.zone)).cast(pa.string()) if written.zone else fallback
        here = pc.replace_substring_regex(here, "Z$", "+0000")
        local, offset = _full(pc.utf8_slice_codeunits(here, 0, -5)), pc.utf8_slice_codeunits(here, -5)
        hours, minutes = pc.utf8_slice_codeunits(offset, 0, 3), pc.utf8_slice_codeunits(offset, 3)
        whole_hours = pc.if_else(pc.equal(minutes, "00"), hours, None)
        suffixes += ["Z", "+00:00", "+0000", "+00", _join(hours, ":", minutes), offset, whole_hours]
    else:
        full = local = _full(_join(fallback, " 00:00:00") if pa.types.is_date(values.type) else fallback)
    texts = []
    for number, zone in forms.items():
        if number == form.DATE:
            texts.append(_cut(full, _DAY))
            continue
        is_t, precision = divmod((number - form.TIMESTAMP) // form.ZONES, form.PRECISIONS)
        text = _cut(local if zone >= form.COLON else full, _end(precision))
        text = pc.utf8_replace_slice(text, _DAY, _DAY + 1, "T") if is_t else text
        texts.append(_join(text, suffixes[zone]))
    if written.forms & form.TIMESTAMPS == {form.DATE}:
        has_time = pc.and_(values.is_valid(), texts[0].is_null()).to_numpy(zero_copy_only=False)
        reject(has_time, lambda row: f"{fallback[row]} has a time, but the column's values were dates in training")
    found = _plain(texts, fallback)
    found.doubtful[:] = is_aware and max(forms.values()) >= form.COLON and written.zone is None
    return found


def _plain(texts: list[pa.Array], fallback: pa.Array | None = None) -> Texts:
    """Return `Texts` without doubtful values; if `fallback` is None, the first array is the fallback."""
    return Texts(texts, texts[0] if fallback is None else fallback, np.zeros(len(texts[0]), np.bool_))


def _full(texts: pa.Array) -> pa.Array:
    """Return timestamps with nine decimals of the second; null unless the year has 4 digits."""
    usual = pc.and_not(pc.equal(pc.utf8_slice_codeunits(texts, 4, 5), "-"), pc.starts_with(texts, "-"))
    padded = pc.ascii_rpad(texts, _DAY + len(_MIDNIGHT), "0")
    return pc.if_else(usual, pc.binary_replace_slice(padded, _SECONDS, _SECONDS + 1, "."), None)


def _end(precision: int) -> int:
    """Return the number of characters of a timestamp in a precision (see `forms.timestamp_form`)."""
    return _DAY + (6 if precision == 0 else 9 if precision == 1 else 9 + precision)


def _cut(full: pa.Array, end: int) -> pa.Array:
    """Return the first `end` characters of timestamps from `_full`; null where the time cut off is not 0."""
    fits = pc.equal(pc.utf8_slice_codeunits(full, end, _DAY + len(_MIDNIGHT)), _MIDNIGHT[end - _DAY :])
    return pc.if_else(fits, pc.utf8_slice_codeunits(full, 0, end), None)


def _join(*texts: pa.Array | str) -> pa.Array:
    return pc.binary_join_element_wise(*texts, "")


def large_float(shown: str) -> str:
    """Return the message for a float that may represent several integers."""
    return (
        f"{shown} is a float of 2^53 or more, which may stand for several integers; write the column as "
        "integers, or as integers in text"
    )
