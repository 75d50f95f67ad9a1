"""Preprocessing options that all sources of rows share, and the flags of `preprocess` as groups of options.

This module imports little, so that a wrong flag is reported at once.
"""

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from hostdev.core.addresses import local_path
from hostdev.core.cli import checked
from hostdev.core.errors import UserError
from hostdev.core.keys import RAW, is_raw
from hostdev.core.options import OptionError, OptionGroup, choice, count, option, switch

MODES = ("max", "log", "standard")  # modes of scaling
TASKS = ("binary", "regression")
DECIMALS = (".", ",")
_LOCAL = re.compile(r"local:([0-9]+)")
_ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}")
MOST_LOCAL = 1024  # maximum number of workers of --scheduler local:N
THRESHOLD = 1  # default for tables; a value seen once carries no information, and trains the out-of-vocabulary id


def ids_in_words(ids: int) -> str:
    """Return a data set's number of ids as text, or "raw ids" for values hashed into 62 bits."""
    return "raw ids" if is_raw(ids) else f"{ids:,} ids"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for the conversion of rows to shards."""

    threshold: int | None = 100  # values seen at most this often in training rows are out of vocabulary; None if hashed
    hash_buckets: int | None = None  # number of hash buckets; None for a vocabulary
    dense: str = "max"  # scaling of the numeric columns: "max", "log" or "standard"
    test_fraction: float | None = 0.1  # share of test rows, drawn by seed and row number; None if the source decides
    validation_fraction: float | None = None  # share of validation rows, drawn in the same way; None to draw none
    seed: int = 2020
    rows_per_shard: int = 1 << 18

    def __post_init__(self) -> None:
        for name, item in ConversionFlags.options().items():
            if (value := getattr(self, name, None)) is not None:
                item.require(name, value)
        if (self.validation_fraction or 0) + (self.test_fraction or 0) >= 1:
            raise UserError("--test-fraction and --validation-fraction together leave no rows for training")

    def as_json(self) -> dict[str, Any]:
        """Return the options for the manifest; a fraction that is None is left out, and the seed if both are None."""
        found = asdict(self)
        if self.validation_fraction is None:
            del found["validation_fraction"]
            if self.test_fraction is None:
                del found["seed"]
        if self.test_fraction is None:
            del found["test_fraction"]
        return found


@dataclass(frozen=True, kw_only=True)
class ConversionFlags(OptionGroup):
    """The flags that set `Options`, for the conversion of rows to shards; None if a flag is not given."""

    section: ClassVar[str] = "conversion"
    title: ClassVar[str] = "conversion of rows to shards"
    threshold: int | None = option(
        "a value seen at most N times in training rows is out of vocabulary (default 1; 100 for Criteo's columns, 10 "
        "in quickstart)",
        int,
        least=0,
        unused_with={"hash_buckets": "", "ids=raw": "", "frozen_vocabulary": ""},
    )
    hash_buckets: int | None = count(
        "hash values into N ids instead of using a vocabulary", most=1 << 62, unused_with={"ids": ""}
    )
    ids: str | None = choice(
        "raw: hash values into 62 bits instead of using a vocabulary, for hostdev train --tables dynamic (default "
        "vocabulary)",
        ("vocabulary", "raw"),
    )
    dense: str | None = choice(f"scaling of the numeric columns (default {Options.dense})", MODES)
    test_fraction: float | None = option(
        f"share of the rows for testing, 0 for none (default {Options.test_fraction})", float, least=0, below=1
    )
    validation_fraction: float | None = option(
        "share of the rows for validation; training evaluates on these rows instead of test rows (default: none)",
        float,
        above=0,
        below=1,
    )
    rows_per_shard: int | None = count(f"maximum rows per file (default {Options.rows_per_shard})")

    def resolve(self, **defaults: Any) -> Options:
        """Return the options; for flags that are not given, `defaults` replace the defaults of `Options`."""
        given = {one.name: getattr(self, one.name, None) for one in fields(Options)}
        if self.ids == "raw":
            given["hash_buckets"] = RAW
        found = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        return Options(**found | ({"threshold": None} if given["hash_buckets"] is not None else {}))


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


@dataclass(frozen=True, kw_only=True)
class RunFlags(OptionGroup):
    """The seed, and the threads or workers that prepare the data set."""

    section: ClassVar[str] = "run"
    title: ClassVar[str] = "random draws, threads and workers"
    seed: int | None = option(f"seed of the test split and of synthetic rows (default {Options.seed})", int)
    threads: int | None = count(
        "number of threads (default: all cores)",
        unused_with={"scheduler": "whose workers have their own numbers of threads"},
    )
    scheduler: str | None = option(
        "work on a cluster with the workers of this Dask scheduler, such as tcp://HOST:8786; local:N starts N worker "
        "processes on this machine (pip install 'hostdev[dask]')",
        str,
        metavar="ADDRESS",
        check=parse_scheduler,
    )


@dataclass(frozen=True, kw_only=True)
class EarlierFlags(OptionGroup):
    """The earlier data set whose ids, columns and scaling are kept."""

    section: ClassVar[str] = "earlier"
    title: ClassVar[str] = "an earlier data set"
    vocabulary: Path | None = option(
        "an earlier data set, whose ids, columns and scaling are kept; new values get ids after the earlier ones",
        checked(local_path),
        metavar="FROM",
    )
    frozen_vocabulary: bool = switch("with --vocabulary: new values get no ids and are out of vocabulary")


@dataclass(frozen=True, kw_only=True)
class RoleFlags(OptionGroup):
    """Roles of columns, and how their values are read."""

    section: ClassVar[str] = "roles"
    title: ClassVar[str] = "roles of columns"
    label: list[str] | None = option(
        "the column with the label, 0 or 1, true or false; or several columns, separated by commas",
        list,
        metavar="NAMES",
    )
    task: str | None = choice(
        "binary: predict the probability of a positive label (default); regression: labels are any numbers", TASKS
    )
    weight: str | None = option("the column with each row's weight in the loss", str, metavar="NAME")
    positive: str | None = option(
        "which labels are positive: '>3', '>=3', '<3', '<=3', '!=no' or a value (default: 1 or true)",
        str,
        metavar="RULE",
    )
    missing: list[str] | None = option(
        "missing-value markers in every column, separated by commas, such as '\\N,?'", list, metavar="VALUES"
    )
    decimal: str | None = choice("the decimal separator of numbers in text (default .)", DECIMALS)
    features: Path | None = option(
        "a TOML file with the kind and the settings of every feature, instead of the column flags",
        checked(local_path),
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ColumnFlags(OptionGroup):
    """Flags that name the features' columns; a features file replaces these flags."""

    section: ClassVar[str] = "columns"
    title: ClassVar[str] = "features"
    numeric: list[str] | None = option("numeric columns, separated by commas", list, metavar="NAMES")
    vector: list[str] | None = option(
        "a column with a list of N numbers in each row, which become N numeric columns", list, metavar="NAME=N"
    )
    categorical: list[str] | None = option(
        "columns whose values become ids, separated by commas", list, metavar="NAMES"
    )
    bag: list[str] | None = option(
        "a column with any number of values: text split by SEP, or a list in Parquet and Arrow",
        list,
        metavar="NAME=SEP",
    )
    share: list[str] | None = option(
        "let column NAME share the ids of column OTHER, so that equal values have equal ids", list, metavar="NAME=OTHER"
    )
    padding: list[str] | None = option(
        "omit VALUE, which is only padding, from the lists of --bag NAME", list, metavar="NAME=VALUE"
    )
    last: list[str] | None = option("keep only the last N values of each list of --bag NAME", list, metavar="NAME=N")
    bag_weights: list[str] | None = option(
        "the values of --bag NAME have weights after SEP, such as ':' in red:0.5", list, metavar="NAME=SEP"
    )

    def check(self) -> None:
        """Raise OptionError if one of these flags is given together with a features file."""
        for name in ColumnFlags.options():
            if self.has(name) and self.has("features"):
                raise OptionError(name, " has no effect with --features, whose file defines the columns; leave it out")


@dataclass(frozen=True, kw_only=True)
class SplitFlags(OptionGroup):
    """Columns whose values choose test and validation rows."""

    section: ClassVar[str] = "split"
    title: ClassVar[str] = "test and validation rows"
    test_column: str | None = option("rows with this value in column NAME are for testing", str, metavar="NAME=VALUE")
    test_after: str | None = option(
        "rows with a larger number or a later time in column NAME are for testing", str, metavar="NAME=VALUE"
    )
    validation_column: str | None = option(
        "rows with this value in column NAME are for validation; training monitors them instead of the test rows",
        str,
        metavar="NAME=VALUE",
    )
    validation_after: str | None = option(
        "non-test rows with a larger number or a later time in column NAME are for validation",
        str,
        metavar="NAME=VALUE",
    )


@dataclass(frozen=True, kw_only=True)
class TextFlags(OptionGroup):
    """How text files are read."""

    section: ClassVar[str] = "text"
    title: ClassVar[str] = "text files"
    columns: str | None = option("the columns' names, comma-separated, for text without a header", str, metavar="NAMES")
    delimiter: str | None = option(
        "separator of values in text, or the word tab (default: detected)", str, metavar="TEXT"
    )
    encoding: str | None = option("the encoding of text, such as latin-1 (default utf-8)", str, metavar="NAME")
    skip_lines: int | None = option("lines to skip at the start of each text file", int, least=0)
    no_quotes: bool = switch("treat quotes in text as ordinary characters")


@dataclass(frozen=True, kw_only=True)
class RowFlags(RoleFlags, ColumnFlags, SplitFlags, ConversionFlags, EarlierFlags, RunFlags):
    """The options of a source of rows with named columns."""


@dataclass(frozen=True, kw_only=True)
class TableFlags(RowFlags, TextFlags):
    """The options of `preprocess table`."""

    section: ClassVar[str] = "files"
    title: ClassVar[str] = "files of test and validation rows"
    test: list[str] | None = option("a table with test rows", list, metavar="FILE")
    validation: list[str] | None = option("a table with validation rows", list, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class CriteoFlags(ConversionFlags, EarlierFlags, RunFlags):
    """The options of `preprocess criteo`."""


@dataclass(frozen=True, kw_only=True)
class SyntheticFlags(ConversionFlags, RunFlags):
    """The options of `preprocess synthetic`."""
