"""The text forms that a column's values had in training; manifests record them so that prediction finds equal values.

A form is a way to write a value, such as 1.0 for a number; a manifest names it by an example. `hostdev.kernels.forms`
defines the forms' numbers. Served dates and times are formatted in the forms that occurred.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import WrongValueError
from hostdev.kernels import forms as kernel
from hostdev.kernels.forms import classify_texts

_ZONES = ("", "Z", "+00:00", "+0000", "+00", "+01:00", "+0100", "+01")
_SECONDS = 19  # characters of a date and a time to the second
_NANOSECONDS = 9  # digits


def _examples() -> dict[int, str]:
    """Return an example of each form."""
    times = ["23:59", "23:59:58", *(f"23:59:58.{'123456789'[:digits]}" for digits in range(1, 10))]
    found = {
        kernel.EMPTY: "",
        kernel.TEXT: "text",
        kernel.INTEGER: "1",
        kernel.NUMBER: "1e5",
        kernel.LARGE_FLOAT: "1e+16",
        kernel.TITLE: "True",
        kernel.LOWER: "true",
        kernel.UPPER: "TRUE",
        kernel.DATE: "2024-12-31",
    }
    for digits in range(1, kernel.MOST_DIGITS + 1):
        found[kernel.WHOLE + digits] = "1." + "0" * digits
        found[kernel.FRACTION + digits] = "0." + "0" * (digits - 1) + "5"
    for precision, time in enumerate(times):
        found[kernel.TIME + precision] = time
        for is_t in (False, True):
            for number, zone in enumerate(_ZONES):
                form = kernel.timestamp_form(is_t, precision, number)
                found[form] = f"2024-12-31{'T' if is_t else ' '}{time}{zone}"
    found |= {kernel.PADDED + digits: "1".zfill(digits) for digits in range(2, kernel.WIDEST + 1)}
    found |= {kernel.MISSING + number: word.decode() for number, word in enumerate(kernel.MISSING_WORDS)}
    return found


EXAMPLES = _examples()
_BY_EXAMPLE = {example: form for form, example in EXAMPLES.items()}
BOOLS = frozenset({kernel.TITLE, kernel.LOWER, kernel.UPPER})
NUMBERS = frozenset(
    {
        kernel.INTEGER,
        kernel.NUMBER,
        kernel.LARGE_FLOAT,
        *range(kernel.PADDED + 2, kernel.FORMS),
        *(start + digits for start in (kernel.WHOLE, kernel.FRACTION) for digits in range(1, kernel.MOST_DIGITS + 1)),
    }
)
TIMESTAMPS = frozenset({kernel.DATE, *range(kernel.TIMESTAMP, kernel.TIME)})
TIMES = frozenset(range(kernel.TIME, kernel.MISSING))
MISSING = frozenset({kernel.EMPTY, *range(kernel.MISSING, kernel.PADDED + 2)})
PADDED = frozenset(range(kernel.PADDED + 2, kernel.FORMS))


@dataclass(frozen=True)
class Written:
    """The forms that the values of a column, or of columns that share ids, had in training.

    `forms` has the numbers of the forms that occurred. `types` has the columns' Arrow types in the files, where "text"
    stands for every text type; it is empty if the types are unknown.
    """

    forms: frozenset[int]
    types: tuple[str, ...] = ()

    @cached_property
    def kind(self) -> str:
        """The kind of the values: "number", "bool", "timestamp" (also dates), "time", "unknown", or else "text"."""
        seen = self.forms - MISSING
        if not seen:
            return "unknown"
        kinds = (("number", NUMBERS), ("bool", BOOLS), ("timestamp", TIMESTAMPS), ("time", TIMES))
        return next((kind for kind, forms in kinds if seen <= forms), "text")

    @cached_property
    def is_typed(self) -> bool:
        """Whether the files stored typed values, not text."""
        return bool(self.types) and "text" not in self.types

    @cached_property
    def has_plain_integers(self) -> bool:
        """Whether all numbers, if any, were written as plain integers such as 1."""
        return self.kind in ("number", "text", "unknown") and self.forms & NUMBERS <= {kernel.INTEGER}

    @cached_property
    def missing(self) -> str | None:
        """The text that missing values had, or None if it varied."""
        words = self.forms & MISSING
        if kernel.EMPTY in words or not words or self.kind in ("text", "unknown"):
            return ""
        return EXAMPLES[next(iter(words))] if len(words) == 1 else None

    @cached_property
    def zone(self) -> str | None:
        """The time zone of the columns' types, or None if they have none or several."""
        zones = {found.partition("tz=")[2].rstrip("]") for found in self.types if "tz=" in found}
        return zones.pop() if len(zones) == 1 else None

    @cached_property
    def shown(self) -> str:
        """A description of the values for messages."""
        if self.is_typed:
            return f"of type {' or '.join(self.types)}"
        examples = [EXAMPLES[form] for form in sorted(self.forms - MISSING - {kernel.TEXT})][:3]
        if self.kind == "text" or not examples:
            return "text"
        return "text such as " + " and ".join(map(repr, examples))

    def merge(self, other: "Written") -> "Written":
        """Return the union of the forms and of the types."""
        return Written(self.forms | other.forms, tuple(dict.fromkeys([*self.types, *other.types])))

    def as_json(self) -> dict[str, Any]:
        """Return the entry that the manifest stores."""
        return {"types": list(self.types), "forms": format_names(self.forms)}


def find_zone(form: int) -> int | None:
    """Return the number of a timestamp form's zone, `kernel.NAIVE` if it has none; None for other forms."""
    return (form - kernel.TIMESTAMP) % kernel.ZONES if kernel.TIMESTAMP <= form < kernel.TIME else None


class Texts(NamedTuple):
    """The texts that N values may have had in training.

    `texts` has an array [N] for each form, with null where a value cannot have that form; the first array also has the
    text of missing values. `fallback` [N] has the texts to use where all these arrays have null. `doubtful` [N] marks
    values that may have had yet another form.
    """

    texts: list[pa.StringArray]
    fallback: pa.StringArray
    doubtful: npt.NDArray[np.bool_]


def format_names(forms: Iterable[int]) -> list[str]:
    """Return the names of forms, in a fixed order."""
    return [EXAMPLES[form] for form in sorted(forms)]


def from_json(content: Mapping[str, Any]) -> Written:
    """Read the result of `as_json`; forms that this version does not know become `TEXT`."""
    return Written(frozenset(_BY_EXAMPLE.get(name, kernel.TEXT) for name in content["forms"]), tuple(content["types"]))


def find_forms(texts: pa.Array) -> frozenset[int]:
    """Return the set of forms in `texts`, which must not have nulls."""
    return frozenset(np.unique(each_form(texts)).tolist())


def each_form(texts: pa.Array) -> npt.NDArray[np.uint16]:
    """Return the form of each text [N], uint16."""
    return classify_texts(*arrow.get_buffers(texts))


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
        zone = find_zone(form)
        if zone is None or (zone != kernel.NAIVE) != aware:
            continue
        is_t, precision = divmod((form - kernel.TIMESTAMP) // kernel.ZONES, kernel.PRECISIONS)
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
    if all(find_zone(form) is None for form in written.forms):  # only dates
        wrong = pc.and_(values.is_valid(), found[0].is_null()).to_numpy(zero_copy_only=False)
        if len(rows := np.flatnonzero(wrong)):
            raise WrongValueError(
                int(rows[0]),
                f"{fallback[int(rows[0])].as_py()} has a time, but the column's values were dates in training",
            )
    offsets = any((find_zone(form) or 0) >= kernel.COLON for form in written.forms)
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
