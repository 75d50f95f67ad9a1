"""The command line of `quickstart`."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hostdev.core import cli
from hostdev.core.addresses import local_path, require_input
from hostdev.core.errors import UserError
from hostdev.data import folder
from hostdev.data.preprocess.options import ConversionFlags
from hostdev.ext.training.config import CommandConfig

PROG = "hostdev.train.quickstart"
HELP = "preprocess Criteo text, or synthetic data, and train on it"
ROWS = 200_000
THRESHOLD = 10
EPOCHS = 2


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(
        prog,
        "Preprocess Criteo text (or synthetic data) and train on it with --host-device-mix. "
        "Accepts the options of hostdev.data.preprocess and hostdev.train.",
    )
    made.inputs["criteo"] = partial(require_input, said="--criteo {}: there is no such file")
    made.add_argument(
        "--criteo",
        type=cli.checked(local_path),
        metavar="FILE",
        help=f"Criteo text; without it, {ROWS:,} synthetic rows",
    )
    made.add_argument(
        "--datasets",
        type=cli.checked(local_path),
        default=Path("datasets"),
        metavar="DIR",
        help="folder of the data sets (default %(default)s)",
    )
    ConversionFlags.add_flags(made)
    CommandConfig.add_flags(made)
    made.inputs["data"] = folder.require_input
    for action in made._actions:
        if action.dest in ("data", "host_device_mix"):  # --data is rejected, and --host-device-mix is always on
            action.help = argparse.SUPPRESS
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line, preprocess the given file or synthetic data, and train."""
    arguments = parser(prog).parse_args(argv)
    if arguments.data is not None:
        instead = "leave out --data" if arguments.criteo is not None else "give --criteo FILE"
        raise UserError(
            f"--data has no effect in quickstart; {instead}, or use python -m hostdev.train --data {arguments.data}"
        )
    arguments.host_device_mix = True
    if arguments.epochs is None:
        arguments.epochs = EPOCHS
    CommandConfig.from_flags(arguments)  # check the options before the work begins
    options = ConversionFlags.from_flags(arguments).resolve(threshold=THRESHOLD, seed=arguments.seed)
    with cli.importing(prog):
        from hostdev.ext.training.command import quickstart
    quickstart(arguments, options, ROWS)
