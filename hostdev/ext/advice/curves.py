"""Simulation of cache policies and sizes on a data set's own batches, and the recommended cache.

The cost of a step is the host's time for rows and plan, plus the time to transfer rows to the device and back. Both
are measured on this machine; the training kernels run on similar tables to measure the host's time. A larger cache is
recommended only if it reduces that cost.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hostdev.cache.options import POLICIES, rows_of
from hostdev.cache.plan import Statistics
from hostdev.cache.planner import planner_bytes
from hostdev.cache.prices import Costs
from hostdev.core.initializers import Constant
from hostdev.core.memory import TableShape, available_bytes, require_memory, row_bytes
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.progress import bar
from hostdev.data.manifest import Manifest
from hostdev.data.shards import ShardReader
from hostdev.device.clock import Bus
from hostdev.ext.advice.simulation import OPTIMUM, Optimum, Simulated, SimulatedCache, UniqueIds, add_up
from hostdev.host.table import HostTable
from hostdev.kernels.arrays import Array
from hostdev.kernels.pool import Task, run_tasks
from hostdev.kernels.unique import count_occurrences, unique
from hostdev.models.model import Model
from hostdev.train.build import count_uses, groups_of, ids_of, known_counts

_TABLE_BYTES = 1 << 29  # maximum bytes of the measured tables; many times a processor's cache
_ROUNDS = 7
SHARES = ("0.1%", "0.5%", "1%", "2%", "5%", "10%", "20%", "50%", "100%")
_WORTH = 1.05  # a smaller cache is preferred if it takes at most this multiple of the least time
_UNKNOWN = Costs(0, 0, 0)
_PLANS_PART, _MOST_BYTES = 4, 3 << 30  # plans take at most 1/4 of the free memory; plans and counts, at most 3 GiB
_RATED = 9  # number of batches on which the host's work is measured


def host_costs(
    rows: int, tables: Sequence[tuple[int, SparseOptimizer] | TableShape], batches: Sequence[Array]
) -> Costs:
    """Measure the nanoseconds that the host needs for a row that bypasses a cache, is admitted, or is evicted.

    Each time covers one row in every table. A bypassing row is looked up and updated. An admitted row is read
    with its optimizer state, and an evicted row is written with its state.

    Args:
        rows: V, the number of rows. Tables above 512 MiB or a quarter of the free memory are measured with fewer rows.
        tables: Dimension, optimizer and dtypes of each table.
        batches: Unique ids [U] of some batches.
    """
    most = min(_TABLE_BYTES, available_bytes() // 4)
    held = max(1, min(rows, most // row_bytes(tables)[1]))
    mine = [
        HostTable(held, dim, optimizer, name=f"measured {number}", init=Constant(), dtype=dtype, slots=slots)
        for number, (dim, optimizer, dtype, slots) in enumerate(TableShape(*table) for table in tables)
    ]
    ids = [unique(batch % held)[0] for batch in batches if len(batch)]
    if not ids:
        return Costs(0, 0, 0)
    longest = max(map(len, ids))
    weights = [np.zeros((longest, table.dim), np.float32) for table in mine]
    whole = [
        (
            np.zeros((longest, 1 + len(table.optimizer.slots), table.dim), np.float32),
            np.zeros((longest, table.row_slots.shape[1]), np.float32),
        )
        for table in mine
    ]

    def bypass(some: Array) -> list[list[Task]]:
        pairs = list(zip(mine, weights, strict=True))
        looked_up = [task for table, rows in pairs for task in table.lookup_tasks(some, rows[: len(some)])]
        return [looked_up, [task for table, rows in pairs for task in table.update_tasks(some, rows[: len(some)])]]

    def admit(some: Array) -> list[list[Task]]:
        n, pairs = len(some), zip(mine, whole, strict=True)
        return [[task for table, (block, own) in pairs for task in table.read_rows_tasks(some, block[:n], own[:n])]]

    def evict(some: Array) -> list[list[Task]]:
        n, pairs = len(some), zip(mine, whole, strict=True)
        return [[task for table, (block, own) in pairs for task in table.write_rows_tasks(some, block[:n], own[:n])]]

    return Costs(*(_measure_row(make_tasks, ids) for make_tasks in (bypass, admit, evict)))


def _measure_row(make_tasks: Callable[[Array], list[list[Task]]], batches: Sequence[Array]) -> float:
    """Return the median nanoseconds per row over batches, after two rounds that only load kernels and memory pages."""
    times = []
    for number in range(_ROUNDS + 2):
        ids = batches[number % len(batches)]
        start = time.perf_counter_ns()
        for tasks in make_tasks(ids):
            run_tasks(tasks)
        times.append((time.perf_counter_ns() - start) / len(ids))
    return statistics.median(times[2:])


@dataclass(frozen=True)
class TableGroup:
    """Tables that share ids."""

    names: tuple[str, ...]
    rows: int
    tables: tuple[TableShape, ...]
    host: Costs = _UNKNOWN  # the host's nanoseconds for a bypassing, an admitted and an evicted row
    unique: int = 0  # maximum number of unique ids in a batch

    @classmethod
    def of(cls, model: Model, names: Sequence[str]) -> "TableGroup":
        """Return the group of the model's tables `names`."""
        specs = [model.tables[name] for name in names]
        return cls(tuple(names), specs[0].rows, tuple(spec.shape for spec in specs))

    @property
    def passing(self) -> int:
        """Bytes that are copied in each direction for a row that bypasses the cache."""
        return row_bytes(self.tables)[0]

    @property
    def whole(self) -> int:
        """Bytes of a row with its optimizer state."""
        return row_bytes(self.tables)[1]

    @property
    def costs(self) -> Costs:
        """Bytes that are copied for a row that bypasses the cache, is admitted, or is evicted."""
        return Costs.of(self.passing, self.whole)


@dataclass
class CachePoint:
    """Caches of one policy and size, one for each group, simulated over all batches; the results cover the second half.

    A point of the optimum holds lower bounds for caches of this size; a single cache need not reach all of them.
    """

    sizes: list[int]
    caches: list[Simulated]
    groups: list[TableGroup]
    bus: Bus = field(default=Bus(1e10, 1e10))

    @property
    def parts(self) -> list[Statistics]:
        """Statistics of each cache."""
        return [cache.statistics for cache in self.caches]

    @property
    def rows(self) -> int:
        """Total rows over all caches."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes that the caches take on the device."""
        return sum(size * group.whole for size, group in zip(self.sizes, self.groups, strict=True))

    @property
    def bytes(self) -> tuple[float, float]:
        """Bytes copied per step to the device, and to the host."""
        pairs = zip(self.parts, self.groups, strict=True)
        both = [(part.bytes_moved(group.passing, group.whole), part.batches) for part, group in pairs]
        down, up = (sum(moved[way] / max(1, batches) for moved, batches in both) for way in (0, 1))
        return down, up

    @property
    def moved(self) -> float:
        """Bytes copied per step, in both directions together."""
        return self._least(0) if self.is_optimum else sum(self.bytes)

    @property
    def without(self) -> float:
        """Bytes copied per step without caches, in both directions together."""
        pairs = zip(self.parts, self.groups, strict=True)
        return sum(2 * group.passing * part.unique / max(1, part.batches) for part, group in pairs)

    @property
    def host(self) -> float:
        """Seconds per step of the host's work: for bypassing, admitted and evicted rows, and for the plan."""
        if self.is_optimum:
            return self._least(1) / 1e9
        pairs = zip(self.caches, self.groups, strict=True)
        return sum(
            (
                group.host.paid(one.statistics.passed, one.statistics.admitted, one.statistics.evicted) / 1e9
                + one.planning
            )
            / max(1, one.statistics.batches)
            for one, group in pairs
        )

    @property
    def host_without(self) -> float:
        """Seconds per step of the host's work without caches."""
        pairs = zip(self.parts, self.groups, strict=True)
        return sum(group.host.passed * part.unique / max(1, part.batches) for part, group in pairs) / 1e9

    @property
    def seconds(self) -> float:
        """Seconds per step for the host's work and the copies."""
        down, up = self.bytes
        return self.host + down / self.bus.down + up / self.bus.up

    @property
    def seconds_without(self) -> float:
        """Seconds per step for the host's work and the copies, without caches."""
        each_way = self.without / 2
        return self.host_without + each_way / self.bus.down + each_way / self.bus.up

    @property
    def unique(self) -> float:
        """Unique rows per step."""
        return sum(part.unique / max(1, part.batches) for part in self.parts)

    @property
    def total(self) -> Statistics:
        """The statistics summed over the groups."""
        return add_up(self.parts)

    @property
    def is_optimum(self) -> bool:
        """Whether this point holds the optimum's lower bounds instead of the results of caches."""
        return all(cache.least for cache in self.caches)

    def _least(self, number: int) -> float:
        return sum(cache.least[number] / max(1, cache.statistics.batches) for cache in self.caches)


Curves = dict[str, list[CachePoint]]  # by policy; a point for each size


def recommend(curves: Curves, memory: int) -> tuple[str, CachePoint] | None:
    """Choose the smallest cache whose time per step is within 5% of the fastest cache's.

    Returns:
        The policy and the caches, or None if no cache that fits makes steps faster.
    """
    options = [
        (point.seconds, point.rows, policy, point)
        for policy, points in curves.items()
        if policy != OPTIMUM
        for point in points
        if point.nbytes <= memory and point.seconds < point.seconds_without
    ]
    if not options:
        return None
    least = min(option[0] for option in options)
    worth = [option for option in options if option[0] <= least * _WORTH]
    _, _, policy, point = min(worth, key=lambda option: (option[1], option[0]))
    return policy, point


def flags(chosen: tuple[str, CachePoint]) -> str:
    """Return the options of `hostdev train` for this choice."""
    policy, point = chosen
    return f"--cache-rows {format_size(point)}" + ("" if policy == POLICIES[0] else f" --cache-policy {policy}")


def format_size(point: CachePoint, processes: int = 1) -> str:
    """Return a value for --cache-rows: the number of rows, or a share of all rows for several groups or processes."""
    if len(point.groups) == 1 and processes == 1:
        return str(point.rows)
    return f"{100 * point.rows / sum(group.rows for group in point.groups):.4g}%"


def gains(point: CachePoint) -> str:
    """Return as text what a cache saves per step, and its hit rate."""
    return (
        f"{point.moved / 2**20:.2f} MiB per step instead of {point.without / 2**20:.2f}, "
        f"{point.host * 1e3:.2f} ms of host time instead of {point.host_without * 1e3:.2f}, "
        f"{point.total.hit_rate:.1%} of lookups hit"
    )


def read_unique(
    model: Model, groups: Sequence[TableGroup], reader: ShardReader, size: int, seed: int
) -> Iterator[list[UniqueIds]]:
    """Yield, for each batch of `size` training samples, each group's unique ids and how often the batch uses them."""
    for batch in reader.batches(size, seed=seed, epoch=1):
        ids = [unique(ids_of(model, batch, group.names[0])) for group in groups]
        yield [(found, count_occurrences(inverse, len(found))) for found, inverse in ids]


def measure_groups(model: Model, reader: ShardReader, size: int, seed: int) -> list[TableGroup]:
    """Return a model's groups with the host's costs per row, measured on the first batches."""
    groups = [TableGroup.of(model, names) for names in groups_of(model)]
    batches = list(itertools.islice(read_unique(model, groups, reader, size, seed), _RATED))
    found = []
    for number, group in enumerate(groups):
        ids = [batch[number][0] for batch in batches]
        host = host_costs(group.rows, group.tables, ids)
        found.append(replace(group, host=host, unique=max(map(len, ids), default=0)))
    return found


def choose_sizes(groups: Sequence[TableGroup], memory: int) -> list[list[int]]:
    """Return a list of cache sizes to try for each group, all of equal length.

    The sizes are shares of the group's rows, and the largest size with which all groups' caches fit in `memory` bytes.
    """
    tried = {tuple(max(1, rows_of(share, group.rows)) for group in groups) for share in SHARES}
    fitting = min(1.0, memory / sum(group.rows * group.whole for group in groups))
    if all(exact := tuple(int(fitting * group.rows) for group in groups)):
        tried.add(exact)
    return [list(mine) for mine in zip(*sorted(tried), strict=True)]


class Trial(NamedTuple):
    """A cache to simulate."""

    policy: str
    number: int  # index of the size
    group: int  # index of the group


Ended = Mapping[str, Mapping[int, list[Simulated]]]  # by policy and group: the results for each size


def run_passes(
    passes: Sequence[Sequence[Trial]],
    make: Callable[[Trial], SimulatedCache],
    read: Callable[[], Iterable[Sequence[UniqueIds]]],
    steps: int,
    title: str,
    optima: Sequence[Optimum] = (),
) -> Ended:
    """Simulate caches in passes over the batches, each with some of the caches; return the results.

    Args:
        passes: The caches of each pass, which are in memory at the same time.
        make: Makes a cache.
        read: Called once in each pass; returns the batches, each with the unique ids of all groups.
        steps: Number of batches.
        title: Title of the progress bar.
        optima: Receive the batches of the last pass, by group.
    """
    ended: dict[str, dict[int, list[Simulated]]] = defaultdict(lambda: defaultdict(list))
    with bar(steps * len(passes), title, "step") as progress:
        for tries in passes:
            caches = [make(trial) for trial in tries]
            for batch in read():
                for trial, cache in zip(tries, caches, strict=True):
                    cache.add(*batch[trial.group])
                for optimum, ids in zip(optima if tries is passes[-1] else (), batch, strict=False):
                    optimum.add(*ids)
                progress.update()
            for trial in tries:
                ended[trial.policy][trial.group].append(caches.pop(0).end())  # pop frees the memory of the plan
    return ended


def simulate(
    model: Model,
    data: Path,
    found: Manifest,
    reader: ShardReader,
    size: int,
    *,
    seed: int,
    window: int,
    bus: Bus,
    memory: int,
) -> Curves:
    """Simulate caches of every policy and size over the training samples, in batches of `size`.

    One of the sizes is the largest that fits in `memory` bytes. The samples are read in several passes if the plans of
    all simulations would take more than a quarter of the free memory, or more than 3 GiB together with the counts.
    """
    groups, steps = measure_groups(model, reader, size, seed), reader.steps(size)
    sizes = choose_sizes(groups, memory)
    known = known_counts(model, data, found, reader)  # the counts that a run with lookahead also uses
    counts = [known] if known is not None else count_uses(model, data, found, reader)
    left = _MOST_BYTES - sum(uses.nbytes for uses in counts)
    has_counts = known is not None
    del known  # `counts` has it
    passes = _passes(groups, sizes, steps, window, min(available_bytes() // _PLANS_PART, left))

    def make(trial: Trial) -> SimulatedCache:
        group, size = groups[trial.group], sizes[trial.group][trial.number]
        known = counts[trial.group] if has_counts or trial.policy == "static" else None
        return SimulatedCache(group.rows, size, trial.policy, steps, window, known, group.costs)

    optima = [
        Optimum(group.rows, mine, steps, (group.costs, group.host)) for group, mine in zip(groups, sizes, strict=True)
    ]
    ended = run_passes(
        passes, make, lambda: read_unique(model, groups, reader, size, seed), steps, "simulating", optima
    )
    counts.clear()  # the optimum needs the memory
    best = [optimum.end() for optimum in optima]
    return make_curves(groups, sizes, {**ended, **({OPTIMUM: dict(enumerate(best))} if all(best) else {})}, bus)


def _passes(
    groups: Sequence[TableGroup], sizes: Sequence[Sequence[int]], steps: int, window: int, room: int
) -> list[list[Trial]]:
    """Return all combinations of policy, size and group, in passes with at most `room` bytes of plans each.

    A plan of more bytes gets a separate pass.

    Raises:
        UserError: A plan does not fit in memory.
    """
    passes: list[list[Trial]] = [[]]
    left = room
    for policy, number, one in itertools.product(POLICIES, range(len(sizes[0])), range(len(groups))):
        ahead = window if policy == POLICIES[0] else 0
        needed = planner_bytes(groups[one].rows, sizes[one][number], groups[one].unique, ahead, batches=steps)
        if needed > left and passes[-1]:
            passes.append([])
            left = room
        if needed > left:
            require_plan(needed)
        passes[-1].append(Trial(policy, number, one))
        left -= needed
    return passes


def require_plan(needed: int) -> None:
    """Raise UserError unless plans of this many bytes fit in memory."""
    require_memory(needed, "the simulation of a cache's plan", "use a smaller batch size or window")


def make_curves(groups: list[TableGroup], sizes: Sequence[Sequence[int]], ended: Ended, bus: Bus) -> Curves:
    """Return the points of each policy from the simulations' results; `sizes` has the sizes by group."""
    return {
        policy: [
            CachePoint([mine[i] for mine in sizes], [one[number][i] for number in range(len(groups))], groups, bus)
            for i in range(len(sizes[0]))
        ]
        for policy, one in ended.items()
    }
