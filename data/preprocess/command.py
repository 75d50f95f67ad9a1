"""The commands `preprocess table|criteo|synthetic`: what parsed flags say, done."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from hostdev.core.errors import UserError
from hostdev.data.manifest import REJECTED_FILE, Manifest
from hostdev.data.preprocess import earlier_flags, looking, table_flags
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.earlier_vocabulary import Earlier, growth
from hostdev.data.preprocess.flags import THRESHOLD
from hostdev.data.preprocess.options import FLAGS, Options, options_from
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.table import Table


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


def run(arguments: argparse.Namespace) -> None:
    """Do what parsed flags say."""
    if arguments.command in looking.COMMANDS:
        looking.COMMANDS[arguments.command](arguments)
        return
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
    options = options_from(arguments, **{"threshold": THRESHOLD, **earlier_flags.defaults(earlier)})
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
    for name in (*FLAGS, "threads"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} has no effect with --tsv; leave it out")
    write_text(source, arguments.tsv)
