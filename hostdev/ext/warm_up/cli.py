"""The command line of `warm-up`."""

from collections.abc import Sequence

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.machine import available_cpus

PROG = "hostdev.warm_up"
HELP = "compile all kernels now, for example for a container image"


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(
        prog,
        "Compile all kernels for this machine's processor, so that no command has to wait for them. For container "
        "images and fresh installations.",
    )
    made.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes that compile at the same time (default: one per processor, at most 8)",
    )
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and compile the kernels."""
    arguments = parser(prog).parse_args(argv)
    processes = arguments.jobs if arguments.jobs is not None else min(8, available_cpus())
    if not 1 <= processes <= 256:
        raise UserError(f"--jobs must be in 1..256, not {processes}")
    with cli.importing(prog):
        from hostdev.ext.warm_up.kernels import run
    run(processes)
