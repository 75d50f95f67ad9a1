"""The command line of `report`."""

from collections.abc import Sequence
from functools import partial

from hostdev.core import cli
from hostdev.core.addresses import local_path, require_input
from hostdev.ext.report.extra import require_extra

PROG = "hostdev.report"
HELP = "write a page with the charts and tables of runs"


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Write a page with the charts and tables of one or more runs, which needs no network.")
    made.add_argument(
        "runs",
        nargs="+",
        type=cli.checked(local_path),
        metavar="RUN",
        help="a run directory, also of a run that has not ended; several are compared",
    )
    made.inputs["runs"] = partial(require_input, said="there is no run directory {}")
    made.add_argument(
        "--out",
        type=cli.checked(local_path),
        required=True,
        metavar="FILE",
        help="the page, such as report.html; an earlier report is replaced, another file never",
    )
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and write the page."""
    arguments = parser(prog).parse_args(argv)
    require_extra("report")
    with cli.importing(prog):
        from hostdev.ext.report.command import run
    run(arguments)
