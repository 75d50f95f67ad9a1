"""The commands of `preprocess`: those that prepare a data set, and check, info and suggest."""

import argparse
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostdev.core import pictures
from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.core.options import OptionError, flag_of
from hostdev.core.outputs import is_text
from hostdev.core.progress import counted
from hostdev.data.manifest import REJECTED_FILE, Manifest, format_warnings
from hostdev.data.preprocess import check, info, info_output, suggest, table_flags
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.earlier_vocabulary import Earlier, growth
from hostdev.data.preprocess.options import (
    THRESHOLD,
    ConversionFlags,
    Options,
    RowFlags,
    TextFlags,
    ids_in_words,
)
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.table import TableSource, open_table
from hostdev.data.preprocess.table_flags import text_format

_SPLITS = ("fraction", "column", "after")  # suffixes, as in --test-fraction; plain --test and --validation name files


def summary(manifest: Manifest, out: Path, seconds: float) -> str:
    """Return the printed text: sizes, reused ids, values per bag, and notes on columns, labels and rejected rows."""
    statistics = manifest.statistics
    rows = statistics["rows"]
    more = f", {rows['validation']:,} validation" if "validation" in rows else ""
    ids = ids_in_words(manifest.vocabulary_size)
    lines = [
        f"{shown_place(out)}: {rows['train']:,} training{more} and {rows['test']:,} test rows in "
        f"{sum(len(manifest.shards(split)) for split in manifest.splits)} shards, {ids}, "
        f"{_labels(manifest, 'train')}, {seconds:.1f} s"
    ]
    lines += growth(manifest)
    for bag, values in statistics.get("bag_values", {}).items():
        lines.append(f"{bag}: {values['train'] / rows['train']:.1f} values per training row")
    lines += format_warnings(statistics)
    for name, means in _label_means(manifest).items():
        of = f"all labels {name!r}" if manifest.schema.targets.more else "all labels"
        for split, share in means.items():
            if share in (0, 1) and rows[split] and name not in manifest.schema.targets.numeric:
                what = "nothing can be learned from them" if split == "train" else "their AUC is undefined"
                lines.append(f"{of} of the {split} rows are {share:.0f}: {what}")
    if statistics["rejected"]:
        what = counted(statistics["rejected"], "row")
        lines.append(
            f"{what} could not be read: {shown_place(out / REJECTED_FILE)} lists them with file, line and reason"
        )
    return "\n".join(lines)


def _label_means(manifest: Manifest) -> dict[str, dict[str, float]]:
    """Return the mean of each label in each split, by label and then by split."""
    statistics = manifest.statistics
    return {manifest.schema.label: statistics["label_mean"], **statistics.get("label_means", {})}


def _labels(manifest: Manifest, split: str) -> str:
    """Return the labels' means in a split as text."""
    schema = manifest.schema
    each = []
    for name, means in _label_means(manifest).items():
        of = f" {name!r}" if schema.targets.more else ""
        mean = means[split]
        each.append(
            f"labels{of} {mean:.4g} on average" if name in schema.targets.numeric else f"labels{of} {mean:.1%} positive"
        )
    return ", ".join(each)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with parsed flags."""
    if arguments.command in _INSPECTIONS:
        _INSPECTIONS[arguments.command](arguments)
        return
    start = time.monotonic()
    flags: ConversionFlags = arguments.flags
    if arguments.command == "synthetic" and arguments.tsv is not None:
        for name in flags.options():
            if flags.has(name) and name != "seed":
                raise OptionError(name, f" has no effect with --tsv; leave out {flag_of(name)}")
        write_text(make_synthetic(arguments, flags.resolve()), arguments.tsv)
        print(f"{arguments.tsv}: {arguments.rows:,} rows, {time.monotonic() - start:.1f} s")
        return
    if arguments.flags.scheduler is not None and arguments.command not in ("table", "criteo", "synthetic"):
        raise UserError(
            f"--scheduler cannot divide a {arguments.command} among workers; write its rows as Parquet (a query's with "
            "COPY in DuckDB), and give these files to preprocess table"
        )
    earlier = None if arguments.command == "synthetic" else table_flags.find_earlier(arguments.flags)
    source, options = make_source(arguments, earlier)
    if arguments.flags.scheduler is None:
        manifest = build(source, arguments.out, options, threads=arguments.flags.threads, earlier=earlier)
    else:
        from hostdev.data.preprocess.cluster.prepare import prepare

        manifest = prepare(source, arguments.out, options, arguments.flags.scheduler, earlier)
    print(summary(manifest, arguments.out, time.monotonic() - start))


def make_source(arguments: argparse.Namespace, earlier: Earlier | None = None) -> tuple[Source, Options]:
    """Make the source and the options from parsed flags; `earlier` is the data set whose ids are kept."""
    flags, kept = arguments.flags, table_flags.keep_defaults(earlier)
    if isinstance(flags, RowFlags):
        for name, given in vars(arguments).items():
            for text in given if isinstance(given, list) else [given]:
                if isinstance(text, str) and not is_text(text):
                    raise UserError(f"{flag_of(name)} {text!r} is not text in UTF-8")
        how = table_flags.parse_table_options(flags, earlier)
        if flags.dense is not None and not how.numeric:
            raise UserError("--dense has no effect without --numeric; leave --dense out, or name numeric columns")
        options = table_options(flags, kept)
        if options.hash_buckets is not None and how.thresholds:
            raise UserError(
                f"threshold of feature {next(iter(how.thresholds))!r} has no effect with --hash-buckets; leave it out"
            )
        source = getattr(arguments, "source", None)
        return TableSource(arguments.files if source is None else [source.open(arguments)], how), options
    options = flags.resolve(**kept)
    return CriteoText(arguments.files) if arguments.command == "criteo" else make_synthetic(arguments, options), options


def table_options(flags: RowFlags, kept: Mapping[str, Any]) -> Options:
    """Make `Options` from the flags of `table` or a registered source; `kept` has an earlier data set's options."""
    test, validation = (
        [flag_of(name) for name in (kind, *(f"{kind}_{how}" for how in _SPLITS)) if flags.has(name)]
        for kind in ("test", "validation")
    )
    for given, what in ((test, "testing"), (validation, "validation")):
        if len(given) > 1:
            raise UserError(f"{given[0]} and {given[1]} both select rows for {what}; leave one of them out")
    options = flags.resolve(**{"threshold": THRESHOLD, **kept})
    if test in ([], ["--test-fraction"]):
        return options
    if flags.seed is not None and flags.validation_fraction is None:
        raise UserError(f"--seed has no effect with {test[0]}; leave out --seed")
    return replace(options, test_fraction=None)


def make_synthetic(arguments: argparse.Namespace, options: Options) -> Synthetic:
    """Make synthetic rows from parsed flags."""
    if arguments.rows < 1:
        raise UserError(f"--rows must be at least 1, not {arguments.rows}")
    return Synthetic(arguments.rows, options.seed)


def _check(arguments: argparse.Namespace) -> None:
    check.run(arguments.path)


def _info(arguments: argparse.Namespace) -> None:
    out = arguments.out or pictures.new_path("info")
    pictures.require_new(out)
    found = info.gather(arguments.path)
    for line in info_output.format_lines(found):
        print(line)
    info_output.draw(found, out)
    print(f"\npicture  {out}")


def _suggest(arguments: argparse.Namespace) -> None:
    flags = TextFlags.from_flags(arguments)
    first, *told = suggest.write(open_table(arguments.file, text_format(flags)), arguments.label, arguments.out)
    print(first)
    given = shlex.join(["hostdev", "preprocess", "table", str(arguments.file), *flags.to_flags()])
    print(f"    {given} --features {shlex.quote(str(arguments.out))} --out DIR")
    for line in told:
        print(line)


_INSPECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {"check": _check, "info": _info, "suggest": _suggest}
