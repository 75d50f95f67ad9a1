"""Options of the commands that predict: which checkpoint and model, and how raw rows are read."""

import argparse
from functools import partial
from pathlib import Path

from hostdev.core import cli
from hostdev.core.addresses import checkpoint_path, require_input
from hostdev.core.errors import UserError, in_words
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
