"""How the values of a column were written in training: what a manifest keeps, so that they are found again.

A form is a way to write a value, such as that of 1.0; a manifest names it by an example. Their numbers are those of
`hostdev.kernels.forms`.
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
    """How the values of a column, or of columns that share their ids, were written in training.

    forms  the forms that occurred, by number
    types  Arrow's types of the columns in the files, "text" for text; empty where nobody knows
    """

    forms: frozenset[int]
    types: tuple[str, ...] = ()

    @cached_property
    def kind(self) -> str:
        """Return "number", "bool", "timestamp" (dates, too), "time", "text" for others, or "unknown"."""
        seen = self.forms - MISSING
        if not seen:
            return "unknown"
        kinds = (("number", NUMBERS), ("bool", BOOLS), ("timestamp", TIMESTAMPS), ("time", TIMES))
        return next((kind for kind, forms in kinds if seen <= forms), "text")

    @cached_property
    def is_typed(self) -> bool:
        """Whether the files had values of this kind, and not text that looks like them."""
        return bool(self.types) and "text" not in self.types

    @cached_property
    def has_plain_integers(self) -> bool:
        """Whether whole numbers were written as 1 is, if there were any."""
        return self.kind in ("number", "text", "unknown") and self.forms & NUMBERS <= {kernel.INTEGER}

    @cached_property
    def missing(self) -> str | None:
        """Return the text of a missing value; None where there are several."""
        words = self.forms & MISSING
        if kernel.EMPTY in words or not words or self.kind in ("text", "unknown"):
            return ""
        return EXAMPLES[next(iter(words))] if len(words) == 1 else None

    @cached_property
    def zone(self) -> str | None:
        """The time zone of the column's type; None where it has none."""
        zones = {found.partition("tz=")[2].rstrip("]") for found in self.types if "tz=" in found}
        return zones.pop() if len(zones) == 1 else None

    @cached_property
    def shown(self) -> str:
        """The values in words, for messages."""
        if self.is_typed:
            return f"of type {' or '.join(self.types)}"
        examples = [EXAMPLES[form] for form in sorted(self.forms - MISSING - {kernel.TEXT})][:3]
        if self.kind == "text" or not examples:
            return "text"
        return "text such as " + " and ".join(map(repr, examples))

    def with_those_of(self, other: "Written") -> "Written":
        """Return how the values of both were written."""
        return Written(self.forms | other.forms, tuple(dict.fromkeys([*self.types, *other.types])))

    def as_json(self) -> dict[str, Any]:
        """Return what a manifest holds."""
        return {"types": list(self.types), "forms": names_of(self.forms)}


class Texts(NamedTuple):
    """What N values may have been in training.

    texts     for each form the values written so [N], null where that is impossible; a missing value is "" in the first
    fallback  text of a value that has none of them [N]
    doubtful  values that training may have had in yet another form [N]
    """

    texts: list[pa.StringArray]
    fallback: pa.StringArray
    doubtful: npt.NDArray[np.bool_]


def names_of(forms: Iterable[int]) -> list[str]:
    """Return the names of forms, in a fixed order."""
    return [EXAMPLES[form] for form in sorted(forms)]


def from_json(content: Mapping[str, Any]) -> Written:
    """Return what `as_json` gave; forms that this version does not know are text."""
    return Written(frozenset(_BY_EXAMPLE.get(name, kernel.TEXT) for name in content["forms"]), tuple(content["types"]))


def forms_in(texts: pa.Array) -> frozenset[int]:
    """Return the forms of texts without nulls."""
    return frozenset(np.unique(each_form(texts)).tolist())


def each_form(texts: pa.Array) -> npt.NDArray[np.uint16]:
    """Return the form of each text [N], uint16."""
    return classify_texts(*arrow.bytes_of(texts))
