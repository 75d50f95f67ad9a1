"""The command line of `checkpoint`."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

from hostdev.commands import options
from hostdev.core import cli
from hostdev.core.addresses import checkpoint_path, require_input, result_path
from hostdev.core.errors import UserError
from hostdev.ext.neighbours import INDEXES, METRICS

PROG = "hostdev.checkpoint"
FORMATS = ("parquet", "npy", "safetensors", "faiss", "onnx")
DTYPES = ("float32", "bfloat16")


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
    to.add_argument("--out", type=cli.checked(result_path), required=True, metavar="DIR", help="a new folder")
    to.add_argument(
        "--format",
        choices=FORMATS,
        default="parquet",
        help="format of the tables (default parquet); faiss: indexes for nearest rows; onnx: the dense layers only",
    )
    to.add_argument("--slots", action="store_true", help="also write optimizer state, steps, settings, and `extra`")
    to.add_argument("--dtype", choices=DTYPES, help="type of the tables' values (default float32)")
    options.add_rows(to, "default: all", "with faiss: ")
    to.add_argument(
        "--index", choices=INDEXES, help="with faiss: an exact or an approximate, faster search (default flat)"
    )
    options.add_model(to)


_EFFECTS = {  # the formats with which an option has an effect
    "slots": ("parquet", "npy", "safetensors"),
    "dtype": ("parquet", "npy", "safetensors"),
    "table": ("faiss",),
    "column": ("faiss",),
    "metric": ("faiss",),
    "index": ("faiss",),
    "model": ("onnx",),
}


def _check_export(arguments: argparse.Namespace) -> None:
    """Set the defaults of options of `export`; raise UserError for an option without effect in the format."""
    for name, formats in _EFFECTS.items():
        if getattr(arguments, name) and arguments.format not in formats:
            raise UserError(
                f"--{name} has no effect with --format {arguments.format}, only with {', '.join(formats)}; "
                f"leave out --{name}"
            )
    arguments.dtype = arguments.dtype or DTYPES[0]
    arguments.metric, arguments.index = arguments.metric or METRICS[0], arguments.index or INDEXES[0]


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Parse the command line and run the sub-command."""
    arguments = parser(prog).parse_args(argv)
    for name in ("keep", "ranks"):
        number = getattr(arguments, name, None)
        if number is not None and number < 1:
            raise UserError(f"--{name} must be at least 1, not {number}")
    if arguments.command == "export":
        _check_export(arguments)
    arguments.prog = prog
    run = _import_run(arguments, prog)
    return run(arguments)


def _import_run(arguments: argparse.Namespace, prog: str) -> Callable[[argparse.Namespace], int]:
    """Return the function that runs a command."""
    form = arguments.format if arguments.command == "export" else ""
    with cli.importing(prog):
        if form == "faiss":
            from hostdev.ext.neighbours.faiss_export import run
        elif form == "onnx":
            from hostdev.ext.predict.onnx_export import run
        else:
            from hostdev.checkpoint.command import run
    return run
