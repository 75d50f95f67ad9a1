"""Conversion of served dates, timestamps and times of day to the texts that they may have had in training."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.data.preprocess.columns import WrongValueError
from hostdev.data.preprocess.forms import Texts, Written
from hostdev.kernels import forms as kernel

_SECONDS = 19  # characters of a date and a time to the second
_NANOSECONDS = 9  # digits


def timestamps_from_text(texts: pa.StringArray, *, zoned: bool) -> pa.Array:
    """Parse timestamps, all with or all without a zone, to Arrow's type, in nanoseconds if needed.

    Raises WrongValueError for a nonexistent date.
    """
    fine = pc.any(pc.match_substring_regex(texts, r"\.\d{7,9}(Z|[+-]|$)")).as_py()
    to = pa.timestamp("ns" if fine else "us", "UTC" if zoned else None)
    try:
        return texts.cast(to)
    except pa.ArrowInvalid:
        for row in range(len(texts)):
            try:
                texts[row : row + 1].cast(to)
            except pa.ArrowInvalid:
                raise WrongValueError(row, f"{texts[row].as_py()!r} is not an existing date") from None
        raise


def timestamp_texts(values: pa.Array, written: Written) -> Texts:
    """Format dates or timestamps in each form that occurred in training: the forms with a time zone if the values have
    one, otherwise the forms without.

    Raises WrongValueError if training had only dates and a value has a time.
    """
    aware = getattr(values.type, "tz", None) is not None
    fallback = values.cast(pa.string())
    if aware:
        utc = values.cast(pa.timestamp(values.type.unit, "UTC")).cast(pa.string())
        base, fraction = _pieces(pc.utf8_rtrim(utc, "Z"))
        mine = values.cast(pa.timestamp(values.type.unit, written.zone)) if written.zone else values
        here = mine.cast(pa.string())
        here = pc.if_else(
            pc.ends_with(here, "Z"), pc.binary_join_element_wise(pc.utf8_rtrim(here, "Z"), "+0000", ""), here
        )
        local, _ = _pieces(pc.utf8_slice_codeunits(here, 0, -5))
        offset = pc.utf8_slice_codeunits(here, -5)
    else:
        whole = pc.binary_join_element_wise(fallback, " 00:00:00", "") if pa.types.is_date(values.type) else fallback
        base, fraction = _pieces(whole)
    found = []
    for form in sorted(written.forms):
        if form == kernel.DATE and not aware:
            found.append(_dates(base, fraction))
        if not kernel.TIMESTAMP <= form < kernel.TIME:
            continue
        rest, zone = divmod(form - kernel.TIMESTAMP, kernel.ZONES)
        is_t, precision = divmod(rest, kernel.PRECISIONS)
        if (zone != kernel.NAIVE) != aware:
            continue
        text = _with_precision(local if zone >= kernel.COLON else base, fraction, precision)
        if is_t:
            text = pc.utf8_replace_slice(text, 10, 11, "T")
        if zone >= kernel.COLON:
            hours, minutes = pc.utf8_slice_codeunits(offset, 0, 3), pc.utf8_slice_codeunits(offset, 3)
            suffix = {
                kernel.COLON: pc.binary_join_element_wise(hours, minutes, ":"),
                kernel.PLAIN: offset,
                kernel.HOUR: pc.if_else(pc.equal(minutes, "00"), hours, None),
            }[zone]
            text = pc.binary_join_element_wise(text, suffix, "")
        elif zone != kernel.NAIVE:
            suffix = {kernel.ZULU: "Z", kernel.UTC_COLON: "+00:00", kernel.UTC_PLAIN: "+0000", kernel.UTC_HOUR: "+00"}
            text = pc.binary_join_element_wise(text, suffix[zone], "")
        found.append(text)
    dates_only = not (written.forms & set(range(kernel.TIMESTAMP, kernel.TIME)))
    if dates_only:
        wrong = pc.and_(values.is_valid(), found[0].is_null()).to_numpy(zero_copy_only=False)
        if len(rows := np.flatnonzero(wrong)):
            raise WrongValueError(
                int(rows[0]),
                f"{fallback[int(rows[0])].as_py()} has a time, but the column's values were dates in training",
            )
    offsets = any(
        kernel.TIMESTAMP <= form < kernel.TIME and (form - kernel.TIMESTAMP) % kernel.ZONES >= kernel.COLON
        for form in written.forms
    )
    doubtful = np.full(len(values), aware and offsets and written.zone is None)
    return Texts(found, fallback, doubtful)


def time_texts(texts: pa.StringArray, forms: Any) -> Texts:
    """Return the texts that times of day, given as text, may have had in training."""
    dated = pc.binary_join_element_wise("2000-01-01", texts, " ")
    short = pc.equal(pc.utf8_length(texts), 5)
    base, fraction = _pieces(pc.if_else(short, pc.binary_join_element_wise(dated, ":00", ""), dated))
    found = [
        pc.utf8_slice_codeunits(_with_precision(base, fraction, form - kernel.TIME), 11)
        for form in sorted(forms)
        if form >= kernel.TIME
    ]
    return Texts(found, texts, np.zeros(len(texts), np.bool_))


def _pieces(texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Split timestamps into the part up to the second (null unless the year has 4 digits) and 9 digits of fraction."""
    base = pc.utf8_slice_codeunits(texts, 0, _SECONDS)
    usual = pc.and_(
        pc.equal(pc.utf8_slice_codeunits(texts, 4, 5), "-"), pc.equal(pc.utf8_slice_codeunits(texts, 16, 17), ":")
    )
    digits = pc.utf8_slice_codeunits(texts, _SECONDS + 1, _SECONDS + 1 + _NANOSECONDS)
    fraction = pc.utf8_rpad(digits, _NANOSECONDS, "0")
    return pc.if_else(usual, base, None), fraction


def _dates(base: pa.Array, fraction: pa.Array) -> pa.Array:
    midnight = pc.and_(pc.ends_with(base, " 00:00:00"), pc.equal(fraction, "0" * _NANOSECONDS))
    return pc.if_else(midnight, pc.utf8_slice_codeunits(base, 0, 10), None)


def _with_precision(base: pa.Array, fraction: pa.Array, precision: int) -> pa.Array:
    """Format times with a form's precision (`kernels.forms`); null if a value is more precise."""
    digits = max(0, precision - 1)
    rest = "0" * (_NANOSECONDS - digits)
    fits = pc.equal(pc.utf8_slice_codeunits(fraction, digits), rest) if rest else pc.is_valid(fraction)
    text = base
    if precision == 0:
        fits = pc.and_(fits, pc.ends_with(base, ":00"))
        text = pc.utf8_slice_codeunits(base, 0, _SECONDS - 3)
    elif digits:
        text = pc.binary_join_element_wise(base, pc.utf8_slice_codeunits(fraction, 0, digits), ".")
    return pc.if_else(fits, text, None)
