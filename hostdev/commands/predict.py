"""The command line of `predict`."""

from collections.abc import Sequence
from pathlib import Path

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.predict import WHICH

PROG = "hostdev.predict"


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Write the probability of a positive label for each row of a file or a data set.")
    made.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint, or a folder of them")
    made.add_argument("--which", choices=WHICH, help="which checkpoint (default: best with --early-stop, else newest)")
    made.add_argument("--model", metavar="package.module:Class", help="the class, if the model is your own")
    made.add_argument("--data", type=Path, required=True, metavar="FILE|DIR", help="raw rows, or a data set")
    made.add_argument("--split", choices=("train", "test"), help="rows of a data set (default test)")
    made.add_argument("--out", type=Path, required=True, metavar="FILE", help="a new Parquet file, NAME.parquet")
    made.add_argument("--device", default="cpu", metavar="NAME", help="where the dense layers run (default cpu)")
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and predict."""
    arguments = parser(prog).parse_args(argv)
    out: Path = arguments.out
    if out.exists():
        raise UserError(f"--out {out} exists; choose another file")
    if out.suffix.lower() != ".parquet":
        raise UserError(f"--out {out}: predictions are written as Parquet; call the file {out.stem or 'p'}.parquet")
    if not arguments.data.exists():
        raise UserError(f"--data {arguments.data}: there is no such file or data set")
    with cli.importing(prog):
        from hostdev.predict.command import run
    run(arguments, prog)
