"""The text forms that a column's values had in training; manifests record them so that prediction finds equal values.

A form is a way to write a value, such as 1.0 for a number. The code numbers the forms; a manifest names a form by an
example.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.data.preprocess import columns as arrow
from hostdev.kernels.jit import inline, kernel

Forms = npt.NDArray[np.uint16]

EMPTY = 0
TEXT = 1  # text of none of the other forms
INTEGER = 2  # 12, -3
NUMBER = 4  # other ways to write a number: +1, .5, 1., 1e5, -0, 01.5
LARGE_FLOAT = 5  # as Python writes floats of 2^53 and more: 9007199254740992.0, 1e+16, 1.5e+18
TITLE, LOWER, UPPER = 6, 7, 8  # True, true, TRUE; and False, false, FALSE
DATE = 9  # 2024-12-31
WHOLE = 10  # + the number of digits after the point, 1 to 18, all of them 0: 1.0 is WHOLE + 1
FRACTION = 30  # + the number of digits after the point, 1 to 18, not all of them 0: 0.05 is FRACTION + 2
MOST_DIGITS = 18
TIMESTAMP = 50  # + an index of separator, precision and zone, see `timestamp_form`
PRECISIONS, ZONES = 11, 8
TIME = TIMESTAMP + 2 * PRECISIONS * ZONES  # a time of day: + its precision, see `timestamp_form`
MISSING_WORD = TIME + PRECISIONS  # + an index into MISSING_WORDS, which mean a missing value among numbers
MISSING_WORDS = ["NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "NaN", "nan", "-NaN", "-nan", "NaT", "<NA>"]
PADDED_TO = MISSING_WORD + len(MISSING_WORDS) - 2  # + the number of digits, from 2: 012 is PADDED_TO + 3
WIDEST = 20
_WORDS = np.frombuffer("".join(MISSING_WORDS).encode(), np.uint8)
_WORD_ENDS = np.cumsum([0, *map(len, MISSING_WORDS)])
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

_AT_ONCE = 1 << 20  # texts classified at a time


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
        """The values' type: "number", "bool", "timestamp" (also dates), "time", "unknown" (all missing) or "text"."""
        seen = self.forms - MISSING
        if not seen:
            return "unknown"
        kinds = (("number", NUMBERS), ("bool", BOOLS), ("timestamp", TIMESTAMPS), ("time", TIMES))
        return next((kind for kind, forms in kinds if seen <= forms), "text")

    @property
    def has_type(self) -> bool:
        """Whether `kind` is "number", "bool", "timestamp" or "time", so that equal values may have different forms."""
        return self.kind not in ("text", "unknown")

    @cached_property
    def is_typed(self) -> bool:
        """Whether the files stored typed values, not text."""
        return bool(self.types) and "text" not in self.types

    @cached_property
    def has_plain_integers(self) -> bool:
        """Whether numbers, if any, were written only as plain integers such as 1; False for bools and times."""
        return self.kind in ("number", "text", "unknown") and self.forms & NUMBERS <= {INTEGER}

    @cached_property
    def missing(self) -> str | None:
        """The text that stands for a missing value; None if there were several in training, none of them empty.

        It is "" if that occurred, if no value was missing, or if not `has_type`.
        """
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
    found = np.empty(len(texts), np.uint16)
    _classify(offsets, data, found)
    return found


@inline
def _is_digit(c: Any) -> Any:
    return c >= 48 and c <= 57


@kernel
def _two(data: Any, at: Any) -> Any:
    """Return the number that the two digits at `at` form, or -1 if they are not digits."""
    a, b = np.int64(data[np.uint64(at)]), np.int64(data[np.uint64(at + 1)])
    if not (_is_digit(a) and _is_digit(b)):
        return -1
    return (a - 48) * 10 + b - 48


@kernel
def _is(data: Any, at: Any, end: Any, word: Any) -> Any:
    if end - at != len(word):
        return False
    for k in range(len(word)):  # noqa: SIM110  (numba has no all())
        if data[np.uint64(at + k)] != word[k]:
            return False
    return True


@kernel
def _is_date(data: Any, at: Any) -> Any:
    """Return whether the 10 bytes from `at` on are a date such as 2024-12-31."""
    if data[np.uint64(at + 4)] != 45 or data[np.uint64(at + 7)] != 45:
        return False
    if _two(data, at) < 0 or _two(data, at + 2) < 0:
        return False
    month, day = _two(data, at + 5), _two(data, at + 8)
    return month >= 1 and month <= 12 and day >= 1 and day <= 31


@kernel
def _time(data: Any, at: Any, end: Any) -> Any:
    """Return the precision and the end of the time of day that begins at `at`; precision -1 if no time begins there."""
    if end - at < 5 or data[np.uint64(at + 2)] != 58:
        return -1, at
    hour, minute = _two(data, at), _two(data, at + 3)
    if hour < 0 or hour > 23 or minute < 0 or minute > 59:
        return -1, at
    at += 5
    if at == end or data[np.uint64(at)] != 58:
        return 0, at
    if end - at < 3:
        return -1, at
    second = _two(data, at + 1)
    if second < 0 or second > 60:
        return -1, at
    at += 3
    if at == end or data[np.uint64(at)] != 46:
        return 1, at
    digits = 0
    at += 1
    while at < end and _is_digit(data[np.uint64(at)]):
        at += 1
        digits += 1
    if digits < 1 or digits > 9:
        return -1, at
    return 1 + digits, at


@kernel
def _zone(data: Any, at: Any, end: Any) -> Any:
    """Return how the rest of a text, from `at` on, writes a time zone (NAIVE to HOUR), or -1 if it is no time zone."""
    n = end - at
    if n == 0:
        return NAIVE
    if n == 1 and data[np.uint64(at)] == 90:
        return ZULU
    sign = data[np.uint64(at)]
    if not (n == 3 or n == 5 or n == 6) or not (sign == 43 or sign == 45) or _two(data, at + 1) < 0:
        return -1
    colon = n == 6
    if colon and data[np.uint64(at + 3)] != 58:
        return -1
    minutes = 0 if n == 3 else _two(data, at + (4 if colon else 3))
    if minutes < 0:
        return -1
    if _two(data, at + 1) == 0 and minutes == 0 and sign == 43:
        return UTC_COLON if colon else UTC_PLAIN if n == 5 else UTC_HOUR
    return COLON if colon else PLAIN if n == 5 else HOUR


@kernel
def _number(data: Any, begin: Any, end: Any) -> Any:
    """Return the form of a text that begins like a number."""
    at, negative = begin, False
    plus = data[np.uint64(at)] == 43
    if plus or data[np.uint64(at)] == 45:
        negative = not plus
        at += 1
    first = at
    value = np.int64(0)  # the number before the point, capped
    while at < end and _is_digit(data[np.uint64(at)]):
        if value < 1 << 56:
            value = value * 10 + np.int64(data[np.uint64(at)]) - 48
        at += 1
    whole = at - first
    padded = whole > 1 and data[np.uint64(first)] == 48
    if at == end:
        if whole == 0:
            return TEXT
        if plus or (negative and value == 0):
            return NUMBER
        if padded and not negative and whole <= WIDEST:
            return PADDED_TO + whole
        return NUMBER if padded else INTEGER
    digits, zeros = 0, True
    point = data[np.uint64(at)] == 46
    if point:
        at += 1
        while at < end and _is_digit(data[np.uint64(at)]):
            zeros = zeros and data[np.uint64(at)] == 48
            at += 1
            digits += 1
    if whole + digits == 0:
        return TEXT
    if at == end:
        usual = whole > 0 and digits > 0 and not padded and not plus and digits <= MOST_DIGITS
        if not usual or (zeros and negative and value == 0):
            return NUMBER
        if zeros and digits == 1 and value >= 1 << 53:
            return LARGE_FLOAT
        return (WHOLE if zeros else FRACTION) + digits
    if data[np.uint64(at)] != 101 and data[np.uint64(at)] != 69:
        return TEXT
    lower = data[np.uint64(at)] == 101
    at += 1
    signed = at < end and data[np.uint64(at)] == 43
    if at < end and (signed or data[np.uint64(at)] == 45):
        at += 1
    power, exponents = np.int64(0), 0
    while at < end and _is_digit(data[np.uint64(at)]):
        if power < 1000:
            power = power * 10 + np.int64(data[np.uint64(at)]) - 48
        at += 1
        exponents += 1
    if at < end or exponents == 0:
        return TEXT
    if lower and signed and whole == 1 and not plus and (digits > 0) == point and power >= 16 and exponents >= 2:
        return LARGE_FLOAT
    return NUMBER


@kernel
def _form(data: Any, begin: Any, end: Any) -> Any:
    n = end - begin
    if n == 0:
        return EMPTY
    c = data[np.uint64(begin)]
    if n >= 2 and n <= 4 and (c == 78 or c == 110 or c == 35 or c == 45 or c == 60):
        for word in range(len(_WORD_ENDS) - 1):
            if _is(data, begin, end, _WORDS[_WORD_ENDS[word] : _WORD_ENDS[word + 1]]):
                return MISSING_WORD + word
    if n >= 10 and _is_digit(c) and _is_date(data, begin):
        if n == 10:
            return DATE
        between = data[np.uint64(begin + 10)]
        precision, at = _time(data, begin + 11, end)
        if (between == 32 or between == 84) and precision >= 0:
            zone = _zone(data, at, end)
            if zone >= 0:
                return TIMESTAMP + ((PRECISIONS if between == 84 else 0) + precision) * ZONES + zone
        return TEXT
    if n >= 5 and _is_digit(c) and data[np.uint64(begin + 2)] == 58:
        precision, at = _time(data, begin, end)
        return TIME + precision if precision >= 0 and at == end else TEXT
    if _is_digit(c) or c == 45 or c == 43 or c == 46:
        return _number(data, begin, end)
    if n == 4 or n == 5:
        if _is(data, begin, end, b"True") or _is(data, begin, end, b"False"):
            return TITLE
        if _is(data, begin, end, b"true") or _is(data, begin, end, b"false"):
            return LOWER
        if _is(data, begin, end, b"TRUE") or _is(data, begin, end, b"FALSE"):
            return UPPER
    return TEXT


@kernel
def _classify(offsets: Any, data: Any, out: Any) -> Any:
    for i in range(len(out)):
        out[i] = _form(data, np.int64(offsets[i]), np.int64(offsets[i + 1]))
