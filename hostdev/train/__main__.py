"""python -m hostdev.train: train a model on shards, with the tables in host memory or on the device."""

if __name__ == "__main__":  # first of all, as the imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.train.__main__"))

import argparse
import os
from collections.abc import Sequence

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.train import config
from hostdev.train.command import train
from hostdev.train.processes import is_told_by_another, spawn

PROG = "hostdev.train"


def main(argv: Sequence[str]) -> int:
    """Parse the command line and train."""
    parser = cli.parser(PROG, "Train Wide & Deep, or another model, on Arrow shards made by hostdev.data.preprocess.")
    config.add_flags(parser)
    # torch.distributed.launch gives it, and sets LOCAL_RANK as well.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    try:
        arguments = parser.parse_args(argv)
        if arguments.local_rank is not None and os.environ.get("LOCAL_RANK") != str(arguments.local_rank):
            raise UserError(f"--local-rank {arguments.local_rank} is for launchers, which set LOCAL_RANK to the same")
        settings = config.from_flags(arguments)
    except UserError:
        if is_told_by_another():
            raise SystemExit(cli.EXIT_ERROR) from None
        raise
    if settings.spawn is not None:
        return spawn(settings)
    train(settings)
    return 0
