"""Values of run directories' JSON files, which may lack entries or have unexpected ones; and values as text."""

import math
import zlib
from typing import Any

from hostdev.core.memory import format_bytes
from hostdev.core.printable import printable

NONE = "-"  # shown for a value that is not known


def entry(content: Any, *path: str) -> Any:
    """Return the value below these keys of nested dicts, or None."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def number(content: Any, *path: str) -> float | None:
    """Return the finite number below these keys, or None."""
    found = entry(content, *path)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return found


def table(content: Any, *path: str) -> dict[str, Any]:
    """Return the dict below these keys, or an empty one."""
    found = entry(content, *path)
    return found if isinstance(found, dict) else {}


def numbers(content: Any, *path: str) -> dict[str, float]:
    """Return the numbers in the dict below these keys, by name."""
    found = {clean_name(str(name)): number(each) for name, each in table(content, *path).items()}
    return {name: value for name, value in found.items() if value is not None}


def clean(text: str, most: int = 300) -> str:
    """Return untrusted text on one line of valid Unicode."""
    return printable(text, most).encode("utf-8", "backslashreplace").decode()


def clean_name(name: str, most: int = 300) -> str:
    """Return an untrusted name as `clean` does; a changed one ends with a checksum, so that names stay distinct."""
    made = clean(name, most)
    if made == name:
        return made
    return f"{clean(name, most - 11)} #{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


def count(value: float | None) -> str:
    """Return a whole number as text."""
    return NONE if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Return a number of bytes as text."""
    return NONE if value is None else format_bytes(int(value))


def metric(value: float | None) -> str:
    """Return a metric such as an AUC as text."""
    return NONE if value is None else f"{value:.4f}"


def share(value: float | None) -> str:
    """Return a share as a percentage."""
    return NONE if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """Return a duration, in seconds, as text."""
    if value is None:
        return NONE
    if value < 120:
        return f"{value:.1f} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"


def option(value: Any) -> str:
    """Return an option's value as text."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{clean(str(name))}: {option(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(option, value)) or NONE
    return clean(str(value))
