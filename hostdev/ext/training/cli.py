"""The command line of `train`."""

import argparse
import os
from collections.abc import Sequence

from hostdev.core import cli
from hostdev.core.addresses import local_path
from hostdev.core.errors import UserError
from hostdev.core.options import OptionError
from hostdev.data import folder
from hostdev.distributed.rank_environment import is_first_on_host
from hostdev.ext.training.config import CommandConfig
from hostdev.ext.training.option_files import OptionFile, read_options

PROG = "hostdev.train"
HELP = "train a model on a data set"
_RECORDS = ("versions", "preprocess", "data_set")  # entries of config.json that are not options


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Train Wide & Deep, or another model, on Arrow shards made by hostdev.data.preprocess.")
    CommandConfig.add_flags(made)
    _add_config(made)
    made.inputs["data"] = folder.require_input
    # torch.distributed.launch passes this flag, and sets LOCAL_RANK as well.
    made.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    return made


def _add_config(to: cli.Parser) -> None:
    to.add_argument(
        "--config",
        type=cli.checked(local_path),
        metavar="FILE",
        help="a TOML file of options, or the config.json of a run; its keys are the options' names, such as "
        "batch_size; flags take precedence",
    )


def _read_file(argv: Sequence[str]) -> OptionFile:
    """Return the options of the file that --config names; none without --config."""
    finder = cli.Parser(add_help=False, allow_abbrev=False)
    _add_config(finder)
    path = finder.parse_known_args(argv)[0].config
    return OptionFile() if path is None else read_options(path, CommandConfig, _RECORDS)


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Parse the command line and train."""
    try:
        made = parser(prog)
        file = _read_file(argv)
        made.set_defaults(**file.values)
        arguments = made.parse_args(argv)
        if arguments.local_rank is not None and os.environ.get("LOCAL_RANK") != str(arguments.local_rank):
            raise UserError(
                f"--local-rank {arguments.local_rank} is for launchers, which set LOCAL_RANK to this number; "
                "leave out --local-rank"
            )
        try:
            settings = CommandConfig.from_flags(arguments, more=file.values)
        except OptionError as error:
            raise file.explain(error, {**file.values, **vars(arguments)}) from None
        settings.require_data()
    except UserError:
        if not is_first_on_host():
            raise SystemExit(cli.EXIT_ERROR) from None
        raise
    with cli.importing(prog):
        from hostdev.ext.training.command import spawn, train
    if settings.spawn is not None:
        return spawn(settings)
    train(settings)
    return 0
