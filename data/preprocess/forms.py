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

from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.text_forms import (
    DATE,
    EMPTY,
    FRACTION,
    INTEGER,
    LARGE_FLOAT,
    LOWER,
    MISSING_WORD,
    MISSING_WORDS,
    MOST_DIGITS,
    NAIVE,
    NUMBER,
    PADDED_TO,
    PRECISIONS,
    TEXT,
    TIME,
    TIMESTAMP,
    TITLE,
    UPPER,
    WHOLE,
    WIDEST,
    ZONES,
    classify_texts,
)

Forms = npt.NDArray[np.uint16]

_ZONES = ["", "Z", "+00:00", "+0000", "+00", "+01:00", "+0100", "+01"]

BOOLS = frozenset({TITLE, LOWER, UPPER})
FRACTIONS = frozenset(range(FRACTION + 1, FRACTION + MOST_DIGITS + 1))
PADDED = frozenset(range(PADDED_TO + 2, PADDED_TO + WIDEST + 1))
WHOLES = frozenset(range(WHOLE + 1, WHOLE + MOST_DIGITS + 1))
NUMBERS = frozenset({INTEGER, NUMBER, LARGE_FLOAT}) | WHOLES | FRACTIONS | PADDED
TIMESTAMPS = frozenset({DATE, *range(TIMESTAMP, TIME)})
TIMES = frozenset(range(TIME, MISSING_WORD))
MISSING = frozenset({EMPTY, *range(MISSING_WORD, PADDED_TO + 2)})

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
    return classify_texts(*arrow.get_buffers(texts))
