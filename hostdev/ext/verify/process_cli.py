"""The command line of the processes that `verify` starts."""

from collections.abc import Sequence
from pathlib import Path

from hostdev.core import cli
from hostdev.ext.verify.cli import OPTIONS
from hostdev.train import config

PROG = "hostdev.ext.verify.processes"
_OPTIONS = (*OPTIONS, "host_device_mix")  # which `verify` sets itself


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and run one process."""
    steps, micro_batches, depth, cache, folder, mesh, layout = argv[:7]
    parser = cli.parser(prog, "Run one of the processes that hostdev.verify starts.")
    config.add_flags(parser, _OPTIONS)
    settings = config.from_flags(parser.parse_args(argv[7:]), _OPTIONS)
    with cli.importing(prog):
        from hostdev.ext.verify.modes import Mode
        from hostdev.ext.verify.processes import run_rank
    mode = Mode(True, int(depth), 1, cache or None)
    run_rank(settings, int(steps), int(micro_batches), mode, mesh, layout, Path(folder))
