"""The command line of `verify`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.launched import alone
from hostdev.core.options import OptionGroup, When, choice, count, option, switch
from hostdev.data import folder
from hostdev.distributed.world import SCHEDULES, Mesh, parse_layout, parse_mesh
from hostdev.ext.training.config import CommandConfig

PROG = "hostdev.verify"
HELP = "show on your data that every mode gives the same bits"
EXIT_DIFFERENT = 1
OPTIONS = (
    *("data", "model", "table_optimizer", "table_lr", "table_weight_decay", "table_dtype", "table_slots", "lr"),
    *("device", "batch_size", "emb_dim", "l2", "tables", "capacity", "admit_count", "unknown_ids", "evict_unused"),
    *("table_dir", "table_memory", "table_window", "initial_vectors", "frozen_vectors", "precision", "tf32"),
    *("host_threads", "seed", "shuffle_window"),
)


_PROCESSES = {When("has_processes", shown="--processes or --mesh"): ""}
_STAGES = {When("has_stages", shown="--mesh pipe=N"): ""}


def parse_worlds(text: str) -> list[int]:
    """Return the numbers of processes of --processes; raise UserError if it is malformed."""
    try:
        worlds = [int(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"--processes must be numbers such as 2,4, not {text!r}") from None
    if min(worlds) < 2:
        raise UserError(f"--processes must be numbers of at least 2, not {text}")
    return worlds


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(OptionGroup):
    """What is compared."""

    section: ClassVar[str] = "verify"
    title: ClassVar[str] = "what is compared"
    steps: int = count("steps per mode", default=20, least=2)
    inject_fault: bool = switch(
        "test verify itself: let lookups overtake the updates that they need, and check that verify detects this",
        excludes=_PROCESSES,
    )
    processes: str | None = option(
        "also compare runs in 2,4,... local processes", str, metavar="W,...", check=parse_worlds
    )
    mesh: tuple[str, ...] = option("meshes of processes", default=(), is_flag=False)
    plan: str | None = option(
        "how --mesh model=N slices layers (default: in pairs)",
        str,
        metavar="STRATEGIES",
        needs={When("has_slices", shown="--mesh model=N"): ""},
    )
    schedule: str | None = choice("order of micro-batches in --mesh pipe=N (default 1f1b)", SCHEDULES, needs=_STAGES)
    stage_cut: str | None = option(
        "where --mesh pipe=N cuts the network (default: by cost)", str, metavar="NAMES", needs=_STAGES
    )
    micro_batches: int | None = count(
        "number of micro-batches, divided among the processes (default: the smallest that suits all meshes)",
        metavar="M",
        needs=_PROCESSES,
    )

    @property
    def meshes(self) -> list[Mesh]:
        """The meshes of processes to compare."""
        worlds = [] if self.processes is None else parse_worlds(self.processes)
        return [*(Mesh(data=world) for world in worlds), *map(parse_mesh, self.mesh)]

    @property
    def has_processes(self) -> bool:
        """Whether runs in several processes are compared."""
        return bool(self.meshes)

    @property
    def has_slices(self) -> bool:
        """Whether a mesh slices layers."""
        return any(mesh.model > 1 for mesh in self.meshes)

    @property
    def has_stages(self) -> bool:
        """Whether a mesh has stages."""
        return any(mesh.pipe > 1 for mesh in self.meshes)

    def find_micro_batches(self) -> int:
        """Return the number of micro-batches, which is the same for all meshes; raise UserError if it suits not all."""
        meshes = self.meshes
        if any(mesh.size == 1 for mesh in meshes):
            raise UserError("--mesh must have 2 or more processes, such as pipe=2")
        multiple = math.lcm(*(mesh.data for mesh in meshes))
        least = multiple * -(-max((mesh.data * mesh.pipe for mesh in meshes), default=1) // multiple)
        M = self.micro_batches or least
        if M % multiple or least > M:
            given = [f"--processes {self.processes}"] if self.processes else []
            given += [f"--mesh {mesh}" for mesh in self.mesh]
            raise UserError(
                f"--micro-batches {M} does not suit {' '.join(given)}: it must be at least {least} and a multiple of "
                f"{multiple}"
            )
        return M


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Show on your data that training gives the same bits in every mode.")
    CommandConfig.add_flags(made, OPTIONS)
    VerifyOptions.add_flags(made)
    made.inputs["data"] = folder.require_input
    made.add_argument(
        "--mesh",
        action="append",
        default=[],
        metavar="AXES",
        help="also compare a run whose processes divide the network, such as data=2,pipe=2; may be repeated; "
        "sliced layers (model=N) are compared within a tolerance",
    )
    return made


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Parse the command line, verify, and return the exit code: 1 if a mode differs."""
    arguments = parser(prog).parse_args(argv)
    alone()  # even if a launcher started several processes: verify itself starts the processes to compare
    on_host = arguments.tables == "dynamic" or arguments.table_dir is not None
    settings = CommandConfig.from_flags(arguments, OPTIONS, host_device_mix=on_host)
    asked = VerifyOptions.from_flags(arguments, mesh=tuple(arguments.mesh))
    meshes, micro_batches = asked.meshes, asked.find_micro_batches()
    layout = parse_layout(asked.schedule, asked.stage_cut, asked.plan)
    settings.require_data()
    with cli.importing(prog):
        from hostdev.ext.verify.comparison import verify
    different = verify(
        settings,
        asked.steps,
        fault=asked.inject_fault,
        meshes=meshes,
        micro_batches=micro_batches,
        layout=layout,
    )
    if asked.inject_fault:
        if not all(different):
            raise UserError("the injected fault was not caught: no consecutive batches share a row; use larger batches")
        print(
            "\nthe injected fault was caught in every group of tables: "
            f"{' and '.join(map(str, different))} modes differ"
        )
    elif any(different):
        print(f"\n{different[0]} modes differ from the serial run")
    else:
        near = "; with sliced layers, up to rounding" * asked.has_slices
        print(f"\nall modes agree in every bit of every step{near}")
    return EXIT_DIFFERENT if any(different) else 0
