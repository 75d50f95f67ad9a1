"""The commands that look at a data set which is there: check, info."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostdev.core import cli, pictures
from hostdev.data.preprocess import check, info, info_picture, info_text


def add_commands(to: Any) -> None:
    """Add them to the sub-commands of `hostdev.data.preprocess`."""

    def add(name: str, what: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = to.add_parser(
            name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False
        )
        made.add_argument("path", type=Path, metavar="DIR", help="a data set's folder")
        cli.add_debug(made)
        return made

    add("check", "read all of a data set and say what is wrong with it; exit code 1 if it is not whole")
    add("info", "print and draw what is in a data set, from all of its rows").add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a new file for the picture (info.png, or with a number where that is taken)",
    )


def _check(arguments: argparse.Namespace) -> None:
    check.run(arguments.path)


def _info(arguments: argparse.Namespace) -> None:
    out = arguments.out or pictures.new_path("info")
    pictures.require_new(out)
    found = info.gather(arguments.path)
    for line in info_text.lines_of(found):
        print(line)
    info_picture.draw(found, out)
    print(f"\npicture  {out}")


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {"check": _check, "info": _info}
