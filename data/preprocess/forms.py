"""The text forms that a column's values had in training; manifests record them so that prediction finds equal values.

A form is a way to write a value, such as 1.0 for a number; a manifest names it by an example. `hostdev.kernels.forms`
defines the forms' numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.data.preprocess import columns as arrow
from hostdev.kernels import forms as kernel
from hostdev.kernels.forms import classify_texts

_ZONES = ("", "Z", "+00:00", "+0000", "+00", "+01:00", "+0100", "+01")


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
