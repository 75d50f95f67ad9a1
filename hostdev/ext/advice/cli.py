"""The command line of `advise`."""

import argparse
import math
from collections.abc import Sequence

from hostdev.cache.options import WINDOW
from hostdev.core import cli, pictures
from hostdev.core.addresses import local_path
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.launched import alone
from hostdev.core.memory import parse_bytes
from hostdev.core.options import flag_of
from hostdev.data import folder
from hostdev.ext.training.config import CommandConfig

PROG = "hostdev.advise"
HELP = "recommend an embedding cache for your data"
MESH_OPTIONS = ("micro_batches", "plan", "stage_cut", "schedule", "precision")
OPTIONS = (
    "data",
    "model",
    "table_optimizer",
    "table_dtype",
    "table_slots",
    "device",
    "batch_size",
    "emb_dim",
    "host_threads",
    "seed",
    "shuffle_window",
    *MESH_OPTIONS,
)


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Recommend an embedding cache for your data by simulating all policies and sizes.")
    CommandConfig.add_flags(made, OPTIONS)
    made.inputs["data"] = folder.require_input
    made.add_argument(
        "--cache-window",
        type=int,
        default=WINDOW,
        metavar="N",
        help=f"number of future batches that the lookahead policy knows (default {WINDOW})",
    )
    made.add_argument(
        "--memory",
        metavar="SIZE",
        help="device memory for the cache, such as 16GiB (default: the free memory minus what training needs)",
    )
    made.add_argument(
        "--out",
        type=cli.checked(local_path),
        metavar="FILE",
        help="a new file for the picture (default: advise.png, or a numbered name if that exists)",
    )
    made.add_argument(
        "--disk",
        type=cli.checked(local_path),
        metavar="DIR",
        help="instead of a cache, find how much memory tables on the disk of DIR need (--table-dir, --table-memory): "
        "measures the disk for two seconds, and simulates its reads",
    )
    made.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="with --disk: the time of a step with all rows in memory (default: the host's work for its rows)",
    )
    made.add_argument(
        "--table-window",
        type=int,
        metavar="N",
        help=f"with --disk: the number of batches that are read ahead (--table-window; default {Disk.window})",
    )
    made.add_argument(
        "--mesh",
        type=int,
        metavar="N",
        help="instead of a cache, find the fastest way to distribute the model over N local processes: by samples, "
        "by slices of layers, or by stages",
    )
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and print the advice."""
    arguments = parser(prog).parse_args(argv)
    _check_disk(arguments)
    if arguments.mesh is not None:
        arguments.parallel = "auto"
        settings = _for_mesh(CommandConfig.from_flags(arguments, [*OPTIONS, "parallel"]), arguments)
        with cli.importing(prog):
            from hostdev.ext.advice.advise import advise_mesh
        advise_mesh(settings, arguments.mesh)
        return
    settings = CommandConfig.from_flags(arguments, OPTIONS)
    alone()  # this command uses one process, even if a launcher started several
    changed = {name: getattr(settings, name) != getattr(CommandConfig, name) for name in MESH_OPTIONS}
    _refuse("has no effect without --mesh", **changed)
    CommandConfig.options()["cache_window"].require("cache_window", arguments.cache_window)
    memory = parse_bytes(arguments.memory) if arguments.memory is not None else None
    settings.require_data()
    if arguments.disk is not None:
        with cli.importing(prog):
            from hostdev.ext.advice.advise import advise_tables_on_disk
        step = None if arguments.step_ms is None else arguments.step_ms / 1e3
        window = Disk.window if arguments.table_window is None else arguments.table_window
        advise_tables_on_disk(settings, arguments.disk, step, window)
        return
    with cli.importing(prog):
        from hostdev.ext.advice.advise import advise
    advise(settings, memory, arguments.cache_window, arguments.out or pictures.new_path("advise"))


def _refuse(why: str, **given: bool) -> None:
    """Raise UserError for an option that is given but has no effect."""
    for name in (name for name, is_given in given.items() if is_given):
        raise UserError(f"{flag_of(name)} {why}; leave out {flag_of(name)}")


def _check_disk(arguments: argparse.Namespace) -> None:
    """Raise UserError if options contradict --disk, or need it."""
    step, window = arguments.step_ms, arguments.table_window
    if arguments.disk is None:
        _refuse("has no effect without --disk", step_ms=step is not None, table_window=window is not None)
        return
    if window is not None:
        CommandConfig.options()["table_window"].require("table_window", window)
    if arguments.mesh is not None:
        raise UserError("--disk and --mesh are different questions; give one of them")
    for_caches = {"memory": arguments.memory is not None, "out": arguments.out is not None}
    _refuse("is for caches and has no effect with --disk", **for_caches, cache_window=arguments.cache_window != WINDOW)
    if step is not None and not 0 < step < math.inf:
        raise UserError(f"--step-ms must be a positive number of milliseconds, not {step}")


def _for_mesh(settings: CommandConfig, arguments: argparse.Namespace) -> CommandConfig:
    """Return the settings; raise UserError if an option has no effect with --mesh, or --mesh is less than 2."""
    for_caches = {"memory": arguments.memory is not None, "out": arguments.out is not None}
    _refuse("is for caches and has no effect with --mesh", **for_caches)
    _refuse("has no effect with --mesh", shuffle_window=settings.shuffle_window != CommandConfig.shuffle_window)
    if arguments.mesh < 2:
        raise UserError(f"--mesh must be a number of processes, 2 or more, not {arguments.mesh}")
    settings.require_data()
    return settings
