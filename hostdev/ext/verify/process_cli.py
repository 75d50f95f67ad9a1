"""The command line of the processes that `verify` starts."""

if __name__ == "__main__":
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.verify.process_cli", "hostdev.verify"))

from collections.abc import Sequence
from pathlib import Path

from hostdev.core import cli
from hostdev.ext.training.config import CommandConfig
from hostdev.ext.verify.cli import OPTIONS

PROG = "hostdev.ext.verify.process_cli"
_OPTIONS = (*OPTIONS, "host_device_mix")  # `verify` sets host_device_mix itself


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and run one process."""
    steps, micro_batches, depth, cache, folder, mesh, layout = argv[:7]
    parser = cli.parser(prog, "Run one of the processes that hostdev.verify starts.")
    CommandConfig.add_flags(parser, _OPTIONS)
    settings = CommandConfig.from_flags(parser.parse_args(argv[7:]), _OPTIONS)
    with cli.importing(prog):
        from hostdev.ext.verify.comparison import run_rank
        from hostdev.ext.verify.modes import Mode
    mode = Mode(True, int(depth), 1, cache or None)
    run_rank(settings, int(steps), int(micro_batches), mode, mesh, layout, Path(folder))
