"""A griffe extension that turns the "name  text" lines of old docstrings into Markdown lists.

Google-style sections are left unchanged. Remove this file, and `extensions` in mkdocs.yml, when no such list is left.
"""

import re
from typing import Any

import griffe

_NAMED = re.compile(r"(\w[\w.]*(?:, \w[\w.]*)*) {2,}(\S.*)")


def as_lists(text: str) -> str:
    """Return a docstring in which each paragraph of names and explanations is a list."""
    return "\n\n".join(_list(part) if _is_list(part) else part for part in re.split(r"\n\s*\n", text))


def _is_list(part: str) -> bool:
    first, *others = part.strip("\n").splitlines() or [""]
    return bool(_NAMED.fullmatch(first)) and all(_NAMED.fullmatch(line) or line.startswith("  ") for line in others)


def _list(part: str) -> str:
    items: list[str] = []
    for line in part.strip("\n").splitlines():
        found = _NAMED.fullmatch(line)
        if found:
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            items.append(f"- {names}: {found[2]}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)


class Columns(griffe.Extension):
    """Rewrites every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """See griffe.Extension."""
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)
