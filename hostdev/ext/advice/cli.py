"""The command line of `advise`."""

import argparse
import math
from collections.abc import Sequence

from hostdev.cache.options import MOST_WINDOW, WINDOW
from hostdev.core import cli, pictures
from hostdev.core.addresses import local_path
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.launched import alone
from hostdev.core.memory import parse_bytes
from hostdev.data import folder
from hostdev.train import config
from hostdev.train.config import TrainConfig
from hostdev.train.config_checks import require_table_window

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
    config.add_flags(made, OPTIONS)
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
        settings = _for_mesh(config.from_flags(arguments, [*OPTIONS, "parallel"]), arguments)
        with cli.importing(prog):
            from hostdev.ext.advice.advise import advise_mesh
        advise_mesh(settings, arguments.mesh)
        return
    settings = config.from_flags(arguments, OPTIONS)
    alone()  # this command uses one process, even if a launcher started several
    for name in MESH_OPTIONS:
        if getattr(settings, name) != getattr(TrainConfig, name):
            raise UserError(
                f"--{name.replace('_', '-')} has no effect without --mesh; leave out --{name.replace('_', '-')}"
            )
    if not 0 <= arguments.cache_window <= MOST_WINDOW:
        raise UserError(f"--cache-window must be in 0..{MOST_WINDOW}, not {arguments.cache_window}")
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


def _check_disk(arguments: argparse.Namespace) -> None:
    """Raise UserError if options contradict --disk, or need it."""
    if arguments.disk is None:
        for name, given in (("--step-ms", arguments.step_ms), ("--table-window", arguments.table_window)):
            if given is not None:
                raise UserError(f"{name} has no effect without --disk; leave out {name}")
        return
    if arguments.table_window is not None:
        require_table_window(arguments.table_window)
    if arguments.mesh is not None:
        raise UserError("--disk and --mesh are different questions; give one of them")
    for name, given in (("--memory", arguments.memory is not None), ("--out", arguments.out is not None)):
        if given:
            raise UserError(f"{name} is for caches and has no effect with --disk; leave out {name}")
    if arguments.cache_window != WINDOW:
        raise UserError("--cache-window is for caches and has no effect with --disk; leave out --cache-window")
    if arguments.step_ms is not None and not 0 < arguments.step_ms < math.inf:
        raise UserError(f"--step-ms must be a positive number of milliseconds, not {arguments.step_ms}")


def _for_mesh(settings: TrainConfig, arguments: argparse.Namespace) -> TrainConfig:
    """Return the settings; raise UserError if an option has no effect with --mesh, or --mesh is less than 2."""
    for name, given in (("--memory", arguments.memory), ("--out", arguments.out)):
        if given is not None:
            raise UserError(f"{name} is for caches and has no effect with --mesh; leave out {name}")
    if settings.shuffle_window != TrainConfig.shuffle_window:
        raise UserError("--shuffle-window has no effect with --mesh; leave out --shuffle-window")
    if arguments.mesh < 2:
        raise UserError(f"--mesh must be a number of processes, 2 or more, not {arguments.mesh}")
    settings.require_data()
    return settings
