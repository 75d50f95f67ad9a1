"""The command line of `checkpoint`."""

import argparse
from collections.abc import Sequence
from functools import partial

from hostdev.core import cli, registry
from hostdev.core.addresses import checkpoint_path, require_input, result_path
from hostdev.core.errors import UserError
from hostdev.ext.checkpoints.exporter import KIND, Exporter, export, require_effect

PROG = "hostdev.checkpoint"
HELP = "describe, check, compare, merge and export checkpoints"
DEFAULT = "parquet"  # format of an export


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the sub-commands and their flags."""
    made = cli.parser(prog, "Describe, check, compare, merge and export checkpoints.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, help: str) -> cli.Parser:
        one: cli.Parser = commands.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False
        )
        cli.add_debug(one)
        for given in ("path", "other"):
            one.inputs[given] = partial(require_input, said="{} does not exist")
        one.add_argument(
            "path",
            type=cli.checked(checkpoint_path),
            metavar="DIR",
            help="a checkpoint, a folder of checkpoints, or a run directory; commands on one checkpoint use the newest",
        )
        return one

    add("info", "describe checkpoints")
    add(
        "verify",
        "read every file of all checkpoints in DIR, compare checksums, and compute the newest state's digest",
    )
    of_diff = add("diff", "compare two checkpoints; exit code 1 if they differ")
    of_diff.add_argument("other", type=cli.checked(checkpoint_path), metavar="OTHER", help="the other checkpoint")
    of_compact = add("compact", "merge an incremental checkpoint and its parents into a full one")
    of_compact.add_argument(
        "--keep",
        type=int,
        metavar="K",
        help="then keep the K newest checkpoints and their parents, and remove all others",
    )
    of_merge = add("merge", "write a checkpoint of several processes as a checkpoint of one process")
    of_reshard = add("reshard", "write a checkpoint for a different number of processes")
    of_reshard.add_argument(
        "--ranks", type=int, required=True, metavar="N", help="number of processes that will load the new checkpoint"
    )
    for one in (of_merge, of_reshard):
        one.add_argument(
            "--out",
            type=cli.checked(result_path),
            required=True,
            metavar="DIR",
            help="a new folder, or one without checkpoints",
        )
    of_deliver = add(
        "deliver", "copy the newest checkpoint to the folder that a server follows, as far as it is not there"
    )
    of_deliver.add_argument(
        "target",
        type=cli.checked(checkpoint_path),
        metavar="TARGET",
        help="a folder of checkpoints, or a store's address",
    )
    of_deliver.add_argument(
        "--keep",
        type=int,
        default=2,
        metavar="K",
        help="keep the K newest checkpoints in TARGET and their parents, and remove others (default 2)",
    )
    _add_export(add("export", "write tables and dense layers as files for other programs"))
    return made


def _add_export(to: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    exporters = _find_exporters()
    to.add_argument("--out", type=cli.checked(result_path), required=True, metavar="DIR", help="a new folder")
    to.add_argument(
        "--format",
        choices=exporters,
        default=DEFAULT,
        help=f"format of the tables (default {DEFAULT}); faiss: indexes for nearest rows; onnx: the dense layers only",
    )
    for exporter in exporters.values():
        exporter.add_options(to)


def _find_exporters() -> dict[str, Exporter]:
    """Return a new exporter of each format that a package registers."""
    return {name: registry.find(KIND, name)() for name in registry.names(KIND)}


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Parse the command line and run the sub-command."""
    arguments = parser(prog).parse_args(argv)
    for name in ("keep", "ranks"):
        number = getattr(arguments, name, None)
        if number is not None and number < 1:
            raise UserError(f"--{name} must be at least 1, not {number}")
    arguments.prog = prog
    if arguments.command == "export":
        exporters = _find_exporters()
        require_effect(arguments.format, arguments, exporters)
        with cli.importing(prog):
            exporters[arguments.format].check(arguments)
        return export(exporters[arguments.format], arguments)
    with cli.importing(prog):
        from hostdev.ext.checkpoints.command import run
    return run(arguments)
