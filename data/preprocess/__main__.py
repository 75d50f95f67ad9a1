"""python -m hostdev.data.preprocess criteo|synthetic: text or a look-alike to Arrow shards."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from hostdev.data.manifest import Manifest
from hostdev.data.preprocess.build import REJECTED_FILE, Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.synthetic import Synthetic, write_text

from hostdev.core import cli
from hostdev.core.errors import UserError

PROG = "hostdev.data.preprocess"


def add_options(to: argparse.ArgumentParser) -> None:
    """Add the options of `Options` as flags; absent ones are None, so that their presence can be seen."""
    default = Options()
    to.add_argument(
        "--threshold",
        type=int,
        metavar="N",
        help=f"a value seen at most N times in training rows is out of vocabulary (default {default.threshold})",
    )
    to.add_argument("--hash-buckets", type=int, metavar="N", help="hash values into N ids instead of a vocabulary")
    to.add_argument("--dense", choices=["max", "log"], help=f"scaling of the integer columns (default {default.dense})")
    to.add_argument(
        "--test-fraction",
        type=float,
        metavar="F",
        help=f"part of the rows that is for testing (default {default.test_fraction})",
    )
    to.add_argument("--rows-per-shard", type=int, metavar="N",
                    help=f"most rows in one file (default {default.rows_per_shard})")  # fmt: skip


def add_seed(to: argparse.ArgumentParser) -> None:
    """Add --seed."""
    to.add_argument("--seed", type=int, metavar="N", default=Options().seed,
                    help="of the test split and of synthetic rows (default %(default)s)")  # fmt: skip


def options_from(arguments: argparse.Namespace, **defaults: object) -> Options:
    """Make `Options` of parsed flags; `defaults` take the place of the usual ones."""
    names = ("threshold", "hash_buckets", "dense", "test_fraction", "rows_per_shard")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if "hash_buckets" in given:
        if "threshold" in given:
            raise UserError("--threshold has no effect with --hash-buckets; leave one of them out")
        given["threshold"] = None
    return Options(seed=arguments.seed, **{**defaults, **given})


def summary(manifest: Manifest, out: Path, seconds: float) -> str:
    """Return what was made, in a line or two."""
    statistics = manifest.statistics
    rows = statistics["rows"]
    lines = [
        f"{out}: {rows['train']:,} training and {rows['test']:,} test rows in "
        f"{len(manifest.train) + len(manifest.test)} shards, {manifest.vocabulary_size:,} ids, "
        f"labels {statistics['label_mean']['train']:.1%} positive, {seconds:.1f} s"
    ]
    if statistics["rejected"]:
        lines.append(f"{statistics['rejected']:,} malformed lines were set aside in {out / REJECTED_FILE}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Parse the command line and build the data set."""
    parser = cli.parser(PROG, "Turn Criteo text, or a synthetic look-alike, into Arrow shards.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="criteo|synthetic")
    criteo = commands.add_parser("criteo", help="from Criteo text", allow_abbrev=False)
    criteo.add_argument("files", nargs="+", type=Path, metavar="FILE", help="label, 13 integers, 26 hex, tab separated")
    criteo.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new data set's folder")
    synthetic = commands.add_parser("synthetic", help="a look-alike of any length", allow_abbrev=False)
    synthetic.add_argument("--rows", type=int, required=True, metavar="N", help="how many rows")
    target = synthetic.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, metavar="DIR", help="the new data set's folder")
    target.add_argument("--tsv", type=Path, metavar="FILE", help="write raw Criteo text instead of shards")
    for command in (criteo, synthetic):
        add_options(command)
        add_seed(command)
        cli.add_debug(command)
    arguments = parser.parse_args(argv)

    start = time.monotonic()
    source: Source
    if arguments.command == "synthetic":
        if arguments.rows < 1:
            raise UserError(f"--rows must be at least 1, not {arguments.rows}")
        source = Synthetic(arguments.rows, arguments.seed)
        if arguments.tsv is not None:
            for name in ("threshold", "hash_buckets", "dense", "test_fraction", "rows_per_shard"):
                if getattr(arguments, name) is not None:
                    raise UserError(f"--{name.replace('_', '-')} has no effect with --tsv; leave it out")
            write_text(source, arguments.tsv)
            print(f"{arguments.tsv}: {arguments.rows:,} rows, {time.monotonic() - start:.1f} s")
            return
    else:
        source = CriteoText(arguments.files)
    manifest = build(source, arguments.out, options_from(arguments))
    print(summary(manifest, arguments.out, time.monotonic() - start))


if __name__ == "__main__":
    raise SystemExit(cli.run(PROG, main))
