"""Preprocessing options that all sources of rows share, and the flags of `preprocess`.

This module imports little, so that a wrong flag is reported at once.
"""

import argparse
import re
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hostdev.core import cli
from hostdev.core.addresses import local_path, require_input
from hostdev.core.errors import UserError
from hostdev.core.keys import RAW, is_raw
from hostdev.data import folder

FLAGS = ("threshold", "hash_buckets", "dense", "test_fraction", "validation_fraction", "rows_per_shard")
MODES = ("max", "log", "standard")  # of scaling
TASKS = ("binary", "regression")
_LOCAL = re.compile(r"local:([0-9]+)")
_ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}")
MOST_LOCAL = 1024  # workers of --scheduler local:N
THRESHOLD = 1  # values seen once carry no information; they train the out-of-vocabulary id instead


def ids_in_words(ids: int) -> str:
    """Return the number of ids of a data set as text."""
    return "raw ids" if is_raw(ids) else f"{ids:,} ids"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for the conversion of rows to shards."""

    threshold: int | None = 100  # values seen at most this often in training rows are out of vocabulary; None if hashed
    hash_buckets: int | None = None  # number of hash buckets; None for a vocabulary
    dense: str = "max"  # scaling of the numeric columns: "max", "log" or "standard"
    test_fraction: float | None = 0.1  # share of test rows, drawn by seed and row number; None if the source decides
    validation_fraction: float | None = None  # share of validation rows, drawn in the same way; None for no rows
    seed: int = 2020
    rows_per_shard: int = 1 << 18

    def __post_init__(self) -> None:
        if self.threshold is not None and self.threshold < 0:
            raise UserError(f"--threshold must be at least 0, not {self.threshold}")
        if self.hash_buckets is not None and not 1 <= self.hash_buckets <= 2**62:
            raise UserError(f"--hash-buckets must be from 1 to 2^62, not {self.hash_buckets}")
        if self.dense not in MODES:
            raise UserError(f"--dense must be one of {', '.join(MODES)}, not {self.dense}")
        if self.test_fraction is not None and not 0 <= self.test_fraction < 1:
            raise UserError(f"--test-fraction must be at least 0 and less than 1, not {self.test_fraction}")
        if self.validation_fraction is not None:
            if not 0 < self.validation_fraction < 1:
                raise UserError(
                    f"--validation-fraction must be more than 0 and less than 1, not {self.validation_fraction}"
                )
            if self.validation_fraction + (self.test_fraction or 0) >= 1:
                raise UserError("--test-fraction and --validation-fraction together leave no rows for training")
        if self.rows_per_shard < 1:
            raise UserError(f"--rows-per-shard must be at least 1, not {self.rows_per_shard}")

    def as_json(self) -> dict[str, Any]:
        """Return the options for the manifest, without those that have no effect."""
        found = asdict(self)
        if self.validation_fraction is None:
            del found["validation_fraction"]
            if self.test_fraction is None:
                del found["seed"]
        if self.test_fraction is None:
            del found["test_fraction"]
        return found


def add_options(to: argparse.ArgumentParser, default: Options | None = None) -> None:
    """Add flags for all fields of `Options` but the seed; the value of an absent flag is None."""
    default = default or Options()
    to.add_argument(
        "--threshold",
        type=int,
        metavar="N",
        help=f"a value seen at most N times in training rows is out of vocabulary (default {default.threshold})",
    )
    to.add_argument(
        "--hash-buckets", type=int, metavar="N", help="hash values into N ids instead of using a vocabulary"
    )
    to.add_argument(
        "--ids",
        choices=("vocabulary", "raw"),
        help="raw: hash values into 62 bits instead of using a vocabulary, for hostdev train --tables dynamic (default "
        "vocabulary)",
    )
    to.add_argument("--dense", choices=MODES, help=f"scaling of the numeric columns (default {default.dense})")
    to.add_argument(
        "--test-fraction",
        type=float,
        metavar="F",
        help=f"share of the rows for testing, 0 for none (default {default.test_fraction})",
    )
    to.add_argument(
        "--validation-fraction",
        type=float,
        metavar="F",
        help="share of the rows for validation; training evaluates on these rows instead of test rows (default: none)",
    )
    to.add_argument(
        "--rows-per-shard", type=int, metavar="N", help=f"maximum rows per file (default {default.rows_per_shard})"
    )


def add_seed(to: argparse.ArgumentParser, default: int | None) -> None:
    """Add the flag --seed."""
    to.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=default,
        help=f"seed of the test split and of synthetic rows (default {Options().seed})",
    )


def parse_options(arguments: argparse.Namespace, **defaults: object) -> Options:
    """Build `Options` from parsed flags; `defaults` override the fields' defaults."""
    given = {name: getattr(arguments, name) for name in FLAGS if getattr(arguments, name) is not None}
    option = "--hash-buckets"
    if arguments.ids is not None:
        option = f"--ids {arguments.ids}"
        if "hash_buckets" in given:
            raise UserError(f"--hash-buckets has no effect with {option}; leave out one of the two")
        if arguments.ids == "raw":
            given["hash_buckets"] = RAW
    if "hash_buckets" in given:
        if "threshold" in given:
            raise UserError(f"--threshold has no effect with {option}; leave out one of the two")
        given["threshold"] = None
    if arguments.seed is not None:
        given["seed"] = arguments.seed
    return Options(**{**defaults, **given})


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
            f"--{kind}", dest=f"{kind}_files", action="append", metavar="FILE", help=f"a table with {kind} rows"
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
