"""The commands that inspect a data set or a table: check, info, suggest."""

import argparse
import shlex
from collections.abc import Callable

from hostdev.core import pictures
from hostdev.data.preprocess import check, info, info_picture, info_text, suggest
from hostdev.data.preprocess.table import open_table
from hostdev.data.preprocess.table_flags import text_options
from hostdev.data.preprocess.table_options import TableOptions


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


def _suggest(arguments: argparse.Namespace) -> None:
    how = TableOptions(label="label", categorical=("any",), **text_options(arguments))
    file = open_table(arguments.file, how)
    first, *told = suggest.write(file, arguments.label, arguments.out)
    print(first)
    given = shlex.join(["hostdev", "preprocess", "table", str(arguments.file), *_as_flags(arguments)])
    print(f"    {given} --features {shlex.quote(str(arguments.out))} --out DIR")
    for line in told:
        print(line)


def _as_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags about reading text files, as the user gave them."""
    named = {"--columns": arguments.columns, "--delimiter": arguments.delimiter, "--encoding": arguments.encoding}
    named["--skip-lines"] = arguments.skip_lines
    flags = [text for flag, value in named.items() if value is not None for text in (flag, str(value))]
    return [*flags, *(["--no-quotes"] if arguments.no_quotes else [])]


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {"check": _check, "info": _info, "suggest": _suggest}
