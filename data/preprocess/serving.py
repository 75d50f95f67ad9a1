"""Conversion of served values of any type to the texts that they may have had in training, for lookup or hashing.

A value may be served with a different type than in training: 1.0 for "1", or a timestamp in another unit.
A served value is therefore formatted in each form in which the column's values were written in training. Values of
types that cannot match are rejected.
"""

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import WrongValueError
from hostdev.data.preprocess.forms import (
    BOOLS,
    MISSING,
    NUMBERS,
    PADDED,
    TIMES,
    TIMESTAMPS,
    Texts,
    Written,
    each_form,
    find_zone,
    time_texts,
    timestamp_texts,
    timestamps_from_text,
)
from hostdev.kernels import forms as kernel
from hostdev.kernels.arrays import Mask

_SHOWN = 40


class WrongTypeError(Exception):
    """A column's values, because of their type, cannot match values in training, or could match several of them."""


def format_texts(values: pa.Array, written: Written, *, hashed: bool) -> Texts:
    """Return the texts that values [N] of any type may have had in training.

    If `hashed` is true, each value must have exactly one text, because there is no vocabulary to look up several texts.
    Raises WrongTypeError if the type does not fit the values in training, and WrongValueError if a single value does
    not.
    """
    kind = arrow.classify_type(values.type)
    if kind == "text":
        return _format_text(arrow.cast(values, pa.string(), "text in UTF-8"), written, hashed=hashed)
    missing = values.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    if written.kind == "unknown":
        found = Texts([arrow.as_plain_text(values)], arrow.as_plain_text(values), np.zeros(len(values), np.bool_))
    elif kind == "number":
        found = _format_numbers(values, written)
    elif kind == "bool":
        found = _format_bools(values, written)
    else:
        found = _format_times(values, written)
    found = _with_missing(found, missing, written)
    if hashed:
        _require_one(found, values.type, written)
    return found


def _with_missing(found: Texts, missing: Mask, written: Written) -> Texts:
    """Replace the texts of missing values with the text that missing values had in training."""
    if not missing.any():
        return found
    if written.missing is None:
        raise WrongValueError(
            int(np.flatnonzero(missing)[0]),
            "the value is missing, but missing values had several texts in training; give the text that applies",
        )
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
        "bool": bool(written.forms & BOOLS) or was == "number",
        "other": bool(written.forms & (TIMES if pa.types.is_time(found) else TIMESTAMPS)),
    }
    if not right[kind]:
        raise WrongTypeError(
            f"is of type {found}, but its values were {written.shown} in training; give it as "
            f"{'that type' if written.is_typed else 'text, as written in training'}"
        )


def _require_one(found: Texts, of: pa.DataType, written: Written) -> None:
    """Raise WrongTypeError if a value may match several values in training."""
    several = sum(each.is_valid().to_numpy(zero_copy_only=False).astype(np.int32) for each in found.texts) > 1
    if several.any() or found.doubtful.any():
        raise WrongTypeError(
            f"is of type {of}, but its values were {written.shown} in training, so the match is "
            "ambiguous; give it as text, as written in training"
        )


def _format_text(values: pa.StringArray, written: Written, *, hashed: bool) -> Texts:
    """Convert texts whose form did not occur in training to forms that did, where possible; leave others unchanged."""
    values = pc.fill_null(values, "")
    plain = Texts([values], values, np.zeros(len(values), np.bool_))
    kind, typed = written.kind, written.is_typed
    if kind in ("text", "unknown"):
        return plain
    forms = each_form(values)
    unlike = ~np.isin(forms, list(written.forms))
    if widths := written.forms & PADDED:  # training may have written 1 as 01
        short = pc.less(pc.utf8_length(values), max(widths) - kernel.PADDED).to_numpy(zero_copy_only=False)
        unlike |= (forms == kernel.INTEGER) & short
    if not unlike.any():
        return plain
    if typed:
        values = pc.if_else(pa.array(unlike), pc.utf8_trim_whitespace(values), values)
        forms = each_form(values)
    missing = unlike & np.isin(forms, list(MISSING))
    plain = _with_missing(Texts([values], values, plain.doubtful), missing, written)
    values, unlike = plain.fallback, unlike & ~missing
    parse = {"number": _parse_numbers, "bool": _parse_bools, "timestamp": _parse_timestamps, "time": _parse_times}[kind]
    chosen, found = parse(values, forms, unlike, written)
    if not chosen.any():
        return plain
    if hashed:
        _require_one(found, pa.string(), written)
    mask = pa.array(chosen)
    nulls = pa.nulls(len(values), pa.string())
    texts = [pc.replace_with_mask(values if i == 0 else nulls, mask, each) for i, each in enumerate(found.texts)]
    doubtful = np.zeros(len(values), np.bool_)
    doubtful[chosen] = found.doubtful
    return Texts(texts, values, doubtful)


def _parse_numbers(values: pa.Array, forms: Any, unlike: Mask, written: Written) -> tuple[Mask, Texts]:
    chosen = unlike & np.isin(forms, [*NUMBERS, *BOOLS])
    large = np.flatnonzero(chosen & (forms == kernel.LARGE_FLOAT))
    if len(large):
        raise WrongValueError(int(large[0]), large_float(values[int(large[0])].as_py()))
    bits = {"true": "1", "false": "0"}
    texts = [bits.get(text.lower()) or _shortest(text) for text in values.filter(pa.array(chosen)).to_pylist()]
    found = _numbers(pa.array(texts, pa.string()), written)
    return chosen, Texts(found.texts, found.fallback, np.zeros(len(texts), np.bool_))


def _parse_bools(values: pa.Array, forms: Any, unlike: Mask, written: Written) -> tuple[Mask, Texts]:
    lower = pc.utf8_lower(values)
    true = pc.is_in(lower, value_set=pa.array(["true", "1", "1.0"])).to_numpy(zero_copy_only=False)
    false = pc.is_in(lower, value_set=pa.array(["false", "0", "0.0"])).to_numpy(zero_copy_only=False)
    _require_readable(values, unlike & ~(true | false), written, "true or false")
    chosen = unlike & (true | false)
    return chosen, _format_bools(pa.array(true[chosen]), written)


def _parse_timestamps(values: pa.Array, forms: Any, unlike: Mask, written: Written) -> tuple[Mask, Texts]:
    _require_readable(values, unlike & ~np.isin(forms, list(TIMESTAMPS)), written, "a date or time such as 2024-12-31")
    chosen = unlike & np.isin(forms, list(TIMESTAMPS))
    row = np.flatnonzero(chosen)

    zoned = np.zeros(len(values), np.bool_)
    zoned[chosen] = (forms[chosen] >= kernel.TIMESTAMP) & ((forms[chosen] - kernel.TIMESTAMP) % kernel.ZONES > 0)
    with_zone = _part(values, chosen & zoned, written, zoned=True)
    without = _part(values, chosen & ~zoned, written, zoned=False)
    order = np.argsort(np.concatenate([np.flatnonzero(chosen & zoned), np.flatnonzero(chosen & ~zoned)]))
    parts = [part for part in (with_zone, without) if part is not None]
    n = max(len(part.texts) for part in parts) if parts else 0
    if not len(row):
        return chosen, Texts([], pa.nulls(0, pa.string()), np.zeros(0, np.bool_))

    def joined(arrays: list[pa.Array]) -> pa.Array:
        return pa.concat_arrays(arrays).take(pa.array(order))

    texts = [
        joined([part.texts[i] if i < len(part.texts) else pa.nulls(len(part.fallback), pa.string()) for part in parts])
        for i in range(n)
    ]
    doubtful = np.concatenate([part.doubtful for part in parts])[order]
    return chosen, Texts(texts, joined([part.fallback for part in parts]), doubtful)


def _part(values: pa.Array, some: Mask, written: Written, *, zoned: bool) -> Texts | None:
    """Return the texts that the timestamps selected by `some` may have had in training, or None if none is selected.

    `zoned` tells whether they have a time zone.
    """
    if not some.any():
        return None
    texts = values.filter(pa.array(some))
    try:
        return _format_times(timestamps_from_text(texts, zoned=zoned), written, shown=repr(texts[0].as_py()))
    except WrongTypeError as error:
        raise WrongValueError(int(np.flatnonzero(some)[0]), str(error)) from None
    except WrongValueError as error:
        error.row = int(np.flatnonzero(some)[error.row])
        raise


def _parse_times(values: pa.Array, forms: Any, unlike: Mask, written: Written) -> tuple[Mask, Texts]:
    is_time = np.isin(forms, list(TIMES))
    _require_readable(values, unlike & ~is_time, written, "a time of day such as 23:59:58")
    chosen = unlike & is_time
    some = values.filter(pa.array(chosen))
    return chosen, time_texts(some, written.forms)


def _require_readable(values: pa.Array, wrong: Mask, written: Written, what: str) -> None:
    """Raise WrongValueError for text that cannot be parsed as the type that the column had in training."""
    if written.is_typed and len(rows := np.flatnonzero(wrong)):
        shown = values[int(rows[0])].as_py()[:_SHOWN]
        raise WrongValueError(
            int(rows[0]), f"{shown!r} is not {what}, but the column's values were {written.shown} in training"
        )


def _format_numbers(values: pa.Array, written: Written) -> Texts:
    """Return the texts that integers, floats or decimals may have had in training."""
    require_type(values.type, written)
    if pa.types.is_floating(values.type):
        arrow.whole_numbers_below_limit(values)
        numbers = values.to_numpy(zero_copy_only=False)
        texts = [
            None if np.isnan(number) else _shortest(np.format_float_positional(number, unique=True, trim="-"))
            for number in numbers
        ]
    else:
        texts = values.cast(pa.string()).to_pylist()
        if pa.types.is_decimal(values.type):
            texts = [None if text is None else _shortest(text) for text in texts]
    if written.kind == "bool":
        wrong = [i for i, text in enumerate(texts) if text not in (None, "0", "1")]
        if wrong:
            raise WrongValueError(
                wrong[0],
                f"{texts[wrong[0]]} is neither true nor false, but the column's values were "
                f"{written.shown} in training",
            )
        return _format_bools(pa.array([None if text is None else text == "1" for text in texts], pa.bool_()), written)
    fraction = next((i for i, text in enumerate(texts) if text is not None and "." in text), None)
    if fraction is not None and not any(
        form > kernel.FRACTION and form <= kernel.FRACTION + kernel.MOST_DIGITS for form in written.forms
    ):
        raise WrongValueError(
            fraction, f"{texts[fraction]} is not an integer; categorical values must be integers or text"
        )
    return _numbers(pa.array(texts, pa.string()), written)


def _numbers(texts: pa.StringArray, written: Written) -> Texts:
    """Return the texts that numbers may have had in training; `texts` has the shortest text of each number."""
    forms = written.forms
    whole = pc.invert(pc.match_substring(texts, "."))
    integers = pc.if_else(whole, texts, None)
    found = [integers] if kernel.INTEGER in forms else []
    for digits in range(1, kernel.MOST_DIGITS + 1):
        if kernel.WHOLE + digits in forms:
            found.append(pc.binary_join_element_wise(integers, "." + "0" * digits, ""))
        if kernel.FRACTION + digits in forms:
            found.append(_with_digits(pc.if_else(whole, None, texts), digits))
    found += [_padded(integers, form - kernel.PADDED) for form in sorted(forms & PADDED)]
    doubtful = np.zeros(len(texts), np.bool_)
    if kernel.NUMBER in forms and written.kind == "number":
        doubtful[:] = True
    return Texts(found or [texts], texts, doubtful)


def _with_digits(texts: pa.Array, digits: int) -> pa.Array:
    """Pad numbers with zeros to `digits` digits after the point; return null for a number with more digits."""
    after = pc.subtract(pc.utf8_length(texts), pc.add(pc.find_substring(texts, "."), 1))
    padded = [
        None if text is None or n > digits else text + "0" * (digits - n)
        for text, n in zip(texts.to_pylist(), after.to_pylist(), strict=True)
    ]
    return pa.array(padded, pa.string())


def _padded(integers: pa.Array, width: int) -> pa.Array:
    """Pad integers with zeros to `width` digits.

    Returns null for negative integers and for integers that already have `width` or more digits.
    """
    shorter = pc.and_(pc.less(pc.utf8_length(integers), width), pc.invert(pc.starts_with(integers, "-")))
    return pc.if_else(shorter, pc.utf8_lpad(integers, width, "0"), None)


def _format_bools(values: pa.Array, written: Written) -> Texts:
    """Return the texts that booleans may have had in training."""
    require_type(values.type, written)
    if not written.forms & BOOLS:
        return _numbers(pc.if_else(values, "1", "0"), written)
    names = {kernel.TITLE: ("True", "False"), kernel.LOWER: ("true", "false"), kernel.UPPER: ("TRUE", "FALSE")}
    found = [pc.if_else(values, *names[form]) for form in sorted(written.forms & BOOLS)]
    return Texts(found, found[0], np.zeros(len(values), np.bool_))


def _format_times(values: pa.Array, written: Written, shown: str | None = None) -> Texts:
    """Return the texts that dates, timestamps or times of day may have had in training.

    `shown` is the value to name in an error message; None to name the type.
    """
    require_type(values.type, written)
    if pa.types.is_time(values.type):
        return time_texts(values.cast(pa.string()), written.forms)
    zones = {kernel.NAIVE if form == kernel.DATE else find_zone(form) for form in written.forms} - {None}
    zoned, naive = bool(zones - {kernel.NAIVE}), kernel.NAIVE in zones
    zone = getattr(values.type, "tz", None)
    if zone is not None and not zoned:
        raise WrongTypeError(
            f"{f'{shown} has a' if shown else f'is of type {values.type}, with a'} time zone, but the column's values "
            "had no time zone in training; give it without one"
        )
    if zone is None and not naive:
        raise WrongTypeError(
            f"{f'{shown} has no' if shown else f'is of type {values.type}, without a'} time zone, but the column's "
            "values had a time zone in training; give it with one"
        )
    return timestamp_texts(values, written)


def large_float(shown: str) -> str:
    """Return the message for a float that may represent several integers."""
    return (
        f"{shown} is a float of 2^53 or more, which may stand for several integers; write the column as "
        "integers, or as integers in text"
    )


_LARGEST_EXPONENT = 400  # decimal; the exponents of floats are smaller


def _shortest(text: str) -> str:
    """Normalize a decimal number: no trailing zeros, no exponent.

    A number beyond the largest exponent stays unchanged; it is out of vocabulary either way.
    """
    number = Decimal(text)
    if abs(number.adjusted()) > _LARGEST_EXPONENT:
        return text
    found = format(number, "f")
    if "." in found:
        found = found.rstrip("0").rstrip(".")
    return "0" if found == "-0" else found
