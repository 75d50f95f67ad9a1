"""The command line of `report`, the option --report of training, and the packages that a report needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import ClassVar

from hostdev.core import cli
from hostdev.core.addresses import local_path, require_input
from hostdev.core.errors import UserError
from hostdev.core.options import OptionGroup, switch

_PACKAGES = {"jinja2": "Jinja2", "vl_convert": "vl-convert-python"}
PROG = "hostdev.report"
HELP = "write a page with the charts and tables of runs"


def require_extra(what: str) -> None:
    """Raise UserError if a package is missing; `what` is the command or option that needs it."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise UserError(f"{what} needs {package}, which is not installed; pip install 'hostdev[report]'")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OptionGroup):
    """The option that writes a page with charts and tables."""

    section: ClassVar[str] = "page"
    title: ClassVar[str] = "what the run writes"
    report: bool = switch(
        "at the end, write report.html in the run directory: charts and tables",
        check=lambda wanted: require_extra("--report"),
    )


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
