"""python -m hostdev.data.preprocess table|criteo|synthetic: any table, Criteo text or a look-alike to Arrow shards.

And check|info: whether a data set is whole, and what is in it.
"""

if __name__ == "__main__":  # first of all, as the imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.data.preprocess.__main__"))

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.data.manifest import REJECTED_FILE, Manifest
from hostdev.data.preprocess import earlier_flags, looking, table_flags
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.dense import MODES
from hostdev.data.preprocess.earlier_vocabulary import Earlier, growth
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.table import Table

PROG = "hostdev.data.preprocess"
OPTIONS = ("threshold", "hash_buckets", "dense", "test_fraction", "rows_per_shard")


def add_options(to: argparse.ArgumentParser, default: Options | None = None) -> None:
    """Add the options of `Options` as flags; absent ones are None, so that their presence can be seen."""
    default = default or Options()
    to.add_argument(
        "--threshold",
        type=int,
        metavar="N",
        help=f"a value seen at most N times in training rows is out of vocabulary (default {default.threshold})",
    )
    to.add_argument("--hash-buckets", type=int, metavar="N", help="hash values into N ids instead of a vocabulary")
    to.add_argument("--dense", choices=MODES, help=f"scaling of the numeric columns (default {default.dense})")
    to.add_argument(
        "--test-fraction",
        type=float,
        metavar="F",
        help=f"part of the rows that is for testing, 0 for none (default {default.test_fraction})",
    )
    to.add_argument("--rows-per-shard", type=int, metavar="N",
                    help=f"most rows in one file (default {default.rows_per_shard})")  # fmt: skip


def add_seed(to: argparse.ArgumentParser, default: int | None) -> None:
    """Add --seed."""
    to.add_argument("--seed", type=int, metavar="N", default=default,
                    help=f"of the test split and of synthetic rows (default {Options().seed})")  # fmt: skip


def options_from(arguments: argparse.Namespace, **defaults: object) -> Options:
    """Make `Options` of parsed flags; `defaults` take the place of the usual ones."""
    given = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name) is not None}
    if "hash_buckets" in given:
        if "threshold" in given:
            raise UserError("--threshold has no effect with --hash-buckets; leave one of them out")
        given["threshold"] = None
    if arguments.seed is not None:
        given["seed"] = arguments.seed
    return Options(**{**defaults, **given})


def summary(manifest: Manifest, out: Path, seconds: float) -> str:
    """Return what was made, in a line or two."""
    statistics = manifest.statistics
    rows = statistics["rows"]
    shares = statistics["label_mean"]
    lines = [
        f"{out}: {rows['train']:,} training and {rows['test']:,} test rows in "
        f"{len(manifest.train) + len(manifest.test)} shards, {manifest.vocabulary_size:,} ids, "
        f"labels {shares['train']:.1%} positive, {seconds:.1f} s"
    ]
    lines += growth(manifest)
    for bag, values in statistics.get("bag_values", {}).items():
        lines.append(f"{bag}: {values['train'] / rows['train']:.1f} values a training row")
    for split, share in shares.items():
        if share in (0, 1) and rows[split]:
            what = "nothing can be learned of them" if split == "train" else "there is no AUC of them"
            lines.append(f"all labels of the {split} rows are {share:.0f}: {what}")
    if statistics["rejected"]:
        lines.append(f"{statistics['rejected']:,} malformed lines were set aside in {out / REJECTED_FILE}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Parse the command line and build the data set."""
    parser = cli.parser(PROG, "Turn any table, Criteo text, or a synthetic look-alike, into Arrow shards.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="table|criteo|synthetic|check|info")
    table = commands.add_parser("table", help="from CSV, TSV, Parquet or Arrow files", allow_abbrev=False)
    table.add_argument("files", nargs="+", type=Path, metavar="FILE",
                       help="tables with the same columns, folders of them, - for standard input")  # fmt: skip
    table.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new data set's folder")
    table_flags.add_flags(table)
    table_flags.add_split(table)
    criteo = commands.add_parser("criteo", help="from Criteo text", allow_abbrev=False)
    criteo.add_argument("files", nargs="+", type=Path, metavar="FILE",
                        help="label, 13 integers, 26 hex, tab separated; also compressed, in folders, -")  # fmt: skip
    criteo.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new data set's folder")
    synthetic = commands.add_parser("synthetic", help="a look-alike of any length", allow_abbrev=False)
    synthetic.add_argument("--rows", type=int, required=True, metavar="N", help="how many rows")
    target = synthetic.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, metavar="DIR", help="the new data set's folder")
    target.add_argument("--tsv", type=Path, metavar="FILE", help="write raw Criteo text instead of shards")
    add_options(table, Options(threshold=table_flags.THRESHOLD))
    add_seed(table, None)
    for command in (table, criteo):
        earlier_flags.add_flags(command)
    for command in (criteo, synthetic):
        add_options(command)
        add_seed(command, Options().seed)
    for command in (table, criteo, synthetic):
        command.add_argument(
            "--threads", type=int, metavar="N", help="that parse, count and encode (default: all cores)"
        )
        cli.add_debug(command)
    looking.add_commands(commands)
    arguments = parser.parse_args(argv)
    if arguments.command in looking.COMMANDS:
        looking.COMMANDS[arguments.command](arguments)
        return

    if arguments.threads is not None and arguments.threads < 1:
        raise UserError(f"--threads must be at least 1, not {arguments.threads}")
    start = time.monotonic()
    if arguments.command == "synthetic" and arguments.tsv is not None:
        write_look_alike(arguments)
        print(f"{arguments.tsv}: {arguments.rows:,} rows, {time.monotonic() - start:.1f} s")
        return
    earlier = None if arguments.command == "synthetic" else earlier_flags.earlier_of(arguments)
    source, options = source_of(arguments, earlier)
    manifest = build(source, arguments.out, options, threads=arguments.threads, earlier=earlier)
    print(summary(manifest, arguments.out, time.monotonic() - start))


def source_of(arguments: argparse.Namespace, earlier: Earlier | None = None) -> tuple[Source, Options]:
    """Return what parsed flags read, and how it becomes shards; `earlier` is the data set whose ids are kept."""
    if arguments.command == "table":
        how = table_flags.options_of(arguments, earlier)
        if arguments.dense is not None and not how.numeric:
            raise UserError("--dense has no effect without --numeric; leave it out, or name the columns of numbers")
        return Table(arguments.files, how), table_options(arguments, earlier)
    options = options_from(arguments, **earlier_flags.defaults(earlier))
    if arguments.command == "criteo":
        return CriteoText(arguments.files), options
    return look_alike(arguments), options


def table_options(arguments: argparse.Namespace, earlier: Earlier | None = None) -> Options:
    """Make `Options` of the parsed flags of `table`."""
    splits = [flag for flag in ("test_fraction", "test_column", "test_after") if getattr(arguments, flag) is not None]
    flags = ["--" + flag.replace("_", "-") for flag in splits]
    if len(flags) > 1:
        raise UserError(f"{flags[0]} and {flags[1]} both say which rows are for testing; leave one of them out")
    options = options_from(arguments, **{"threshold": table_flags.THRESHOLD, **earlier_flags.defaults(earlier)})
    if splits in ([], ["test_fraction"]):
        return options
    if arguments.seed is not None:
        raise UserError(f"--seed has no effect with {flags[0]}; leave it out")
    return replace(options, test_fraction=None)


def look_alike(arguments: argparse.Namespace) -> Synthetic:
    """Return the rows that parsed flags ask for."""
    if arguments.rows < 1:
        raise UserError(f"--rows must be at least 1, not {arguments.rows}")
    return Synthetic(arguments.rows, arguments.seed)


def write_look_alike(arguments: argparse.Namespace) -> None:
    """Write raw text as parsed flags say."""
    source = look_alike(arguments)
    for name in (*OPTIONS, "threads"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} has no effect with --tsv; leave it out")
    write_text(source, arguments.tsv)
