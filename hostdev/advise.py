"""python -m hostdev.advise: how large a cache is worth it on the user's own data, by simulating every policy."""

if __name__ == "__main__":  # first of all, as the imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.advise"))

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from hostdev.cache.options import MOST_WINDOW, POLICIES, WINDOW, rows_of
from hostdev.cache.planner import Statistics, planner_bytes
from hostdev.cache.prices import Costs
from hostdev.cache.simulation import OPTIMUM, Simulation, add_up
from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, dense_bytes, gib, parse_bytes, row_bytes
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.progress import bar
from hostdev.data import lookalike, manifest
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.kernels.pool import set_host_threads
from hostdev.models.model import Model
from hostdev.parallel.place import find
from hostdev.runtime.spec import TableSpec
from hostdev.train import config
from hostdev.train.build import counts_of, groups_of, ids_of, model_of
from hostdev.train.config import TrainConfig

PROG = "hostdev.advise"
MESH_OPTIONS = ("micro_batches", "plan", "stage_cut", "schedule", "precision")
OPTIONS = ("data", "model", "table_optimizer", "device", "batch_size", "emb_dim", "host_threads", "seed", *MESH_OPTIONS)
SHARES = ("0.1%", "0.5%", "1%", "2%", "5%", "10%", "20%", "50%", "100%")
_WORTH = 1.05  # more bytes than this factor of the fewest are not taken for a smaller cache


@dataclass(frozen=True)
class Group:
    """Tables that share ids."""

    names: tuple[str, ...]
    rows: int
    tables: tuple[tuple[int, SparseOptimizer], ...]  # columns and optimizer of each

    @classmethod
    def of(cls, model: Model, names: Sequence[str]) -> "Group":
        """Those of a model."""
        specs = [model.tables[name] for name in names]
        return cls(tuple(names), specs[0].rows, tuple((spec.dim, spec.optimizer) for spec in specs))

    @property
    def passing(self) -> int:
        """Bytes of a row that passes by, each way."""
        return row_bytes(self.tables)[0]

    @property
    def whole(self) -> int:
        """Bytes of a row with its slots."""
        return row_bytes(self.tables)[1]


@dataclass
class Point:
    """Caches of one policy and one size, one for each group, over the second half of the batches."""

    sizes: list[int]
    parts: list[Statistics]
    groups: list[Group]

    @property
    def rows(self) -> int:
        """Of all caches."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(size * group.whole for size, group in zip(self.sizes, self.groups, strict=True))

    @property
    def moved(self) -> float:
        """Bytes that go to the device and back in a step."""
        pairs = zip(self.parts, self.groups, strict=True)
        return sum(sum(part.bytes_moved(group.passing, group.whole)) / max(1, part.batches) for part, group in pairs)

    @property
    def without(self) -> float:
        """What would, without caches."""
        pairs = zip(self.parts, self.groups, strict=True)
        return sum(2 * group.passing * part.unique / max(1, part.batches) for part, group in pairs)

    @property
    def unique(self) -> float:
        """Unique rows of a step."""
        return sum(part.unique / max(1, part.batches) for part in self.parts)

    @property
    def total(self) -> Statistics:
        """The sums over the groups."""
        return add_up(self.parts)


Curves = dict[str, list[Point]]  # by policy; a point for each size


def recommend(curves: Curves, memory: int) -> tuple[str, Point] | None:
    """Return the policy and the smallest size that moves about as few bytes as any that fits; None if none moves fewer
    than no cache does.
    """
    options = [
        (point.moved, point.rows, policy, point)
        for policy, points in curves.items()
        if policy != OPTIMUM
        for point in points
        if point.nbytes <= memory
    ]
    if not options:
        return None
    fewest = min(option[0] for option in options)
    worth = [option for option in options if option[0] <= fewest * _WORTH]
    moved, _, policy, point = min(worth, key=lambda option: (option[1], option[0]))
    return (policy, point) if moved < point.without else None


def table_lines(curves: Curves, memory: int, chosen: tuple[str, Point] | None) -> list[str]:
    """Return the table: a line per size."""
    names = [*curves]
    lines = [
        f"{'':<26}{'hit rate by uses, second half of the pass':^{10 * len(names)}}{'MiB a step, both ways':>24}",
        f"{'rows':>12}{'device':>14}" + "".join(f"{name:>10}" for name in names) + f"{'lookahead':>13}{'static':>11}",
    ]
    static = curves.get("static")
    for i, point in enumerate(curves["lookahead"]):
        rates = "".join(f"{points[i].total.hit_rate:>10.2%}" for points in curves.values())
        moved = f"{point.moved / 2**20:>13.2f}"
        moved += f"{static[i].moved / 2**20:>11.2f}" if static is not None else f"{'-':>11}"
        note = "  <- recommended" if chosen is not None and point.sizes == chosen[1].sizes else ""
        note = note if point.nbytes <= memory else "  does not fit"
        lines.append(f"{point.rows:>12,}{gib(point.nbytes):>14}{rates}{moved}{note}")
    return lines


def draw(curves: Curves, memory: int, chosen: tuple[str, Point] | None, path: Path) -> None:
    """Draw the miss-ratio curves and the bytes of a step; UserError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.4), layout="constrained")
    FigureCanvasAgg(figure)  # and no pyplot, which is the user's
    left, right = figure.subplots(1, 2)
    for policy, points in curves.items():
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {"marker": "o"}
        name = "offline optimum" if policy == OPTIMUM else policy
        sizes = [point.rows for point in points]
        left.plot(sizes, [1 - point.total.hit_rate for point in points], label=name, markersize=4, **style)
        if policy != OPTIMUM:
            right.plot(sizes, [point.moved / 2**20 for point in points], markersize=4, **style)
    _percent_axis(left, [1 - point.total.hit_rate for points in curves.values() for point in points])
    left.set(ylabel="misses, share of uses", title="Miss-ratio curve")
    without = curves["lookahead"][0].without / 2**20
    right.axhline(without, color="grey", linestyle=":", label=f"no cache: {without:.2f} MiB a step")
    right.set(ylabel="MiB a step, both ways", title="Rows to the device and back")
    right.set_ylim(bottom=0)
    largest = curves["lookahead"][-1]
    for axes in (left, right):
        axes.set(xlabel="cached rows, of all tables", xscale="log")
        named = axes is right
        if memory < largest.nbytes:
            name = f"{gib(memory)} of device memory" if named else ""
            axes.axvline(memory / largest.nbytes * largest.rows, color="black", linestyle="-.", linewidth=1, label=name)
        if chosen is not None:
            name = f"recommended: {chosen[1].rows:,} rows, {chosen[0]}" if named else ""
            axes.axvline(chosen[1].rows, color="C4", linewidth=1.5, label=name)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)  # over no line
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise _not_writable(path, error) from None


def _percent_axis(axes: Any, shares: Sequence[float]) -> None:
    """Scale an axis of shares: logarithmic with a label at 1, 2 and 5 of each power of ten, which never touch, or from
    0 on where they are all about the same, or none.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    decimals = None
    if min(shares) > 0 and max(shares) > 3 * min(shares):
        decimals = max(0, -math.floor(math.log10(100 * min(shares))))  # as the least needs
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=decimals))


def _not_writable(path: Path, error: OSError) -> UserError:
    return UserError(f"--out {path}: {error.strerror}; choose a file that can be written")


def simulate(
    settings: TrainConfig, model: Model, found: manifest.Manifest, reader: ShardReader, size: int, window: int
) -> Curves:
    """Run caches of every policy and size over one pass of the training rows."""
    groups = [Group.of(model, names) for names in groups_of(model)]
    steps = reader.steps(size)
    different = dict.fromkeys(tuple(max(1, rows_of(share, group.rows)) for group in groups) for share in SHARES)
    sizes = list(zip(*different, strict=True))  # of each group
    needed = sum(
        len(POLICIES) * planner_bytes(group.rows, capacity)
        for group, mine in zip(groups, sizes, strict=True)
        for capacity in mine
    )
    if needed > available_bytes():
        raise UserError(f"the simulation needs {gib(needed)}, but {gib(available_bytes())} of host memory are free")
    counts = counts_of(model, settings.data or lookalike.ensure()[0], found, reader)
    simulations = [
        Simulation(group.rows, mine, steps, each, window, Costs.of_bytes(group.passing, group.whole))
        for group, mine, each in zip(groups, sizes, counts, strict=True)
    ]  # fmt: skip
    with bar(steps, "simulating", "step") as progress:
        for batch in reader.batches(size, seed=settings.seed, epoch=1):
            for group, simulation in zip(groups, simulations, strict=True):
                simulation.add(ids_of(model, batch, group.names[0]))
            progress.update()
    ended = [simulation.end() for simulation in simulations]
    return {
        policy: [
            Point([mine[i] for mine in sizes], [one[policy][i] for one in ended], groups) for i in range(len(different))
        ]
        for policy in ended[0]
        if all(policy in one for one in ended)
    }


def advise(settings: TrainConfig, memory: int | None, window: int, out: Path) -> tuple[str, Point] | None:
    """Simulate one pass over the training rows, print and draw what caches would do; return policy and sizes."""
    if out.exists():
        raise UserError(f"--out {out} exists; choose another file")
    if out.suffix.lower() not in (".png", ".pdf", ".svg") or not out.parent.is_dir():
        raise UserError(f"--out {out} must be a .png, .pdf or .svg file in a folder that exists")
    try:
        out.open("x").close()  # before the work
    except OSError as error:
        raise _not_writable(out, error) from None
    out.unlink()
    data = settings.data or lookalike.ensure()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train")
    size = settings.batch_size or min(config.REFERENCE_BATCH_SIZE, max(1, reader.rows // 20))
    reader.require(size)
    if settings.host_threads is not None:
        set_host_threads(settings.host_threads)
    device = backend.select(settings.device)
    model = model_of(settings, found.schema)
    curves = simulate(settings, model, found, reader, size, window)
    first, whole = curves["lookahead"][0], curves["lookahead"][-1]
    beside = int(first.without)
    if on_accelerator := backend.is_accelerator(device):
        inputs = int(first.total.uses / max(1, first.total.batches) / size * max(group_dim(g) for g in first.groups))
        beside += dense_bytes(size, inputs, hidden_layers(model))
    if memory is None:
        room = backend.room_for_cache(device, beside)
        memory = available_bytes() if room is None else room
    chosen = recommend(curves, memory)
    fits = "" if whole.nbytes <= available_bytes() else f", but only {gib(available_bytes())} are free"
    print(f"data     {data}: {reader.rows:,} training rows in {reader.steps(size):,} batches of {size:,}, "
          f"{found.schema.rows:,} ids")  # fmt: skip
    print(f"tables   {tables_line(model.tables)}")
    print(f"host     {gib(whole.nbytes)} with slots{fits}")
    print(f"device   {gib(memory)} for the cache on {backend.describe(device)}; beside it "
          f"{'the dense layers, their activations and ' * on_accelerator}the rows of the batches on their way, about "
          f"{gib(beside)}")  # fmt: skip
    print(f"step     {first.unique:,.0f} unique rows; without a cache {first.without / 2**20:.2f} MiB a step, both "
          "ways\n")  # fmt: skip
    print("\n".join(table_lines(curves, memory, chosen)))
    draw(curves, memory, chosen, out)
    print(f"\npicture  {out}")
    print(_advice(chosen, len(whole.groups)))
    if not on_accelerator:
        print("on this CPU there is nothing to win: the device's memory is the host's, and a cache costs its plan; the "
              "figures are those of an accelerator")  # fmt: skip
    return chosen


def advise_mesh(settings: TrainConfig, arguments: argparse.Namespace) -> None:
    """Start the processes, or be one of them, and print which layouts of the model take how long."""
    from hostdev.train.layouts import advise_alone, advise_together

    for name, given in (("--memory", arguments.memory), ("--out", arguments.out)):
        if given is not None:
            raise UserError(f"{name} is about caches, and has no effect with --mesh; leave it out")
    if arguments.mesh < 2:
        raise UserError(f"--mesh is a number of processes of 2 or more, not {arguments.mesh}")
    settings = replace(settings, data=settings.data or lookalike.ensure()[0])
    if find().alone:
        raise SystemExit(advise_alone(settings, arguments.mesh))
    advise_together(settings)


def group_dim(group: Group) -> int:
    """Return the columns of a group's widest table."""
    return max(dim for dim, _ in group.tables)


def hidden_layers(model: Model) -> list[int]:
    """Return the widths of a model's linear layers, but for those of a logit."""
    widths = [int(module.weight.shape[0]) for module in model.modules() if isinstance(module, nn.Linear)]
    return [width for width in widths if width > 1]


def tables_line(tables: Mapping[str, TableSpec]) -> str:
    """Return names, shapes and optimizers."""
    return ", ".join(
        f"{name} {spec.rows:,} x {spec.dim} ({type(spec.optimizer).__name__})" for name, spec in sorted(tables.items())
    )


def _advice(chosen: tuple[str, Point] | None, groups: int) -> str:
    if chosen is None:
        return "advice   no cache: none of those that fit moves fewer bytes"
    policy, point = chosen
    rows = str(point.rows) if groups == 1 else f"{point.rows / sum(group.rows for group in point.groups):.2%}"
    flags = f"--cache-rows {rows}" + ("" if policy == "lookahead" else f" --cache-policy {policy}")
    return (
        f"advice   {flags}: {point.total.hit_rate:.1%} of uses and {point.total.unique_hit_rate:.1%} of rows hit, "
        f"{point.moved / 2**20:.2f} MiB a step, {gib(point.nbytes)} of device memory"
    )


def main(argv: Sequence[str]) -> None:
    """Parse the command line and advise."""
    parser = cli.parser(PROG, "Find out on your own data how large an embedding cache is worth it.")
    config.add_flags(parser, OPTIONS)
    parser.add_argument("--cache-window", type=int, default=WINDOW, metavar="N", help=
        f"batches that lookahead knows in advance (default {WINDOW})")  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE", help=
        "device memory for the cache, such as 16GiB (what is free and the training leaves)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help=
        "a new file for the picture (advise.png, or with a number where that is taken)")  # fmt: skip
    parser.add_argument("--mesh", type=int, metavar="N", help=
        "find out instead how N processes of this host share out the model in the least time: by samples, slices of "
        "layers, stages")  # fmt: skip
    run(parser.parse_args(argv))


def _new_picture() -> Path:
    """Return advise.png, or advise-2.png, ... where an earlier one is kept."""
    names = (f"advise{'' if number == 1 else f'-{number}'}.png" for number in itertools.count(1))
    return next(path for path in map(Path, names) if not path.exists())


def run(arguments: argparse.Namespace) -> None:
    """Advise as the parsed flags say."""
    if arguments.mesh is not None:
        arguments.parallel = "auto"
        advise_mesh(config.from_flags(arguments, [*OPTIONS, "parallel"]), arguments)
        return
    settings = config.from_flags(arguments, OPTIONS)
    for name in MESH_OPTIONS:
        if getattr(settings, name) != getattr(TrainConfig, name):
            raise UserError(f"--{name.replace('_', '-')} has no effect without --mesh; leave it out")
    if not 0 <= arguments.cache_window <= MOST_WINDOW:
        raise UserError(f"--cache-window must be in 0..{MOST_WINDOW}, not {arguments.cache_window}")
    memory = parse_bytes(arguments.memory) if arguments.memory is not None else None
    advise(settings, memory, arguments.cache_window, arguments.out or _new_picture())
