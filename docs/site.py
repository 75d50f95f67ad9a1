"""A hook of MkDocs that fills in the commands' help and the public names from the sources."""

import os
import re
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from mkdocs.exceptions import PluginError

os.environ["COLUMNS"] = "100"
_FIRST = ("Runtime", "HostTable", "Feature", "Bag", "DeviceTable", "CacheSpec", "EMA", "Predictor", "open")


def commands() -> str:
    """Return a section for each command with its help, as the parser prints it."""
    from hostdev import commands

    sections = []
    for name in commands.names():
        command = commands.find(name)
        made = command.parser(f"hostdev {name}")
        sections.append(f"## hostdev {name}\n\n`python -m {command.PROG}`: {command.HELP}.\n\n{_help(made)}")
        for action in made._actions:
            for part, one in action.choices.items() if hasattr(action, "_name_parser_map") else ():
                sections.append(f"### hostdev {name} {part}\n\n{_help(one)}")
    return "\n\n".join(sections)


def options() -> str:
    """Return a table for each group of options of `hostdev train`."""
    from hostdev.core.options import describe
    from hostdev.ext.training.config import CommandConfig

    sections = []
    for section, rows in describe(CommandConfig.groups()):
        lines = [f"| `{name}` | {value} | {text} |".replace("%%", "%") for name, value, text in rows]
        sections.append("\n".join([f"## {section}\n", "| key | value | meaning |", "|---|---|---|", *lines]))
    return "\n\n".join(sections)


def _help(parser: Any) -> str:
    return f"```text\n{parser.format_help().rstrip()}\n```"


def names() -> str:
    """Return a directive of mkdocstrings for each public name, and a section for each namespace."""
    import hostdev

    found = {name: getattr(hostdev, name) for name in sorted(hostdev.__all__, key=str.lower)}
    rooms = {name: one for name, one in found.items() if isinstance(one, ModuleType)}
    rest = sorted((name for name in found if name not in rooms and name not in _FIRST), key=str.lower)
    sections = [_directives("hostdev", [*_FIRST, *rest])]
    for name, room in rooms.items():
        about = (room.__doc__ or "").splitlines()[0]
        sections.append(
            f"## hostdev.{name}\n\n{about}\n\n{_directives(f'hostdev.{name}', sorted(room.__all__, key=str.lower))}"
        )
    return "\n\n".join(sections)


def _directives(module: str, names: Sequence[str]) -> str:
    from hostdev.core.optimizer_base import SparseOptimizer

    sections = []
    for name in names:
        one = getattr(import_module(module), name)
        hides = isinstance(one, type) and issubclass(one, SparseOptimizer)  # whose members are for the kernels
        options = "\n    options:\n      members: false\n      inherited_members: false" if hides else ""
        sections.append(f"::: {module}.{name}{options}")
    return "\n\n".join(sections)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the placeholders in a page; see the documentation of hooks in MkDocs."""
    for mark, make in (("<!-- commands -->", commands), ("<!-- options -->", options), ("<!-- names -->", names)):
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a table its column's name, which extra.css shows on narrow screens.

    The `::` before code in docstrings becomes a colon, or nothing where it stands alone. A page that lists a private
    name ends the build.
    """
    if private := re.findall(r'id="(hostdev[\w.]*\._\w*)"', html):
        raise PluginError(f"private names are listed: {', '.join(private)}")
    html = html.replace("<p>::</p>\n", "").replace("::</p>", ":</p>")
    return re.sub(r"<table>.*?</table>", lambda found: _label_cells(found[0]), html, flags=re.DOTALL)


def _label_cells(table: str) -> str:
    labels = [re.sub("<.*?>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]

    def label_row(row: re.Match[str]) -> str:
        left = iter(labels)
        return re.sub("<td", lambda _: f'<td data-label="{next(left, "")}"', row[0])

    return re.sub(r"<tr>.*?</tr>", label_row, table, flags=re.DOTALL)
