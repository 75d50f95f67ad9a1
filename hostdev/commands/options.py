"""Options that several commands have with the same meaning."""

import argparse
from functools import partial
from pathlib import Path

from hostdev.core import cli
from hostdev.core.addresses import checkpoint_path, require_input
from hostdev.core.errors import UserError, in_words
from hostdev.ext.neighbours import METRICS
from hostdev.ext.predict import WHICH


def add_checkpoint(to: cli.Parser, missing: str) -> None:
    """Add --checkpoint and --which; `missing` is the message if the path {} does not exist."""
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


def add_rows(to: argparse.ArgumentParser, several: str, used: str = "") -> None:
    """Add --table, --column and --metric; `several` says what holds without the first two, `used` with what they do."""
    to.add_argument("--table", metavar="NAME", help=f"{used}the table of vectors ({several})")
    to.add_argument("--column", metavar="NAME", help=f"{used}the column of the data with the values ({several})")
    to.add_argument(
        "--metric",
        choices=METRICS,
        help=f"{used}what is near: a large cosine or dot product, or a small distance (default cosine)",
    )
