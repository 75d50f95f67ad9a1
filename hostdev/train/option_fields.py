"""A field of a dataclass of options, with what its flag needs."""

from dataclasses import field
from typing import Any


def flag(help: str, *, default: Any = None, kind: Any = None, **extra: Any) -> Any:
    """Return a field: the flag's help text, its default, its type (None for a flag without value), and more for it."""
    return field(default=default, metadata={"help": help, "type": kind, **extra})
