"""python -m hostdev.advise: recommend a cache size for the user's data by simulating every policy.

For data with raw ids, it shows the effect of each --admit-count instead: keys, their memory, and uses without a row.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hostdev.cache.options import POLICIES
from hostdev.core import pictures
from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.core.keys import is_raw
from hostdev.core.memory import available_bytes, dense_bytes, format_bytes
from hostdev.core.progress import bar
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import synthetic
from hostdev.data.preprocess.stored import add_counts
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.device.clock import Bus, measure
from hostdev.distributed.rank_environment import find_rank_environment, start_processes, wait_for
from hostdev.distributed.session import join
from hostdev.ext.advice.curves import CachePoint, Curves, TableGroup, flags, gains, recommend, simulate
from hostdev.ext.advice.disk import advise_disk
from hostdev.ext.advice.simulation import OPTIMUM
from hostdev.ext.training.config import CommandConfig
from hostdev.ext.training.layouts import choose_layout, require_layout
from hostdev.host.key_options import KEY_BYTES
from hostdev.kernels.arrays import Counts, Keys
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import unique
from hostdev.models.model import Model
from hostdev.runtime.spec import TableSpec
from hostdev.train.build import groups_of, ids_of, model_of
from hostdev.train.options import REFERENCE_BATCH_SIZE, TrainConfig
from hostdev.train.report import kind

COUNTS = (1, 2, 3, 5, 10, 20)
_ROWS = 1 << 16  # samples read at a time
_MORE = 0.02  # additional share of test uses without a row that the advice accepts


class ColumnUses(NamedTuple):
    """The uses of a column's ids: one figure for each of COUNTS."""

    name: str
    kept: Counts  # ids with a row
    missed: Counts  # uses in one pass over the training samples, before the id gets a row
    unknown: Counts  # uses of ids without a row, in test samples
    uses: int  # uses of all ids in training samples
    test_uses: int


def count_column(name: str, keys: Keys, counts: Counts, test: Keys) -> ColumnUses:
    """Return a column's figures.

    Args:
        name: The column.
        keys: Distinct ids of the training samples [K], ascending.
        counts: How often each id is used [K].
        test: Ids of the test samples [N].
    """
    at = np.minimum(np.searchsorted(keys, test), max(0, len(keys) - 1))
    seen = np.where(keys[at] == test, counts[at], 0) if len(keys) else np.zeros(len(test), np.int64)
    kept = [np.count_nonzero(counts >= n) for n in COUNTS]
    missed = [np.minimum(counts, n - 1).sum() for n in COUNTS]
    unknown = [np.count_nonzero(seen < n) for n in COUNTS]
    return ColumnUses(name, np.array(kept), np.array(missed), np.array(unknown), int(counts.sum()), len(test))


def _ids_of(schema: Schema, batch: Batch, name: str) -> Keys:
    if name in schema.bags:
        return np.asarray(batch.bags[name][0], np.int64)
    return np.asarray(batch.ids[:, schema.ids.index(name)], np.int64)


def count_uses_by_column(data: Path, found: Manifest) -> list[ColumnUses]:
    """Count the ids of each column, in memory that grows with a column's distinct ids."""
    readers = [ShardReader(data, found, split) for split in ("train", "test")]
    columns = [column.name for column in found.schema.columns]
    steps = sum(reader.steps(_ROWS) for reader in readers if reader.rows)
    result = []
    with bar(steps * len(columns), "counting", "step") as progress:

        def read(reader: ShardReader, name: str) -> Iterator[Keys]:
            for batch in reader.batches(_ROWS) if reader.rows else ():
                yield _ids_of(found.schema, batch, name)
                progress.update()

        for name in columns:
            keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
            for ids in read(readers[0], name):
                keys, counts = add_counts((keys, counts), np.unique(ids, return_counts=True))
            test = np.concatenate([np.empty(0, np.int64), *read(readers[1], name)])
            result.append(count_column(name, keys, counts, test))
    return result


def advise_admission(settings: TrainConfig, data: Path, found: Manifest) -> None:
    """Print the keys, the memory, and the uses without a row for each --admit-count, in all and by column."""
    model = model_of(replace(settings, tables="dynamic", host_device_mix=True), found.schema)
    each = sum(spec.shape.nbytes(1) + KEY_BYTES for spec in model.tables.values())
    print(
        f"data     {shown_place(data)}: {found.rows('train'):,} training and {found.rows('test'):,} test rows, raw ids"
    )
    print(f"tables   {', '.join(sorted(model.tables))}: a key takes {each} bytes in all")
    print("\n".join(format_advice(count_uses_by_column(data, found), each)))


def format_advice(columns: list[ColumnUses], each: int) -> list[str]:
    """Return the tables and the advice as lines; `each` is the number of bytes that a key and its rows take."""
    kept = np.sum([column.kept for column in columns], 0)
    uses, test_uses = sum(column.uses for column in columns), sum(column.test_uses for column in columns)
    missed = np.sum([column.missed for column in columns], 0) / max(1, uses)
    unknown = np.sum([column.unknown for column in columns], 0) / max(1, test_uses)
    lines = ["", f"{'':<12}{'':>14}{'':>12}   uses without a row", f"{'admit-count':<12}{'keys':>14}{'memory':>12}"]
    lines[-1] += f"{'training':>12}{'test':>9}"
    for i, n in enumerate(COUNTS):
        shown = f"{unknown[i]:>9.1%}" if test_uses else f"{'':>9}"
        lines.append(f"{n:<12}{kept[i]:>14,}{format_bytes(int(kept[i]) * each):>12}{missed[i]:>12.1%}{shown}")
    width = max(8, *(len(column.name) + 2 for column in columns))
    lines += ["", f"{'':<{width}}{'':>12}  test uses without a row, by admit-count"]
    lines.append(f"{'column':<{width}}{'ids':>12}" + "".join(f"{n:>9}" for n in COUNTS))
    for column in columns:
        shares = column.unknown / max(1, column.test_uses)
        lines.append(f"{column.name:<{width}}{column.kept[0]:>12,}" + "".join(f"{share:>9.1%}" for share in shares))
    best = max((i for i in range(len(COUNTS)) if unknown[i] - unknown[0] <= _MORE), default=0)
    advice = "no --admit-count: each keeps a row from at least 2% of the test samples' uses"
    if COUNTS[best] > 1:
        advice = (
            f"--admit-count {COUNTS[best]}: {1 - kept[best] / max(1, kept[0]):.0%} fewer keys, and a row less for "
            f"{unknown[best] - unknown[0]:.1%} of the test samples' uses"
        )
    return [*lines, "", f"advice   {advice}" if test_uses else "advice   none, since there are no test rows"]


def format_tables(curves: Curves, memory: int, chosen: tuple[str, CachePoint] | None) -> list[str]:
    """Return three text tables as lines: bytes, host time and hit rate, for each cache size and each policy.

    Each table also has a column for the offline optimum.
    """
    first = curves[POLICIES[0]][0]
    blocks: list[tuple[str, str, Callable[[CachePoint], str]]] = [
        (
            f"MiB per step, both directions; without a cache {first.without / 2**20:.2f}",
            "least",
            lambda point: f"{point.moved / 2**20:.2f}",
        ),
        (
            f"host ms per step, including the plan; without a cache {first.host_without * 1e3:.2f}",
            "least",
            lambda point: f"{point.host * 1e3:.2f}",
        ),
        ("hit rate of lookups", "most", lambda point: f"{point.total.hit_rate:.2%}"),
    ]
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


def draw(curves: Curves, memory: int, chosen: tuple[str, CachePoint] | None, path: Path) -> None:
    """Plot bytes, host time and misses against the cache size, and save the picture; raise UserError if that fails."""
    figure = pictures.figure(15, 5.4)
    crossing, hosting, missing = figure.subplots(1, 3)
    for policy, points in curves.items():
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {"marker": "o"}
        name = "offline optimum (separate for each plot)" if policy == OPTIMUM else policy
        sizes = [point.rows for point in points]
        crossing.plot(sizes, [point.moved / 2**20 for point in points], markersize=4, label=name, **style)
        hosting.plot(sizes, [point.host * 1e3 for point in points], markersize=4, **style)
        missing.plot(sizes, [1 - point.total.hit_rate for point in points], markersize=4, **style)
    _percent_axis(missing, [1 - point.total.hit_rate for points in curves.values() for point in points])
    missing.set(ylabel="misses, share of lookups", title="Miss-ratio curve")
    first, largest = curves[POLICIES[0]][0], curves[POLICIES[0]][-1]
    crossing.axhline(first.without / 2**20, color="grey", linestyle=":", label="no cache")
    crossing.set(ylabel="MiB per step, both directions", title="Rows to the device and back")
    hosting.axhline(first.host_without * 1e3, color="grey", linestyle=":")
    hosting.set(ylabel="ms per step", title="Host time, including the plan")
    for axes in (crossing, hosting, missing):
        axes.set(xlabel="cached rows over all tables", xscale="log")
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
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)  # outside the plots, so that it hides no line
    pictures.save(figure, path)


def _percent_axis(axes: Any, shares: Sequence[float]) -> None:
    """Scale the y axis of a plot of shares: logarithmic, or linear from 0 if shares are close together or one is 0.

    The logarithmic axis has labels only at 1, 2 and 5 times each power of ten, so that the labels never touch.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    decimals = None
    if min(shares) > 0 and max(shares) > 3 * min(shares):
        decimals = max(0, -math.floor(math.log10(100 * min(shares))))  # enough to show the smallest share
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=decimals))


def advise(settings: TrainConfig, memory: int | None, window: int, out: Path) -> tuple[str, CachePoint] | None:
    """Simulate one pass over the training samples, print and plot the results, and return the cache to use, if any.

    For data with raw ids, print what each --admit-count keeps instead.
    """
    pictures.require_new(out)
    data = settings.data or synthetic.ensure_lookalike()[0]
    found = manifest.read(data)
    if is_raw(found.schema.rows):
        advise_admission(settings, data, found)
        return None
    reader, size = _open(settings, data, found)
    device = backend.select(settings.device)
    model = model_of(settings, found.schema)
    on_accelerator = backend.is_accelerator(device)
    step_bytes = _estimate_step_bytes(
        model, next(reader.batches(size, seed=settings.seed, epoch=1)), dense=on_accelerator
    )
    if memory is None:
        room = backend.get_cache_room(device, step_bytes)
        memory = available_bytes() if room is None else room
    bus = measure(device)
    curves = simulate(model, data, found, reader, size, seed=settings.seed, window=window, bus=bus, memory=memory)
    first, largest = curves[POLICIES[0]][0], curves[POLICIES[0]][-1]
    chosen = recommend(curves, memory)
    on_host = sum(spec.shape.nbytes(spec.rows) for spec in model.tables.values())
    fits = "" if on_host <= available_bytes() else f", but only {format_bytes(available_bytes())} are free"
    print(
        f"data     {shown_place(data)}: {reader.rows:,} training rows in {reader.steps(size):,} batches of {size:,}, "
        f"{found.schema.rows:,} ids"
    )
    print(f"tables   {describe_tables(model.tables)}")
    print(f"host     {format_bytes(on_host)} with optimizer state{fits}")
    print(
        f"device   {format_bytes(memory)} for the cache on {backend.describe(device)}, and about "
        f"{format_bytes(step_bytes)} for {'the dense layers, their activations and ' * on_accelerator}the rows of "
        "in-flight batches"
    )
    print(f"rates    {_rates(largest.groups, bus, on_accelerator)}")
    print(f"step     {first.unique:,.0f} unique rows\n")
    print("\n".join(format_tables(curves, memory, chosen)))
    draw(curves, memory, chosen, out)
    print(f"\npicture  {out}")
    print(_advice(chosen))
    if not on_accelerator:
        print(
            "a cache cannot help on this CPU: the device's memory is the host's, and planning is pure overhead; the "
            "figures assume an accelerator"
        )
    return chosen


def _open(settings: TrainConfig, data: Path, found: Manifest) -> tuple[ShardReader, int]:
    """Return the training samples and the batch size, and set the number of threads."""
    reader = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
    size = settings.batch_size or min(REFERENCE_BATCH_SIZE, max(1, reader.rows // 20))
    reader.require(size)
    if settings.host_threads is not None:
        set_host_threads(settings.host_threads)
    return reader, size


def advise_tables_on_disk(settings: TrainConfig, folder: Path, step: float | None, window: int) -> None:
    """Print how much memory the model's tables need if they are on the disk of a folder; see `disk.advise_disk`.

    Raises:
        UserError: The data has raw ids, or no table has rows for a disk.
    """
    data = settings.data or synthetic.ensure_lookalike()[0]
    found = manifest.read(data)
    if is_raw(found.schema.rows):
        raise UserError(
            f"{shown_place(data)} has raw ids, which have no rows yet: --disk needs data with a vocabulary or buckets"
        )
    reader, size = _open(settings, data, found)
    print(f"data     {shown_place(data)}: {reader.rows:,} training rows in {reader.steps(size):,} batches of {size:,}")
    model = model_of(settings, found.schema)
    advise_disk(model, reader, size, folder=folder, seed=settings.seed, step=step, window=window)


def _estimate_step_bytes(model: Model, batch: Batch, *, dense: bool) -> int:
    """Estimate a step's bytes on the device, without the cache: rows, gradients and, if `dense`, the dense layers."""
    needed = inputs = 0
    for group in (TableGroup.of(model, names) for names in groups_of(model)):
        ids = ids_of(model, batch, group.names[0])
        needed += 2 * group.passing * len(unique(ids)[0])
        inputs += len(ids) // len(batch) * max(table.dim for table in group.tables)
    return needed + dense_bytes(len(batch), inputs, get_hidden_widths(model)) if dense else needed


def advise_mesh(settings: CommandConfig, processes: int) -> None:
    """Measure and print the time per step of each way to distribute the model over several processes.

    Start the processes, unless a launcher has started this process as one of several.
    """
    data = settings.data or synthetic.ensure_lookalike()[0]
    settings = replace(settings, data=data)
    if find_rank_environment().alone:
        require_layout(settings, data)
        command = [sys.executable, "-m", "hostdev.advise", *sys.argv[1:]]
        raise SystemExit(wait_for(start_processes(processes, command)))
    with join() as ranks:
        assert ranks is not None
        torch.set_num_threads(settings.torch_threads or 1)
        found = manifest.read(data)
        settings = replace(settings, batch_size=settings.resolved().batch_size)
        assert settings.batch_size is not None
        ShardReader(data, found, "train").require(settings.batch_size)
        _, lines = choose_layout(settings, data, found, ranks)
        device = backend.select(settings.device)
        if ranks.rank == 0:
            parts = f"batches of {settings.batch_size:,} in {settings.micro_batches} micro-batches"
            where = f"{ranks.size} processes of one thread on {backend.describe(device)}"
            print(f"model    {settings.model}: {parts}, {where}", *lines, sep="\n")


def get_hidden_widths(model: Model) -> list[int]:
    """Return the widths of a model's linear layers, except layers with one output."""
    widths = [int(module.weight.shape[0]) for module in model.modules() if isinstance(module, nn.Linear)]
    return [width for width in widths if width > 1]


def describe_tables(tables: Mapping[str, TableSpec]) -> str:
    """Format the tables' names, shapes and optimizers."""
    return ", ".join(f"{name} {spec.rows:,} x {spec.dim} ({kind(spec)})" for name, spec in sorted(tables.items()))


def _rates(groups: Sequence[TableGroup], bus: Bus, has_bus: bool) -> str:
    """Format the measured host time per row for each group of tables, and the measured copy speeds."""
    by_group = [
        f"{group.host.passed:.0f} ns of host time per bypassing row"
        f"{' of ' + ' and '.join(group.names) if len(groups) > 1 else ''}, {group.host.admitted:.0f} "
        f"per admitted row, {group.host.evicted:.0f} per evicted row"
        for group in groups
    ]
    over = f"{bus.down / 1e9:.1f} GB/s to the device, {bus.up / 1e9:.1f} back"
    if not has_bus:
        over = f"{bus.down / 1e9:.1f} GB/s for copies in host memory, as there is no bus"
    return "; ".join([*by_group, over])


def _advice(chosen: tuple[str, CachePoint] | None) -> str:
    if chosen is None:
        return "advice   no cache: no size that fits makes a step shorter"
    return f"advice   {flags(chosen)}: {gains(chosen[1])}; {format_bytes(chosen[1].nbytes)} of device memory"
