"""The command line of `verify`."""

import argparse
import math
from collections.abc import Sequence

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.launched import alone
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


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Show on your data that training gives the same bits in every mode.")
    CommandConfig.add_flags(made, OPTIONS)
    made.inputs["data"] = folder.require_input
    made.add_argument("--steps", type=int, default=20, metavar="N", help="steps per mode (default 20)")
    made.add_argument(
        "--inject-fault",
        action="store_true",
        help="test verify itself: let lookups overtake the updates that they need, and check that verify detects this",
    )
    made.add_argument("--processes", metavar="W,...", help="also compare runs in 2,4,... local processes")
    made.add_argument(
        "--mesh",
        action="append",
        default=[],
        metavar="AXES",
        help="also compare a run whose processes divide the network, such as data=2,pipe=2; may be repeated; "
        "sliced layers (model=N) are compared within a tolerance",
    )
    made.add_argument("--plan", metavar="STRATEGIES", help="how --mesh model=N slices layers (default: in pairs)")
    made.add_argument("--schedule", choices=SCHEDULES, help="order of micro-batches in --mesh pipe=N (default 1f1b)")
    made.add_argument("--stage-cut", metavar="NAMES", help="where --mesh pipe=N cuts the network (default: by cost)")
    made.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="number of micro-batches, divided among the processes (default: the smallest that suits all meshes)",
    )
    return made


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Parse the command line, verify, and return the exit code: 1 if a mode differs."""
    arguments = parser(prog).parse_args(argv)
    alone()  # even if a launcher started several processes: verify itself starts the processes to compare
    on_host = arguments.tables == "dynamic" or arguments.table_dir is not None
    settings = CommandConfig.from_flags(arguments, OPTIONS, host_device_mix=on_host)
    if arguments.steps < 2:
        raise UserError(f"--steps must be at least 2, not {arguments.steps}")
    meshes, micro_batches = _meshes(arguments)
    layout = parse_layout(arguments.schedule, arguments.stage_cut, arguments.plan)
    settings.require_data()
    with cli.importing(prog):
        from hostdev.ext.verify.comparison import verify
    different = verify(
        settings,
        arguments.steps,
        fault=arguments.inject_fault,
        meshes=meshes,
        micro_batches=micro_batches,
        layout=layout,
    )
    if arguments.inject_fault:
        if not all(different):
            raise UserError("the injected fault was not caught: no consecutive batches share a row; use larger batches")
        print(
            "\nthe injected fault was caught in every group of tables: "
            f"{' and '.join(map(str, different))} modes differ"
        )
    elif any(different):
        print(f"\n{different[0]} modes differ from the serial run")
    else:
        near = "; with sliced layers, up to rounding" * any(mesh.model > 1 for mesh in meshes)
        print(f"\nall modes agree in every bit of every step{near}")
    return EXIT_DIFFERENT if any(different) else 0


def _meshes(arguments: argparse.Namespace) -> tuple[list[Mesh], int]:
    """Return the meshes of processes to compare, and the number of micro-batches, which is the same for all meshes."""
    for name, axis in (("plan", "model"), ("schedule", "pipe"), ("stage_cut", "pipe")):
        if getattr(arguments, name) is not None and all(
            getattr(parse_mesh(each), axis) == 1 for each in arguments.mesh
        ):
            raise UserError(
                f"--{name.replace('_', '-')} has no effect without --mesh {axis}=N; "
                f"leave out --{name.replace('_', '-')}"
            )
    if arguments.processes is None and not arguments.mesh:
        if arguments.micro_batches is not None:
            raise UserError("--micro-batches has no effect without --processes or --mesh; leave out --micro-batches")
        return [], 1
    if arguments.inject_fault:
        what = "--processes" if arguments.processes is not None else "--mesh"
        raise UserError(f"{what} cannot be used with --inject-fault; leave out one of the two")
    try:
        worlds = [int(each) for each in (arguments.processes or "").split(",") if each or arguments.processes]
    except ValueError:
        raise UserError(f"--processes must be numbers such as 2,4, not {arguments.processes!r}") from None
    if min(worlds, default=2) < 2:
        raise UserError(f"--processes must be numbers of at least 2, not {arguments.processes}")
    meshes = [*(Mesh(data=world) for world in worlds), *map(parse_mesh, arguments.mesh)]
    if any(mesh.size == 1 for mesh in meshes):
        raise UserError("--mesh must have 2 or more processes, such as pipe=2")
    each = math.lcm(*(mesh.data for mesh in meshes))
    least = each * -(-max(mesh.data * mesh.pipe for mesh in meshes) // each)
    M = arguments.micro_batches or least
    if M % each or least > M:
        given = [f"--processes {arguments.processes}"] if arguments.processes else []
        given += [f"--mesh {mesh}" for mesh in arguments.mesh]
        raise UserError(
            f"--micro-batches {M} does not suit {' '.join(given)}: it must be at least {least} and a multiple of {each}"
        )
    return meshes, M
