"""Options of what finds near rows: which rows, and what is near."""

import argparse

from hostdev.ext.neighbours import METRICS


def add_rows(to: argparse.ArgumentParser, several: str, used: str = "") -> None:
    """Add --table, --column and --metric; `several` says what holds without the first two, `used` with what they do."""
    to.add_argument("--table", metavar="NAME", help=f"{used}the table of vectors ({several})")
    to.add_argument("--column", metavar="NAME", help=f"{used}the column of the data with the values ({several})")
    to.add_argument(
        "--metric",
        choices=METRICS,
        help=f"{used}what is near: a large cosine or dot product, or a small distance (default cosine)",
    )
