"""The command line of `predict`, and options of all commands that predict: the checkpoint, the model, raw rows."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hostdev.core import cli
from hostdev.core.addresses import address_of, checkpoint_path, require_input, result_path, shown_place, source_path
from hostdev.core.errors import UserError, in_words
from hostdev.ext.predict import WHICH

PROG = "hostdev.predict"
HELP = "write the predictions for the rows of a file"


def add_checkpoint(to: cli.Parser, missing: str) -> None:
    """Add --checkpoint and --which; `missing` is the error for a path that does not exist, with {} for the path."""
    to.inputs["checkpoint"] = partial(require_input, said=missing)
    to.add_argument(
        "--checkpoint",
        type=cli.checked(checkpoint_path),
        required=True,
        metavar="DIR",
        help="a checkpoint, or a folder of checkpoints",
    )
    to.add_argument(
        "--which", choices=WHICH, help="which checkpoint of a run (default: best with --early-stop, else newest)"
    )


def add_model(to: argparse.ArgumentParser) -> None:
    """Add --model."""
    to.add_argument("--model", metavar="package.module:Class", help="the model's class, if it is your own")


def add_query(to: argparse.ArgumentParser) -> None:
    """Add --query."""
    to.add_argument(
        "--query",
        type=Path,
        metavar="FILE",
        help="a SELECT that computes the columns of raw rows, the table `rows` (default: the data set's query)",
    )


def read_query(path: Path | None) -> str | None:
    """Return the text of the file that --query names, or None without --query."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--query {path}: the file cannot be read ({in_words(error)})") from None


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(
        prog, "Write the probability of a positive label, or a number, for each row of a file or a data set."
    )
    made.inputs["data"] = partial(require_input, said="--data {}: there is no such file or data set")
    add_checkpoint(made, "there is no file or folder {}")
    add_model(made)
    add_query(made)
    made.add_argument(
        "--data",
        type=cli.checked(source_path),
        required=True,
        metavar="FILE|DIR",
        help="raw rows (- for standard input), or a data set",
    )
    made.add_argument(
        "--split", choices=("train", "test", "validation"), help="which rows of a data set to predict (default test)"
    )
    made.add_argument(
        "--out",
        type=cli.checked(result_path),
        required=True,
        metavar="FILE",
        help="a new file, NAME.parquet or NAME.csv",
    )
    made.add_argument(
        "--keep", metavar="NAMES", help="columns of FILE, separated by commas, to write next to the predictions"
    )
    made.add_argument("--by", metavar="NAME", help="print GAUC, NDCG and recall, with the rows grouped by this column")
    made.add_argument("--at", type=int, metavar="K", help="with --by: NDCG and recall at K (default 10)")
    made.add_argument("--device", default="cpu", metavar="NAME", help="where the dense layers run (default cpu)")
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and predict."""
    arguments = parser(prog).parse_args(argv)
    out: Path = arguments.out
    if address_of(out) is None and out.exists():
        raise UserError(f"--out {out} exists; choose another file")
    if out.suffix.lower() not in (".parquet", ".csv"):
        name = out.stem or "p"
        raise UserError(
            f"--out {shown_place(out)}: predictions are written as Parquet or CSV; give {name}.parquet or {name}.csv"
        )
    if arguments.at is not None and arguments.by is None:
        raise UserError("--at has no effect without --by NAME; give both")
    if arguments.at is not None and arguments.at < 1:
        raise UserError(f"--at must be at least 1, not {arguments.at}")
    arguments.query = read_query(arguments.query)
    with cli.importing(prog):
        from hostdev.ext.predict.command import run
    run(arguments, prog)
