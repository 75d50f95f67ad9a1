"""The command line of `neighbours`, and the options that it shares with the export for FAISS."""

import argparse
from collections.abc import Sequence

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.ext.neighbours import METRICS
from hostdev.ext.predict.cli import add_checkpoint

PROG = "hostdev.neighbours"
HELP = "print the nearest rows of an embedding table"
_KEYS = -(1 << 63), (1 << 63) - 1


def add_rows(to: argparse.ArgumentParser, several: str, used: str = "") -> None:
    """Add --table, --column and --metric; in help texts, `several` is the default of the first two, `used` a prefix."""
    to.add_argument("--table", metavar="NAME", help=f"{used}the table of vectors ({several})")
    to.add_argument("--column", metavar="NAME", help=f"{used}the column of the data with the values ({several})")
    to.add_argument(
        "--metric",
        choices=METRICS,
        help=f"{used}what is near: a large cosine or dot product, or a small distance (default cosine)",
    )


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Print the rows of an embedding table that are nearest to one of them.")
    add_checkpoint(made, "--checkpoint {} does not exist")
    add_rows(made, "needed if there are several")
    row = made.add_mutually_exclusive_group(required=True)
    row.add_argument(
        "--of",
        metavar="VALUE",
        help="the value, as in the data; a row number or a key if Runtime.save wrote the checkpoint",
    )
    row.add_argument("--of-id", type=int, metavar="N", help="the id of the row, or the key in a table by key")
    made.add_argument("--k", type=int, default=10, metavar="K", help="how many rows to print (default 10)")
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and print the nearest rows."""
    arguments = parser(prog).parse_args(argv)
    arguments.metric = arguments.metric or METRICS[0]
    if arguments.k < 1:
        raise UserError(f"--k must be at least 1, not {arguments.k}")
    if arguments.of_id is not None and not _KEYS[0] <= arguments.of_id <= _KEYS[1]:
        raise UserError(f"--of-id {arguments.of_id} is not an integer of 64 bits; give one of {_KEYS[0]}..{_KEYS[1]}")
    with cli.importing(prog):
        from hostdev.ext.neighbours.command import run
    run(arguments, prog)
