"""Names of columns and types: parses them from flags, and formats them for messages."""

import csv
from collections.abc import Sequence
from typing import Any

from hostdev.core.errors import UserError

_MOST_NAMES, _MOST_LETTERS, _EACH = 30, 240, 60


def parse_names(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Parse comma-separated names; a name that contains a comma must be in double quotes."""
    try:
        return tuple(name for text in texts or () for name in next(csv.reader([text], skipinitialspace=True)))
    except csv.Error:
        raise UserError(
            f"{', '.join(map(repr, texts or ()))}: not a comma-separated list of names; put a name that contains "
            "a comma or line end in double quotes"
        ) from None


def listed(names: Sequence[Any]) -> str:
    """Format as many names as fit into a message; quote empty names and names that begin or end with whitespace."""
    shown: list[str] = []
    for name in map(str, names[:_MOST_NAMES]):
        text = short(repr(name) if name != name.strip() or not name else name, _EACH)
        if sum(map(len, shown)) + len(text) > _MOST_LETTERS:
            break
        shown.append(text)
    left = len(names) - len(shown)
    text = ", ".join(shown)
    return text if not left else f"{text} and {left} more" if shown else f"{left} columns"


def short(value: Any, most: int = 100) -> str:
    """Format a value, such as a type, in at most `most` characters."""
    text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def about_blanks(name: str, names: Sequence[str]) -> str:
    """Return a hint if `name` matches one of `names` except for surrounding whitespace, else an empty string."""
    found = next((one for one in names if one != name and one.strip() == name.strip()), None)
    if found is None:
        return ""
    return (
        f"; {short(found, _EACH)!r} differs only in whitespace: remove the whitespace from the file, or include it in "
        f"the name, as '{short(chr(34) + found + chr(34), _EACH)}'"
    )
