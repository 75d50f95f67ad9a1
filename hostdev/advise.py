"""python -m hostdev.advise: how large a cache is worth it on the user's own data, by simulating every policy."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.cache.optimum import optimal
from hostdev.cache.options import MOST_WINDOW, POLICIES, WINDOW, rows_of
from hostdev.cache.planner import Planner, Statistics, planner_bytes
from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, dense_bytes, gib, parse_bytes, row_bytes
from hostdev.core.progress import bar
from hostdev.data import lookalike, manifest
from hostdev.data.batch import FIELDS, wide_batches
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import count_uses, unique
from hostdev.models.wide_deep.network import LAYERS
from hostdev.train import config
from hostdev.train.config import TrainConfig
from hostdev.train.trainer import tables_of

PROG = "hostdev.advise"
OPTIONS = ("data", "device", "batch_size", "emb_dim", "host_threads", "seed")
SHARES = ("0.1%", "0.5%", "1%", "2%", "5%", "10%", "20%", "50%", "100%")
OPTIMUM = "optimum"
_MOST_RECORDED = 1 << 25  # unique ids, for the optimum
_WORTH = 1.05  # more bytes than this factor of the fewest are not taken for a smaller cache


@dataclass
class Curve:
    """What caches of one policy do, a size each, over the second half of the batches."""

    sizes: list[int]
    statistics: list[Statistics]

    def misses(self) -> npt.NDArray[np.float64]:
        """The share of uses that miss, by size."""
        return np.array([1 - part.hit_rate for part in self.statistics])


@dataclass(frozen=True)
class Tables:
    """The sizes of the model's tables."""

    rows: int
    dim: int

    @property
    def passing(self) -> int:
        """Bytes of a row that passes by, each way."""
        return row_bytes(tables_of(self.dim).values())[0]

    @property
    def whole(self) -> int:
        """Bytes of a row with its slots."""
        return row_bytes(tables_of(self.dim).values())[1]

    def bytes_per_step(self, part: Statistics) -> float:
        """What goes to the device and back in a step."""
        return sum(part.bytes_moved(self.passing, self.whole)) / max(1, part.batches)


def simulate(
    batches: Iterator[npt.NDArray[Any]], steps: int, rows: int, sizes: Sequence[int], counts: Any, window: int
) -> dict[str, Curve]:
    """Run a planner for every policy and size over batches of ids [B, F] at once; the optimum over what fits in memory.

    counts  [V], for "static"; without them it is left out
    """
    policies = [policy for policy in POLICIES if policy != "static" or counts is not None]
    planners = {
        (policy, size): Planner(rows, size, policy, window=window, counts=counts)
        for policy in policies
        for size in sizes
    }
    half, at_half = steps // 2, {key: Statistics() for key in planners}
    recorded: list[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]] = []
    room, planned = _MOST_RECORDED, dict.fromkeys(planners, 0)

    def plan(key: tuple[str, int]) -> None:
        planners[key].plan()
        planned[key] += 1
        if planned[key] == half:
            at_half[key] = replace(planners[key].statistics)

    with bar(steps, "simulating", "step") as progress:
        for ids in batches:
            found, inverse = unique(ids.ravel())
            uses = count_uses(inverse, len(found))
            room -= len(found)
            if room >= 0:
                recorded.append((found, uses))
            for key, planner in planners.items():
                planner.announce(found, uses)
                if len(planner) > planner.window:
                    plan(key)
            progress.update()
    for key, planner in planners.items():
        while len(planner):
            plan(key)
    curves = {
        policy: Curve(list(sizes), [_since(planners[policy, size].statistics, at_half[policy, size]) for size in sizes])
        for policy in policies
    }
    if len(recorded) == steps:
        curves[OPTIMUM] = Curve(list(sizes), [optimal(recorded, rows, size, since=half) for size in sizes])
    return curves


def _since(total: Statistics, before: Statistics) -> Statistics:
    return Statistics(**{name: value - getattr(before, name) for name, value in vars(total).items()})


def recommend(curves: dict[str, Curve], tables: Tables, memory: int) -> tuple[str, int] | None:
    """Return the policy and the smallest size that moves about as few bytes as any that fits; None if none moves fewer
    than no cache does.
    """
    options = [
        (tables.bytes_per_step(part), size, policy)
        for policy, curve in curves.items()
        if policy != OPTIMUM
        for size, part in zip(curve.sizes, curve.statistics, strict=True)
        if size * tables.whole <= memory
    ]
    if not options:
        return None
    fewest = min(options)[0]
    moved, size, policy = min(
        (o for o in options if o[0] <= fewest * _WORTH), key=lambda option: (option[1], option[0])
    )
    without = 2 * tables.passing * _unique(curves)
    return (policy, size) if moved < without else None


def _unique(curves: dict[str, Curve]) -> float:
    part = curves["lookahead"].statistics[0]
    return part.unique / max(1, part.batches)


def table_lines(curves: dict[str, Curve], tables: Tables, memory: int, chosen: tuple[str, int] | None) -> list[str]:
    """Return the table: a line per size."""
    names = [*curves]
    lines = [
        f"{'':<26}{'hit rate by uses, second half of the pass':^{10 * len(names)}}{'MiB a step, both ways':>24}",
        f"{'rows':>12}{'device':>14}" + "".join(f"{name:>10}" for name in names) + f"{'lookahead':>13}{'static':>11}",
    ]
    static = curves.get("static")
    for i, size in enumerate(curves["lookahead"].sizes):
        needed = size * tables.whole
        rates = "".join(f"{curve.statistics[i].hit_rate:>10.2%}" for curve in curves.values())
        moved = f"{tables.bytes_per_step(curves['lookahead'].statistics[i]) / 2**20:>13.2f}"
        moved += f"{tables.bytes_per_step(static.statistics[i]) / 2**20:>11.2f}" if static is not None else f"{'-':>11}"
        note = "  <- recommended" if chosen is not None and size == chosen[1] else ""
        note = note if needed <= memory else "  does not fit"
        lines.append(f"{size:>12,}{gib(needed):>14}{rates}{moved}{note}")
    return lines


def draw(curves: dict[str, Curve], tables: Tables, memory: int, chosen: tuple[str, int] | None, path: Path) -> None:
    """Draw the miss-ratio curves and the bytes of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8))
    for policy, curve in curves.items():
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {"marker": "o"}
        name = "offline optimum" if policy == OPTIMUM else policy
        left.plot(curve.sizes, curve.misses(), label=name, markersize=4, **style)
        if policy != OPTIMUM:
            moved = [tables.bytes_per_step(part) / 2**20 for part in curve.statistics]
            right.plot(curve.sizes, moved, label=name, markersize=4, **style)
    right.axhline(2 * tables.passing * _unique(curves) / 2**20, color="grey", linestyle=":", label="no cache")
    left.set(ylabel="misses, share of uses", yscale="log", title="Miss-ratio curve")
    for axis in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        axis(PercentFormatter(1, decimals=1))
    right.set(ylabel="MiB a step, both ways", title="Rows to the device and back")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set(xlabel="cached rows of each table", xscale="log")
        if memory < tables.rows * tables.whole:
            axes.axvline(memory / tables.whole, color="red", linewidth=1, label=f"{gib(memory)} of device memory")
        if chosen is not None:
            axes.axvline(chosen[1], color="green", linewidth=1, label=f"recommended: {chosen[1]:,} rows, {chosen[0]}")
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def advise(settings: TrainConfig, memory: int | None, window: int, out: Path) -> tuple[str, int] | None:
    """Simulate one pass over the training rows, print and draw what caches would do; return policy and size."""
    if out.exists():
        raise UserError(f"--out {out} exists; choose another file")
    if out.suffix.lower() not in (".png", ".pdf", ".svg") or not out.parent.is_dir():
        raise UserError(f"--out {out} must be a .png, .pdf or .svg file in a folder that exists")
    data = settings.data or lookalike.ensure()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train")
    size = settings.batch_size or min(config.REFERENCE_BATCH_SIZE, max(1, reader.rows // 20))
    reader.require(size)
    if settings.host_threads is not None:
        set_host_threads(settings.host_threads)
    device = backend.select(settings.device)
    tables = Tables(found.vocabulary_size, settings.emb_dim)
    sizes = sorted({max(1, rows_of(share, tables.rows)) for share in SHARES})
    needed = sum(planner_bytes(tables.rows, capacity, policy, window) for capacity in sizes for policy in POLICIES)
    if needed > available_bytes():
        raise UserError(f"the simulation needs {gib(needed)}, but {gib(available_bytes())} of host memory are free")
    steps = reader.steps(size)
    counts = manifest.read_counts(data, found) if found.vocabulary is not None else None
    batches = (batch.ids for batch in wide_batches(reader, size, seed=settings.seed, epoch=1))
    curves = simulate(batches, steps, tables.rows, sizes, counts, window)
    beside = int(2 * _unique(curves) * tables.passing)
    if on_accelerator := backend.is_accelerator(device):
        beside += dense_bytes(size, FIELDS * tables.dim, LAYERS)
    if memory is None:
        room = backend.room_for_cache(device, beside)
        memory = available_bytes() if room is None else room
    chosen = recommend(curves, tables, memory)
    host = tables.rows * tables.whole
    fits = "" if host <= available_bytes() else f", but only {gib(available_bytes())} are free"
    print(f"data     {data}: {reader.rows:,} training rows in {steps:,} batches of {size:,}, {tables.rows:,} ids")
    print(f"tables   deep {tables.rows:,} x {tables.dim} (LazyAdam), wide {tables.rows:,} x 1 (FTRL)")
    print(f"host     {gib(host)} with slots{fits}")
    print(f"device   {gib(memory)} for the cache on {backend.describe(device)}; beside it "
          f"{'the dense layers, their activations and ' * on_accelerator}the rows of the batches on their way, about "
          f"{gib(beside)}")  # fmt: skip
    print(f"step     {_unique(curves):,.0f} unique rows; without a cache "
          f"{2 * tables.passing * _unique(curves) / 2**20:.2f} MiB a step, both ways\n")  # fmt: skip
    print("\n".join(table_lines(curves, tables, memory, chosen)))
    draw(curves, tables, memory, chosen, out)
    print(f"\npicture  {out}")
    print(_advice(curves, tables, chosen))
    return chosen


def _advice(curves: dict[str, Curve], tables: Tables, chosen: tuple[str, int] | None) -> str:
    if chosen is None:
        return "advice   no cache: none of those that fit moves fewer bytes"
    policy, rows = chosen
    part = curves[policy].statistics[curves[policy].sizes.index(rows)]
    flags = f"--cache-rows {rows}" + ("" if policy == "lookahead" else f" --cache-policy {policy}")
    return (
        f"advice   {flags}: {part.hit_rate:.1%} of uses and {part.unique_hit_rate:.1%} of rows hit, "
        f"{tables.bytes_per_step(part) / 2**20:.2f} MiB a step, {gib(rows * tables.whole)} of device memory"
    )


def main(argv: Sequence[str]) -> None:
    """Parse the command line and advise."""
    parser = cli.parser(PROG, "Find out on your own data how large an embedding cache is worth it.")
    config.add_flags(parser, OPTIONS)
    parser.add_argument("--cache-window", type=int, default=WINDOW, metavar="N", help=
        f"batches that lookahead knows in advance (default {WINDOW})")  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE", help=
        "device memory for the cache, such as 16GiB (what is free and the training leaves)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("advise.png"), metavar="FILE", help=
        "a new file for the picture (default advise.png)")  # fmt: skip
    run(parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> None:
    """Advise as the parsed flags say."""
    settings = config.from_flags(arguments, OPTIONS)
    if not 0 <= arguments.cache_window <= MOST_WINDOW:
        raise UserError(f"--cache-window must be in 0..{MOST_WINDOW}, not {arguments.cache_window}")
    memory = parse_bytes(arguments.memory) if arguments.memory is not None else None
    advise(settings, memory, arguments.cache_window, arguments.out)


if __name__ == "__main__":
    raise SystemExit(cli.run(PROG, main))
