"""The command line of `train`."""

import argparse
import os
from collections.abc import Sequence

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.data import folder
from hostdev.distributed.rank_environment import is_first_on_host
from hostdev.train import config

PROG = "hostdev.train"
HELP = "train a model on a data set"


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Train Wide & Deep, or another model, on Arrow shards made by hostdev.data.preprocess.")
    config.add_flags(made)
    made.inputs["data"] = folder.require_input
    # torch.distributed.launch passes this flag, and sets LOCAL_RANK as well.
    made.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Parse the command line and train."""
    try:
        arguments = parser(prog).parse_args(argv)
        if arguments.local_rank is not None and os.environ.get("LOCAL_RANK") != str(arguments.local_rank):
            raise UserError(
                f"--local-rank {arguments.local_rank} is for launchers, which set LOCAL_RANK to this number; "
                "leave out --local-rank"
            )
        settings = config.from_flags(arguments)
        settings.require_data()
    except UserError:
        if not is_first_on_host():
            raise SystemExit(cli.EXIT_ERROR) from None
        raise
    with cli.importing(prog):
        from hostdev.train.command import train
        from hostdev.train.processes import spawn
    if settings.spawn is not None:
        return spawn(settings)
    train(settings)
    return 0
