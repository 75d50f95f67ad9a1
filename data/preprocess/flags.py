"""The flags of `preprocess`. This module imports little, so that a wrong flag is reported at once."""

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any

from hostdev.core import cli
from hostdev.core.addresses import local_path, require_input
from hostdev.core.errors import UserError
from hostdev.data import folder

TASKS = ("binary", "regression")
_LOCAL = re.compile(r"local:([0-9]+)")
_ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}")
MOST_LOCAL = 1024  # workers of --scheduler local:N
THRESHOLD = 1  # values seen once carry no information; they train the out-of-vocabulary id instead


def add_table(to: cli.Parser) -> None:
    """Add the flags of `TableOptions`, except those of `add_split` and `add_split_files`."""
    add_roles(to)
    add_text(to)


def add_text(to: argparse.ArgumentParser) -> None:
    """Add the flags for reading text files."""
    to.add_argument("--columns", metavar="NAMES", help="the columns' names, comma-separated, for text without a header")
    to.add_argument(
        "--delimiter", metavar="TEXT", help="separator of values in text, or the word tab (default: detected)"
    )
    to.add_argument("--no-quotes", action="store_true", help="treat quotes in text as ordinary characters")
    to.add_argument("--encoding", metavar="NAME", help="the encoding of text, such as latin-1 (default utf-8)")
    to.add_argument("--skip-lines", type=int, metavar="N", help="lines to skip at the start of each text file")


def add_roles(to: cli.Parser) -> None:
    """Add the flags for the roles of columns."""
    unread = "--features {}: the file cannot be read (No such file or directory)"
    to.inputs["features"] = partial(require_input, said=unread)

    def add(flag: str, metavar: str, text: str) -> None:
        to.add_argument(flag, action="append", metavar=metavar, help=text)

    add("--label", "NAMES", "the column with the label, 0 or 1, true or false; or several columns, separated by commas")
    to.add_argument(
        "--task",
        choices=TASKS,
        help="binary: predict the probability of a positive label (default); regression: labels are any numbers",
    )
    to.add_argument("--weight", metavar="NAME", help="the column with each row's weight in the loss")
    to.add_argument(
        "--positive",
        metavar="RULE",
        help="which labels are positive: '>3', '>=3', '<3', '<=3', '!=no' or a value (default: 1 or true)",
    )
    add("--numeric", "NAMES", "numeric columns, separated by commas")
    add("--vector", "NAME=N", "a column with a list of N numbers in each row, which become N numeric columns")
    add("--categorical", "NAMES", "columns whose values become ids, separated by commas")
    add("--bag", "NAME=SEP", "a column with any number of values: text split by SEP, or a list in Parquet and Arrow")
    add("--share", "NAME=OTHER", "let column NAME share the ids of column OTHER, so that equal values have equal ids")
    add("--padding", "NAME=VALUE", "omit VALUE, which is only padding, from the lists of --bag NAME")
    add("--last", "NAME=N", "keep only the last N values of each list of --bag NAME")
    add("--bag-weights", "NAME=SEP", "the values of --bag NAME have weights after SEP, such as ':' in red:0.5")
    add("--missing", "VALUES", "missing-value markers in every column, separated by commas, such as '\\N,?'")
    to.add_argument("--decimal", choices=(".", ","), help="the decimal separator of numbers in text (default .)")
    to.add_argument(
        "--features",
        type=cli.checked(local_path),
        metavar="FILE",
        help="a TOML file with the kind and the settings of every feature, instead of the column flags",
    )


def add_split(to: argparse.ArgumentParser) -> None:
    """Add the flags that choose test and validation rows by the values of a column."""
    to.add_argument("--test-column", metavar="NAME=VALUE", help="rows with this value in column NAME are for testing")
    to.add_argument(
        "--test-after",
        metavar="NAME=VALUE",
        help="rows with a larger number or a later time in column NAME are for testing",
    )
    to.add_argument(
        "--validation-column",
        metavar="NAME=VALUE",
        help="rows with this value in column NAME are for validation; training monitors them instead of the test rows",
    )
    to.add_argument(
        "--validation-after",
        metavar="NAME=VALUE",
        help="non-test rows with a larger number or a later time in column NAME are for validation",
    )


def add_split_files(to: argparse.ArgumentParser) -> None:
    """Add the flags that give files of test and validation rows."""
    for kind in ("test", "validation"):
        to.add_argument(
            f"--{kind}",
            dest=f"{kind}_files",
            action="append",
            metavar="FILE",
            help=f"a table with {kind} rows",
        )


def add_earlier(to: cli.Parser) -> None:
    """Add --vocabulary and --frozen-vocabulary."""
    to.inputs["vocabulary"] = folder.require_input
    to.add_argument(
        "--vocabulary",
        type=cli.checked(local_path),
        metavar="FROM",
        help="an earlier data set, whose ids, columns and scaling are kept; new values get ids after the earlier ones",
    )
    to.add_argument(
        "--frozen-vocabulary",
        action="store_true",
        help="with --vocabulary: new values get no ids and are out of vocabulary",
    )


def add_scheduler(to: argparse.ArgumentParser) -> None:
    """Add --scheduler."""
    to.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="work on a cluster with the workers of this Dask scheduler, such as tcp://HOST:8786; local:N starts N "
        "worker processes on this machine (pip install 'hostdev[dask]')",
    )


def add_looking(to: Any) -> None:
    """Add the subcommands `check`, `info` and `suggest` to `hostdev.data.preprocess`."""

    def add(name: str, what: str) -> cli.Parser:
        made: cli.Parser = to.add_parser(
            name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False
        )
        made.inputs["path"] = partial(require_input, said="{} is not a data set: there is no such folder")
        made.add_argument("path", type=cli.checked(local_path), metavar="DIR", help="a data set's folder")
        cli.add_debug(made)
        return made

    add("check", "read a whole data set and report all damage; exit code 1 if there is any")
    of_info = add("info", "print and draw a summary of a data set, from all of its rows")
    of_info.inputs["path"] = folder.require_input
    of_info.add_argument(
        "--out",
        type=cli.checked(local_path),
        metavar="FILE",
        help="a new file for the picture (default: info.png, or a numbered name if that exists)",
    )
    what = "look at a table's first rows and write a features file for --features"
    made: cli.Parser = to.add_parser("suggest", help=what, description=what + ".", allow_abbrev=False)
    made.inputs["file"] = partial(require_input, said="{}: no such file")
    made.add_argument(
        "file", type=cli.checked(local_path), metavar="FILE", help="a table in CSV, TSV, Parquet or Arrow"
    )
    made.add_argument("--label", metavar="NAME", help="the column with the label (default: chosen by its name)")
    made.add_argument(
        "--out",
        type=cli.checked(local_path),
        metavar="FILE",
        default=Path("features.toml"),
        help="the new file (default features.toml)",
    )
    add_text(made)
    cli.add_debug(made)


def parse_scheduler(text: str) -> int | None:
    """Return N for local:N, and None for an address such as tcp://HOST:PORT; raise UserError for anything else."""
    found = _LOCAL.fullmatch(text)
    if found is not None:
        workers = int(found[1])
        if not 1 <= workers <= MOST_LOCAL:
            raise UserError(f"--scheduler {text}: the number of workers must be from 1 to {MOST_LOCAL:,}")
        return workers
    if _ADDRESS.fullmatch(text) is None:
        raise UserError(
            f"--scheduler {text}: give the address of Dask's scheduler, such as tcp://HOST:8786, or local:N for N "
            "processes on this machine"
        )
    return None
