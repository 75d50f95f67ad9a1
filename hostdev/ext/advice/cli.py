"""The command line of `advise`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hostdev.cache.options import MOST_WINDOW, WINDOW
from hostdev.core import cli, pictures
from hostdev.core.addresses import local_path
from hostdev.core.disk_storage import MOST_DISK_WINDOW, Disk
from hostdev.core.errors import UserError
from hostdev.core.launched import alone
from hostdev.core.memory import parse_bytes
from hostdev.core.options import OptionGroup, count, flag_of, option
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


_OF_CACHES = {"disk": "it is for caches", "mesh": "it is for caches"}


@dataclass(frozen=True, kw_only=True)
class AdviceOptions(OptionGroup):
    """What to give advice about."""

    section: ClassVar[str] = "advice"
    title: ClassVar[str] = "advice"
    cache_window: int = option(
        "number of future batches that the lookahead policy knows",
        int,
        default=WINDOW,
        least=0,
        most=MOST_WINDOW,
        excludes={"disk": "it is for caches"},
    )
    memory: str | None = option(
        "device memory for the cache, such as 16GiB (default: the free memory minus what training needs)",
        str,
        metavar="SIZE",
        check=parse_bytes,
        excludes=_OF_CACHES,
    )
    out: Path | None = option(
        "a new file for the picture (default: advise.png, or a numbered name if that exists)",
        cli.checked(local_path),
        metavar="FILE",
        excludes=_OF_CACHES,
    )
    disk: Path | None = option(
        "instead of a cache, find how much memory tables on the disk of DIR need (--table-dir, --table-memory): "
        "measures the disk for two seconds, and simulates its reads",
        cli.checked(local_path),
        excludes={"mesh": "they are different questions"},
    )
    step_ms: float | None = option(
        "with --disk: the time of a step with all rows in memory (default: the host's work for its rows)",
        float,
        metavar="MS",
        above=0,
        unit="milliseconds",
        needs={"disk": ""},
    )
    table_window: int | None = option(
        f"with --disk: the number of batches that are read ahead (--table-window; default {Disk.window})",
        int,
        least=0,
        most=MOST_DISK_WINDOW,
        unit="batches",
        needs={"disk": ""},
    )
    mesh: int | None = count(
        "instead of a cache, find the fastest way to distribute the model over N local processes: by samples, by "
        "slices of layers, or by stages",
        least=2,
        unit="processes",
    )


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Recommend an embedding cache for your data by simulating all policies and sizes.")
    CommandConfig.add_flags(made, OPTIONS)
    AdviceOptions.add_flags(made)
    made.inputs["data"] = folder.require_input
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and print the advice."""
    arguments = parser(prog).parse_args(argv)
    asked = AdviceOptions.from_flags(arguments)
    if asked.mesh is not None:
        arguments.parallel = "auto"
        settings = CommandConfig.from_flags(arguments, [*OPTIONS, "parallel"])
        _require_defaults(settings, ("shuffle_window",), "with")
        settings.require_data()
        with cli.importing(prog):
            from hostdev.ext.advice.advise import advise_mesh
        advise_mesh(settings, asked.mesh)
        return
    settings = CommandConfig.from_flags(arguments, OPTIONS)
    alone()  # this command uses one process, even if a launcher started several
    _require_defaults(settings, MESH_OPTIONS, "without")
    settings.require_data()
    if asked.disk is not None:
        with cli.importing(prog):
            from hostdev.ext.advice.advise import advise_tables_on_disk
        step = None if asked.step_ms is None else asked.step_ms / 1e3
        window = Disk.window if asked.table_window is None else asked.table_window
        advise_tables_on_disk(settings, asked.disk, step, window)
        return
    memory = None if asked.memory is None else parse_bytes(asked.memory)
    with cli.importing(prog):
        from hostdev.ext.advice.advise import advise
    advise(settings, memory, asked.cache_window, asked.out or pictures.new_path("advise"))


def _require_defaults(settings: CommandConfig, names: Sequence[str], how: str) -> None:
    """Raise UserError for an option that is given, but has no effect with --mesh, or without it."""
    for name in filter(settings.has, names):
        raise UserError(f"{flag_of(name)} has no effect {how} --mesh; leave out {flag_of(name)}")
