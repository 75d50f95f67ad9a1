"""The commands that inspect a data set: check, info."""

import argparse
from collections.abc import Callable

from hostdev.core import pictures
from hostdev.data.preprocess import check, info, info_picture, info_text


def _check(arguments: argparse.Namespace) -> None:
    check.run(arguments.path)


def _info(arguments: argparse.Namespace) -> None:
    out = arguments.out or pictures.new_path("info")
    pictures.require_new(out)
    found = info.gather(arguments.path)
    for line in info_text.format_lines(found):
        print(line)
    info_picture.draw(found, out)
    print(f"\npicture  {out}")


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {"check": _check, "info": _info}
