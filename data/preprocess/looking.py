"""The commands that look at a data set which is there: check, info."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostdev.data.preprocess import check

from hostdev.core import cli


def add_commands(to: Any) -> None:
    """Add them to the sub-commands of `hostdev.data.preprocess`."""
    for name, what in (
        ("check", "read all of a data set and say what is wrong with it; exit code 1 if it is not whole"),
    ):
        made = to.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
        made.add_argument("path", type=Path, metavar="DIR", help="a data set's folder")
        cli.add_debug(made)


def _check(arguments: argparse.Namespace) -> None:
    check.run(arguments.path)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {"check": _check}
