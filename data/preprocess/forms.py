"""The text forms that a column's values had in training; manifests record them so that prediction finds equal values.

A form is a way to write a value, such as 1.0 for a number. It has a number, and a manifest names it by an example.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.data import ragged
from hostdev.data.preprocess import columns as arrow
from hostdev.kernels.arrays import Mask

Forms = npt.NDArray[np.uint16]

EMPTY = 0
TEXT = 1  # any other text
INTEGER = 2  # 12, -3
NUMBER = 4  # other ways to write a number: +1, .5, 1., 1e5, -0, 01.5
LARGE_FLOAT = 5  # as Python writes floats of 2^53 and more: 9007199254740992.0, 1e+16, 1.5e+18
TITLE, LOWER, UPPER = 6, 7, 8  # True, true, TRUE; and False, false, FALSE
DATE = 9  # 2024-12-31
WHOLE = 10  # + digits after the point, 1 to 18, all 0: 1.0 is WHOLE + 1
FRACTION = 30  # + digits after the point, 1 to 18, not all 0
MOST_DIGITS = 18
TIMESTAMP = 50  # + an index of separator, precision and zone, see `timestamp_form`
PRECISIONS, ZONES = 11, 8
TIME = TIMESTAMP + 2 * PRECISIONS * ZONES  # + precision; a time of day
MISSING_WORD = TIME + PRECISIONS  # + an index into MISSING_WORDS, which mean a missing value among numbers
MISSING_WORDS = ["NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "NaN", "nan", "-NaN", "-nan", "NaT", "<NA>"]
PADDED_TO = MISSING_WORD + len(MISSING_WORDS) - 2  # + digits, from 2: 012 is PADDED_TO + 3
WIDEST = 20
# Ways to write a time zone: none, Z, +00:00, +0000, +00, and other offsets such as +01:30, +0130, +01.
NAIVE, ZULU, UTC_COLON, UTC_PLAIN, UTC_HOUR, COLON, PLAIN, HOUR = range(ZONES)
_ZONES = ["", "Z", "+00:00", "+0000", "+00", "+01:00", "+0100", "+01"]

BOOLS = frozenset({TITLE, LOWER, UPPER})
FRACTIONS = frozenset(range(FRACTION + 1, FRACTION + MOST_DIGITS + 1))
PADDED = frozenset(range(PADDED_TO + 2, PADDED_TO + WIDEST + 1))
WHOLES = frozenset(range(WHOLE + 1, WHOLE + MOST_DIGITS + 1))
NUMBERS = frozenset({INTEGER, NUMBER, LARGE_FLOAT}) | WHOLES | FRACTIONS | PADDED
TIMESTAMPS = frozenset({DATE, *range(TIMESTAMP, TIME)})
TIMES = frozenset(range(TIME, MISSING_WORD))
MISSING = frozenset({EMPTY, *range(MISSING_WORD, PADDED_TO + 2)})

_WORDS = {"True": TITLE, "False": TITLE, "true": LOWER, "false": LOWER, "TRUE": UPPER, "FALSE": UPPER}
_WORDS |= {word: MISSING_WORD + number for number, word in enumerate(MISSING_WORDS)}
_DATE_PATTERN = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
_TIME_PATTERN = r"(?:[01]\d|2[0-3]):[0-5]\d(?::(?:[0-5]\d|60)(?:\.\d{1,9})?)?"
_AT_ONCE = 1 << 20  # texts


def timestamp_form(is_t: Any, precision: Any, zone: Any) -> Any:
    """Return the number of a timestamp's form, or the numbers for arrays of arguments.

    Args:
        is_t: Whether date and time are separated by a T; otherwise, by a space.
        precision: 0 for hours and minutes, 1 for seconds, 1 + n for seconds with n decimals.
        zone: How the time zone is written: NAIVE, ZULU, ..., HOUR.
    """
    return TIMESTAMP + (is_t * PRECISIONS + precision) * ZONES + zone


def find_zone(form: Any) -> Any:
    """Return how a timestamp's form writes the time zone, or the same for an array of forms; NAIVE for dates."""
    return np.where(form == DATE, NAIVE, (form - TIMESTAMP) % ZONES)


def _examples() -> dict[int, str]:
    """Return an example of each form."""
    found = {EMPTY: "", TEXT: "text", INTEGER: "1", NUMBER: "1e5", LARGE_FLOAT: "1e+16", DATE: "2024-12-31"}
    found |= {TITLE: "True", LOWER: "true", UPPER: "TRUE"}
    for digits in range(1, MOST_DIGITS + 1):
        found[WHOLE + digits] = "1." + "0" * digits
        found[FRACTION + digits] = "0." + "0" * (digits - 1) + "5"
    times = ["23:59", "23:59:58", *(f"23:59:58.{'123456789'[:digits]}" for digits in range(1, 10))]
    for precision, time in enumerate(times):
        found[TIME + precision] = time
        for zone, suffix in enumerate(_ZONES):
            found[timestamp_form(False, precision, zone)] = f"2024-12-31 {time}{suffix}"
            found[timestamp_form(True, precision, zone)] = f"2024-12-31T{time}{suffix}"
    found |= {PADDED_TO + digits: "1".zfill(digits) for digits in range(2, WIDEST + 1)}
    return found | {MISSING_WORD + number: word for number, word in enumerate(MISSING_WORDS)}


EXAMPLES = _examples()
_BY_EXAMPLE = {example: form for form, example in EXAMPLES.items()}


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
        """The type of the values: "number", "bool", "timestamp" (also dates), "time", "unknown", or else "text"."""
        seen = self.forms - MISSING
        if not seen:
            return "unknown"
        kinds = (("number", NUMBERS), ("bool", BOOLS), ("timestamp", TIMESTAMPS), ("time", TIMES))
        return next((kind for kind, forms in kinds if seen <= forms), "text")

    @property
    def has_type(self) -> bool:
        """Whether all values have the same type, which is not text; equal values may be written differently."""
        return self.kind not in ("text", "unknown")

    @cached_property
    def is_typed(self) -> bool:
        """Whether the files stored typed values, not text."""
        return bool(self.types) and "text" not in self.types

    @cached_property
    def has_plain_integers(self) -> bool:
        """Whether all numbers, if any, were written as plain integers such as 1."""
        return self.kind in ("number", "text", "unknown") and self.forms & NUMBERS <= {INTEGER}

    @cached_property
    def missing(self) -> str | None:
        """The text that missing values had, or None if it varied."""
        words = self.forms & MISSING
        if EMPTY in words or not words or not self.has_type:
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
        examples = [EXAMPLES[form] for form in sorted(self.forms - MISSING - {TEXT})][:3]
        if self.kind == "text" or not examples:
            return "text"
        return "text such as " + " and ".join(map(repr, examples))

    def merge(self, other: "Written") -> "Written":
        """Return the union of the forms and of the types."""
        return Written(self.forms | other.forms, tuple(dict.fromkeys([*self.types, *other.types])))

    def as_json(self) -> dict[str, Any]:
        """Return the entry that the manifest stores."""
        return {"types": list(self.types), "forms": [EXAMPLES[form] for form in sorted(self.forms)]}


def from_json(content: Mapping[str, Any]) -> Written:
    """Read the result of `as_json`; forms that this version does not know become `TEXT`."""
    return Written(frozenset(_BY_EXAMPLE.get(name, TEXT) for name in content["forms"]), tuple(content["types"]))


def find_forms(texts: pa.Array) -> frozenset[int]:
    """Return the set of forms in `texts`, which must not have nulls."""
    parts = (texts.slice(start, _AT_ONCE) for start in range(0, len(texts), _AT_ONCE))
    return frozenset().union(*(np.unique(each_form(part)).tolist() for part in parts))


def each_form(texts: pa.Array) -> Forms:
    """Return the form of each text [N], uint16."""
    offsets, data = arrow.get_buffers(texts)
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    data = data[offsets[0] : offsets[-1]]
    others = ragged.offsets_of(data - np.uint8(ord("0")) > 9)  # bytes that are no digits, before each byte
    filled = np.flatnonzero(lengths)
    first, length = data[starts[filled]], lengths[filled]
    has_digits = others[starts[filled] + length] == others[starts[filled]]
    is_integer = has_digits & ((first != ord("0")) | (length == 1))
    may_be_known = (first <= ord("9")) | (length <= max(map(len, _WORDS)))
    forms = np.full(len(texts), EMPTY, np.uint16)
    forms[filled] = np.where(is_integer, INTEGER, TEXT)
    rest = filled[may_be_known & ~is_integer]
    if len(rest):
        forms[rest] = _classify(texts.take(pa.array(rest)).cast(pa.string()))
    return forms


def _classify(texts: pa.StringArray) -> Forms:
    """Return the form of each text [N]."""
    words = pc.index_in(texts, value_set=pa.array(list(_WORDS))).fill_null(-1).to_numpy()
    forms: Forms = np.array([*_WORDS.values(), TEXT], np.uint16)[words]
    zone = r"(?:Z|[+-]\d\d(?::?\d\d)?)?"
    for pattern, classify in (
        (r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", _classify_numbers),
        (rf"{_DATE_PATTERN}(?:[ T]{_TIME_PATTERN}{zone})?", _classify_timestamps),
        (_TIME_PATTERN, lambda times: TIME + _precisions(_lengths(times))),
    ):
        rows = np.flatnonzero(_match(texts, pattern))
        if len(rows):
            forms[rows] = classify(texts.take(pa.array(rows)))
    return forms


def _classify_numbers(texts: pa.StringArray) -> Any:
    lengths, digits = _lengths(texts), pc.utf8_ltrim(texts, "-")
    decimals = lengths - 1 - pc.find_substring(texts, ".").to_numpy()
    forms = np.full(len(texts), NUMBER)
    long = (_lengths(digits) > 18) | pc.greater_equal(digits, str(2.0**53)).to_numpy(zero_copy_only=False)
    for pattern, form in (
        (r"0|-?[1-9]\d*", INTEGER),
        (rf"0\d{{1,{WIDEST - 1}}}", PADDED_TO + lengths),
        (rf"-?(?:0|[1-9]\d*)\.\d{{1,{MOST_DIGITS}}}", FRACTION + decimals),
        (rf"-?(?:0|[1-9]\d*)\.0{{1,{MOST_DIGITS}}}", WHOLE + decimals),
        (r"-0\.0+", NUMBER),
        (r"-?[1-9]\d{15,}\.0", np.where(long, LARGE_FLOAT, WHOLE + 1)),
        (r"-?\d(?:\.\d+)?e\+0*(?:1[6-9]|[2-9]\d|[1-9]\d{2,})", LARGE_FLOAT),
    ):
        forms = np.where(_match(texts, pattern), form, forms)
    return forms


def _classify_timestamps(texts: pa.StringArray) -> Any:
    suffixes = pc.replace_substring_regex(texts, rf"^.{{10}}(?:.{_TIME_PATTERN})?", "").dictionary_encode()
    by_length = {len(_ZONES[zone]): zone for zone in (COLON, PLAIN, HOUR)}
    zones = [
        _ZONES.index(suffix) if suffix in _ZONES[:COLON] else by_length[len(suffix)]
        for suffix in suffixes.dictionary.to_pylist()
    ]
    is_t = pc.equal(pc.utf8_slice_codeunits(texts, 10, 11), "T").to_numpy(zero_copy_only=False)
    precisions = _precisions(_lengths(texts) - 11 - _lengths(suffixes.dictionary_decode()))
    forms = timestamp_form(is_t, precisions, np.array(zones)[suffixes.indices.to_numpy()])
    return np.where(_lengths(texts) == 10, DATE, forms)


def _precisions(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the precisions (see `timestamp_form`) of times with these numbers of characters."""
    return np.where(lengths == 5, 0, np.maximum(1, lengths - 8))


def _lengths(texts: pa.StringArray) -> npt.NDArray[np.int32]:
    found: npt.NDArray[np.int32] = pc.binary_length(texts).to_numpy()
    return found


def _match(texts: pa.StringArray, pattern: str) -> Mask:
    """Return the mask of the texts that match a pattern as a whole."""
    found: Mask = pc.match_substring_regex(texts, f"^(?:{pattern})$").to_numpy(zero_copy_only=False)
    return found
