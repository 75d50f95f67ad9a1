"""The commands of `preprocess`: those that prepare a data set, and check, info and suggest."""

import argparse
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hostdev.core import pictures
from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data.manifest import REJECTED_FILE, Manifest, format_warnings
from hostdev.data.preprocess import check, info, info_output, suggest, table_flags
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.earlier_vocabulary import Earlier, growth
from hostdev.data.preprocess.options import FLAGS, THRESHOLD, Options, ids_in_words, parse_options, parse_scheduler
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.table import TableSource, open_table
from hostdev.data.preprocess.table_flags import text_options
from hostdev.data.preprocess.table_options import TableOptions

_SPLIT_FLAGS = {
    kind: {f"--{kind}": f"{kind}_files"}
    | {f"--{kind}-{how}": f"{kind}_{how}" for how in ("fraction", "column", "after")}
    for kind in ("test", "validation")
}


def summary(manifest: Manifest, out: Path, seconds: float) -> str:
    """Return the command's output: sizes, and notes on labels and malformed lines."""
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
    if arguments.command == "synthetic" and arguments.tsv is not None:
        write_synthetic(arguments)
        print(f"{arguments.tsv}: {arguments.rows:,} rows, {time.monotonic() - start:.1f} s")
        return
    if arguments.scheduler is not None:
        check_scheduler(arguments)
    earlier = None if arguments.command == "synthetic" else table_flags.find_earlier(arguments)
    source, options = make_source(arguments, earlier)
    if arguments.scheduler is None:
        manifest = build(source, arguments.out, options, threads=arguments.threads, earlier=earlier)
    else:
        from hostdev.data.preprocess.cluster.prepare import prepare

        manifest = prepare(source, arguments.out, options, arguments.scheduler, earlier)
    print(summary(manifest, arguments.out, time.monotonic() - start))


def check_scheduler(arguments: argparse.Namespace) -> None:
    """Raise UserError unless --scheduler is valid and the other flags allow it."""
    parse_scheduler(arguments.scheduler)
    if arguments.threads is not None:
        raise UserError(
            "--threads has no effect with --scheduler, whose workers have their own numbers of threads; leave out "
            "--threads"
        )
    if arguments.command == "query":
        raise UserError(
            "--scheduler cannot divide a query among workers; write its rows as Parquet, such as with COPY in DuckDB, "
            "and give these files to preprocess table"
        )
    if getattr(arguments, "source", None) is not None:
        raise UserError(
            f"--scheduler cannot divide the rows of {arguments.command} among workers; write them as Parquet, and give "
            "these files to preprocess table"
        )


def make_source(arguments: argparse.Namespace, earlier: Earlier | None = None) -> tuple[Source, Options]:
    """Make the source and the options from parsed flags; `earlier` is the data set whose ids are kept."""
    if table_flags.has_columns(arguments):
        how = table_flags.parse_table_options(arguments, earlier)
        if arguments.dense is not None and not how.numeric:
            raise UserError("--dense has no effect without --numeric; leave --dense out, or name numeric columns")
        options = table_options(arguments, earlier)
        if options.hash_buckets is not None and how.thresholds:
            raise UserError(
                f"threshold of feature {next(iter(how.thresholds))!r} has no effect with --hash-buckets; leave it out"
            )
        source = getattr(arguments, "source", None)
        return TableSource(arguments.files if source is None else [source.open(arguments)], how), options
    options = parse_options(arguments, **table_flags.keep_defaults(earlier))
    if arguments.command == "criteo":
        return CriteoText(arguments.files), options
    return make_synthetic(arguments), options


def table_options(arguments: argparse.Namespace, earlier: Earlier | None = None) -> Options:
    """Make `Options` from the parsed flags of `table` or `query`."""
    test, validation = (
        [flag for flag, name in _SPLIT_FLAGS[kind].items() if getattr(arguments, name, None) is not None]
        for kind in ("test", "validation")
    )
    for flags, what in ((test, "testing"), (validation, "validation")):
        if len(flags) > 1:
            raise UserError(f"{flags[0]} and {flags[1]} both select rows for {what}; leave one of them out")
    options = parse_options(arguments, **{"threshold": THRESHOLD, **table_flags.keep_defaults(earlier)})
    if test in ([], ["--test-fraction"]):
        return options
    if arguments.seed is not None and arguments.validation_fraction is None:
        raise UserError(f"--seed has no effect with {test[0]}; leave out --seed")
    return replace(options, test_fraction=None)


def make_synthetic(arguments: argparse.Namespace) -> Synthetic:
    """Make synthetic rows from parsed flags."""
    if arguments.rows < 1:
        raise UserError(f"--rows must be at least 1, not {arguments.rows}")
    return Synthetic(arguments.rows, arguments.seed)


def write_synthetic(arguments: argparse.Namespace) -> None:
    """Write synthetic rows as Criteo text to the file that --tsv names."""
    source = make_synthetic(arguments)
    for name in (*FLAGS, "threads", "scheduler"):
        if getattr(arguments, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} has no effect with --tsv; leave out --{name.replace('_', '-')}"
            )
    write_text(source, arguments.tsv)


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


_INSPECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {"check": _check, "info": _info, "suggest": _suggest}
