"""python -m hostdev.advise: how large a cache is worth it on the user's own data, by simulating every policy."""

if __name__ == "__main__":  # first of all, as imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.commands.advise", "hostdev.advise"))

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hostdev.cache.options import POLICIES
from hostdev.cache.simulation import OPTIMUM
from hostdev.core import cli, pictures
from hostdev.core.memory import available_bytes, dense_bytes, format_bytes
from hostdev.data import lookalike, manifest
from hostdev.data.batch import Batch
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.device.bus import Bus, measure
from hostdev.distributed.rank_environment import find_rank_environment
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import unique
from hostdev.models.model import Model
from hostdev.runtime.spec import TableSpec
from hostdev.train import config
from hostdev.train.build import groups_of, ids_of, model_of
from hostdev.train.cache_advice.curves import Curves, Group, Point, flags, gains, recommend, simulate
from hostdev.train.config import TrainConfig
from hostdev.train.report import kind


def tables_of(curves: Curves, memory: int, chosen: tuple[str, Point] | None) -> list[str]:
    """Return three tables with a line per size: bytes, time of the host, hit rate; each beside its optimum."""
    first = curves[POLICIES[0]][0]
    blocks: list[tuple[str, str, Callable[[Point], str]]] = [
        (f"MiB a step, both ways; without a cache {first.without / 2**20:.2f}", "least",
         lambda point: f"{point.moved / 2**20:.2f}"),
        (f"ms of the host in a step, plan included; without a cache {first.host_without * 1e3:.2f}", "least",
         lambda point: f"{point.host * 1e3:.2f}"),
        ("hit rate by uses", "most", lambda point: f"{point.total.hit_rate:.2%}"),
    ]  # fmt: skip
    lines: list[str] = []
    for title, best, text in blocks:
        names = [best if name == OPTIMUM else name for name in curves]
        lines += [
            *([""] if lines else []),
            f"{'':<26}  {title}",
            f"{'rows':>12}{'device':>14}" + "".join(f"{name:>11}" for name in names),
        ]
        for i, point in enumerate(curves[POLICIES[0]]):
            cells = "".join(f"{text(points[i]):>11}" for points in curves.values())
            note = ""
            if chosen is not None and point.sizes == chosen[1].sizes:
                note = f"  <- recommended: {chosen[0]}"
            note = note if point.nbytes <= memory else "  does not fit"
            lines.append(f"{point.rows:>12,}{format_bytes(point.nbytes):>14}{cells}{note}")
    return lines


def draw(curves: Curves, memory: int, chosen: tuple[str, Point] | None, path: Path) -> None:
    """Draw bytes, time of the host and misses by size; UserError where the file cannot be written."""
    figure = pictures.figure(15, 5.4)
    crossing, hosting, missing = figure.subplots(1, 3)
    for policy, points in curves.items():
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {"marker": "o"}
        name = "offline optimum of each" if policy == OPTIMUM else policy
        sizes = [point.rows for point in points]
        crossing.plot(sizes, [point.moved / 2**20 for point in points], markersize=4, label=name, **style)
        hosting.plot(sizes, [point.host * 1e3 for point in points], markersize=4, **style)
        missing.plot(sizes, [1 - point.total.hit_rate for point in points], markersize=4, **style)
    _percent_axis(missing, [1 - point.total.hit_rate for points in curves.values() for point in points])
    missing.set(ylabel="misses, share of uses", title="Miss-ratio curve")
    first, largest = curves[POLICIES[0]][0], curves[POLICIES[0]][-1]
    crossing.axhline(first.without / 2**20, color="grey", linestyle=":", label="no cache")
    crossing.set(ylabel="MiB a step, both ways", title="Rows to the device and back")
    hosting.axhline(first.host_without * 1e3, color="grey", linestyle=":")
    hosting.set(ylabel="ms a step", title="Time of the host, plan included")
    for axes in (crossing, hosting, missing):
        axes.set(xlabel="cached rows, of all tables", xscale="log")
        named = axes is crossing
        if memory < largest.nbytes:
            name = f"{format_bytes(memory)} of device memory" if named else ""
            axes.axvline(memory / largest.nbytes * largest.rows, color="black", linestyle="-.", linewidth=1, label=name)
        if chosen is not None:
            name = f"recommended: {chosen[1].rows:,} rows, {chosen[0]}" if named else ""
            axes.axvline(chosen[1].rows, color="C4", linewidth=1.5, label=name)
        axes.grid(alpha=0.3)
    for axes in (crossing, hosting):
        axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)  # over no line
    pictures.save(figure, path)


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


def advise(settings: TrainConfig, memory: int | None, window: int, out: Path) -> tuple[str, Point] | None:
    """Simulate one pass over the training rows, print and draw what caches would do; return policy and sizes."""
    pictures.require_new(out)
    data = settings.data or lookalike.ensure()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
    size = settings.batch_size or min(config.REFERENCE_BATCH_SIZE, max(1, reader.rows // 20))
    reader.require(size)
    if settings.host_threads is not None:
        set_host_threads(settings.host_threads)
    device = backend.select(settings.device)
    model = model_of(settings, found.schema)
    on_accelerator = backend.is_accelerator(device)
    beside = _beside(model, next(reader.batches(size, seed=settings.seed, epoch=1)), dense=on_accelerator)
    if memory is None:
        room = backend.get_cache_room(device, beside)
        memory = available_bytes() if room is None else room
    bus = measure(device)
    curves = simulate(model, data, found, reader, size, seed=settings.seed, window=window, bus=bus, memory=memory)
    first, whole = curves[POLICIES[0]][0], curves[POLICIES[0]][-1]
    chosen = recommend(curves, memory)
    on_host = sum(spec.shape.nbytes(spec.rows) for spec in model.tables.values())
    fits = "" if on_host <= available_bytes() else f", but only {format_bytes(available_bytes())} are free"
    print(f"data     {data}: {reader.rows:,} training rows in {reader.steps(size):,} batches of {size:,}, "
          f"{found.schema.rows:,} ids")  # fmt: skip
    print(f"tables   {tables_line(model.tables)}")
    print(f"host     {format_bytes(on_host)} with slots{fits}")
    print(f"device   {format_bytes(memory)} for the cache on {backend.describe(device)}; beside it "
          f"{'the dense layers, their activations and ' * on_accelerator}the rows of the batches on their way, about "
          f"{format_bytes(beside)}")  # fmt: skip
    print(f"rates    {_rates(whole.groups, bus, on_accelerator)}")
    print(f"step     {first.unique:,.0f} unique rows\n")
    print("\n".join(tables_of(curves, memory, chosen)))
    draw(curves, memory, chosen, out)
    print(f"\npicture  {out}")
    print(_advice(chosen))
    if not on_accelerator:
        print("on this CPU there is nothing to win: the device's memory is the host's, and a cache costs its plan; the "
              "figures are those of an accelerator")  # fmt: skip
    return chosen


def _beside(model: Model, batch: Batch, *, dense: bool) -> int:
    """Return about the bytes that a step needs beside a cache: a batch's rows, both ways, and its `dense` layers."""
    needed = inputs = 0
    for group in (Group.of(model, names) for names in groups_of(model)):
        ids = ids_of(model, batch, group.names[0])
        needed += 2 * group.passing * len(unique(ids)[0])
        inputs += len(ids) // len(batch) * group_dim(group)
    return needed + dense_bytes(len(batch), inputs, hidden_layers(model)) if dense else needed


def advise_mesh(settings: TrainConfig, processes: int) -> None:
    """Start the processes, or be one of them, and print which layouts of the model take how long."""
    from hostdev.train.layouts import advise_alone, advise_together

    settings = replace(settings, data=settings.data or lookalike.ensure()[0])
    if find_rank_environment().alone:
        raise SystemExit(advise_alone(settings, processes))
    advise_together(settings)


def group_dim(group: Group) -> int:
    """Return the columns of a group's widest table."""
    return max(table.dim for table in group.tables)


def hidden_layers(model: Model) -> list[int]:
    """Return the widths of a model's linear layers, but for those of a logit."""
    widths = [int(module.weight.shape[0]) for module in model.modules() if isinstance(module, nn.Linear)]
    return [width for width in widths if width > 1]


def tables_line(tables: Mapping[str, TableSpec]) -> str:
    """Return names, shapes and optimizers."""
    return ", ".join(f"{name} {spec.rows:,} x {spec.dim} ({kind(spec)})" for name, spec in sorted(tables.items()))


def _rates(groups: Sequence[Group], bus: Bus, has_bus: bool) -> str:
    """Return what was measured of the machine."""
    of_group = [
        f"{group.host.passed:.0f} ns of the host for a row"
        f"{' of ' + ' and '.join(group.names) if len(groups) > 1 else ''} that passes by, {group.host.admitted:.0f} "
        f"for one that enters, {group.host.evicted:.0f} that leaves"
        for group in groups
    ]
    over = f"{bus.down / 1e9:.1f} GB/s to the device, {bus.up / 1e9:.1f} back"
    if not has_bus:
        over = f"{bus.down / 1e9:.1f} GB/s for copies in host memory, as here is no bus"
    return "; ".join([*of_group, over])


def _advice(chosen: tuple[str, Point] | None) -> str:
    if chosen is None:
        return "advice   no cache: none of those that fit makes a step shorter"
    return f"advice   {flags(chosen)}: {gains(chosen[1])}; {format_bytes(chosen[1].nbytes)} of device memory"
