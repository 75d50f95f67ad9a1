"""How large a cache is worth it: every policy and size on a data set's own batches, by what a step then takes.

A step takes the host's time for rows and plan, and the time in which its bytes cross to the device and back: both are
measured on this machine. A cache is worth its memory while it makes that sum smaller.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hostdev.cache.options import POLICIES, rows_of
from hostdev.cache.planner import Statistics, planner_bytes
from hostdev.cache.prices import Costs
from hostdev.cache.simulation import OPTIMUM, Simulated, Simulation, add_up
from hostdev.core.errors import UserError
from hostdev.core.memory import TableShape, available_bytes, format_bytes, row_bytes
from hostdev.core.progress import bar
from hostdev.data.manifest import Manifest
from hostdev.data.shards import ShardReader
from hostdev.device.bus import Bus
from hostdev.kernels.unique import count_occurrences, unique
from hostdev.models.model import Model
from hostdev.train.build import count_uses, groups_of, ids_of, known_counts
from hostdev.train.cache_advice.rates import host_costs

SHARES = ("0.1%", "0.5%", "1%", "2%", "5%", "10%", "20%", "50%", "100%")
_WORTH = 1.05  # more time than this factor of the least is not taken for a smaller cache
_UNKNOWN = Costs(0, 0, 0)
_PLANS_PART, _MOST_BYTES = 4, 3 << 30  # of the free memory; of plans and counts
_RATED = 9  # batches on which the host's work is measured


@dataclass(frozen=True)
class Group:
    """Tables that share ids."""

    names: tuple[str, ...]
    rows: int
    tables: tuple[TableShape, ...]
    host: Costs = _UNKNOWN  # nanoseconds of a row's ways on the host
    unique: int = 0  # ids of a batch, about

    @classmethod
    def of(cls, model: Model, names: Sequence[str]) -> "Group":
        """Those of a model."""
        specs = [model.tables[name] for name in names]
        return cls(tuple(names), specs[0].rows, tuple(spec.shape for spec in specs))

    @property
    def passing(self) -> int:
        """Bytes of a row that passes by, each way."""
        return row_bytes(self.tables)[0]

    @property
    def whole(self) -> int:
        """Bytes of a row with its slots."""
        return row_bytes(self.tables)[1]

    @property
    def costs(self) -> Costs:
        """In bytes."""
        return Costs.of(self.passing, self.whole)


@dataclass
class Point:
    """Caches of one policy and one size, one for each group, over the second half of the batches.

    Of the optimum, the best figures that caches of this size could have, each that of another one.
    """

    sizes: list[int]
    caches: list[Simulated]
    groups: list[Group]
    bus: Bus = field(default=Bus(1e10, 1e10))

    @property
    def parts(self) -> list[Statistics]:
        """Of each cache."""
        return [cache.statistics for cache in self.caches]

    @property
    def rows(self) -> int:
        """Of all caches."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(size * group.whole for size, group in zip(self.sizes, self.groups, strict=True))

    @property
    def bytes(self) -> tuple[float, float]:
        """That go to the device, and to the host, in a step."""
        pairs = zip(self.parts, self.groups, strict=True)
        both = [(part.bytes_moved(group.passing, group.whole), part.batches) for part, group in pairs]
        down, up = (sum(moved[way] / max(1, batches) for moved, batches in both) for way in (0, 1))
        return down, up

    @property
    def moved(self) -> float:
        """Bytes that go to the device and back in a step."""
        return self._least(0) if self.is_optimum else sum(self.bytes)

    @property
    def without(self) -> float:
        """What would, without caches."""
        pairs = zip(self.parts, self.groups, strict=True)
        return sum(2 * group.passing * part.unique / max(1, part.batches) for part, group in pairs)

    @property
    def host(self) -> float:
        """Seconds of the host in a step: for rows that pass by, come and go; for the plan."""
        if self.is_optimum:
            return self._least(1) / 1e9
        pairs = zip(self.caches, self.groups, strict=True)
        return sum(
            (group.host.paid(one.statistics.passed, one.statistics.admitted, one.statistics.evicted) / 1e9
             + one.planning) / max(1, one.statistics.batches)
            for one, group in pairs
        )  # fmt: skip

    @property
    def host_without(self) -> float:
        """What it would be, without caches."""
        pairs = zip(self.parts, self.groups, strict=True)
        return sum(group.host.passed * part.unique / max(1, part.batches) for part, group in pairs) / 1e9

    @property
    def planning(self) -> float:
        """Seconds of the plan in a step."""
        return sum(one.planning / max(1, one.statistics.batches) for one in self.caches)

    @property
    def seconds(self) -> float:
        """Of the host, and of the bus, in a step."""
        down, up = self.bytes
        return self.host + down / self.bus.down + up / self.bus.up

    @property
    def seconds_without(self) -> float:
        """What these would be, without caches."""
        each_way = self.without / 2
        return self.host_without + each_way / self.bus.down + each_way / self.bus.up

    @property
    def unique(self) -> float:
        """Unique rows of a step."""
        return sum(part.unique / max(1, part.batches) for part in self.parts)

    @property
    def total(self) -> Statistics:
        """The sums over the groups."""
        return add_up(self.parts)

    @property
    def is_optimum(self) -> bool:
        """Tell whether these are the best figures, rather than caches."""
        return all(cache.least for cache in self.caches)

    def _least(self, number: int) -> float:
        return sum(cache.least[number] / max(1, cache.statistics.batches) for cache in self.caches)


Curves = dict[str, list[Point]]  # by policy; a point for each size


def recommend(curves: Curves, memory: int) -> tuple[str, Point] | None:
    """Return the policy and the smallest size with which a step takes about as little time as with any that fits.

    None if none takes less than no cache does.
    """
    options = [
        (point.seconds, point.rows, policy, point)
        for policy, points in curves.items()
        if policy != OPTIMUM
        for point in points
        if point.nbytes <= memory
    ]
    if not options:
        return None
    least = min(option[0] for option in options)
    worth = [option for option in options if option[0] <= least * _WORTH]
    seconds, _, policy, point = min(worth, key=lambda option: (option[1], option[0]))
    return (policy, point) if seconds < point.seconds_without else None


def flags(chosen: tuple[str, Point]) -> str:
    """Return the options of `hostdev.train` that say so."""
    policy, point = chosen
    return f"--cache-rows {size_of(point)}" + ("" if policy == POLICIES[0] else f" --cache-policy {policy}")


def size_of(point: Point) -> str:
    """Return what --cache-rows takes: rows, or of several groups the share of all."""
    return str(point.rows) if len(point.groups) == 1 else (
        f"{100 * point.rows / sum(group.rows for group in point.groups):.4g}%"
    )  # fmt: skip


def gains(point: Point) -> str:
    """Return what a cache wins, as text."""
    return (
        f"{point.moved / 2**20:.2f} MiB a step instead of {point.without / 2**20:.2f}, "
        f"{point.host * 1e3:.2f} ms of the host instead of {point.host_without * 1e3:.2f}, "
        f"{point.total.hit_rate:.1%} of lookups hit"
    )


def measured(model: Model, reader: ShardReader, size: int, seed: int) -> list[Group]:
    """Return a model's groups with what rows cost the host, measured on the first batches."""
    groups = [Group.of(model, names) for names in groups_of(model)]
    batches = list(itertools.islice(reader.batches(size, seed=seed, epoch=1), _RATED))
    found = []
    for group in groups:
        ids = [unique(ids_of(model, batch, group.names[0]))[0] for batch in batches]
        host = host_costs(group.rows, group.tables, ids)
        found.append(replace(group, host=host, unique=max(map(len, ids), default=0)))
    return found


def sizes_of(groups: Sequence[Group], memory: int) -> list[list[int]]:
    """Return the sizes to try, of each group as many: shares of its rows, and what just fits into `memory` bytes."""
    tried = {tuple(max(1, rows_of(share, group.rows)) for group in groups) for share in SHARES}
    fitting = min(1.0, memory / sum(group.rows * group.whole for group in groups))
    if all(exact := tuple(int(fitting * group.rows) for group in groups)):
        tried.add(exact)
    return [list(mine) for mine in zip(*sorted(tried), strict=True)]


def simulate(
    model: Model, data: Path, found: Manifest, reader: ShardReader, size: int, *, seed: int, window: int, bus: Bus,
    memory: int,
) -> Curves:  # fmt: skip
    """Run caches of every policy and size over the training rows; one size is what fits into `memory`.

    In as many passes as the memory of their plans asks for: a quarter of what is free is for them, and at most what the
    counts leave of 3 GiB.
    """
    groups, steps = measured(model, reader, size, seed), reader.steps(size)
    sizes = sizes_of(groups, memory)
    known = known_counts(model, data, found, reader)  # a training has no others for lookahead
    counts = [known] if known is not None else count_uses(model, data, found, reader)
    left = _MOST_BYTES - sum(each.nbytes for each in counts)
    told = known is not None
    del known
    passes = _passes(groups, sizes, steps, window, min(available_bytes() // _PLANS_PART, left))
    ended: list[dict[str, list[Simulated]]] = [{policy: [] for policy in POLICIES} for _ in groups]
    with bar(steps * len(passes), "simulating", "step") as progress:
        for tries in passes:
            simulations = [
                (one, Simulation(
                    groups[one].rows, sizes[one][number : number + 1], steps, counts[one], window, groups[one].costs,
                    told=told, policies=[policy], optimum=False,
                ))
                for policy, number, one in tries
            ]  # fmt: skip
            if tries is passes[-1]:
                simulations += [(one, _optima(groups[one], sizes[one], steps, window)) for one in range(len(groups))]
            for batch in reader.batches(size, seed=seed, epoch=1):
                for one, group in enumerate(groups):
                    ids, inverse = unique(ids_of(model, batch, group.names[0]))
                    uses = count_occurrences(inverse, len(ids))
                    for _, simulation in (each for each in simulations if each[0] == one):
                        simulation.add_unique(ids, uses)
                progress.update()
            if tries is passes[-1]:
                counts.clear()
            while simulations:  # the memory of plans and counts is free for the optimum
                one, simulation = simulations.pop(0)
                for policy, found_here in simulation.end().items():
                    ended[one].setdefault(policy, []).extend(found_here)
    return curves_of(groups, sizes, ended, bus)


def _passes(
    groups: Sequence[Group], sizes: Sequence[Sequence[int]], steps: int, window: int, room: int
) -> list[list[tuple[str, int, int]]]:
    """Return which policies, sizes by number, and groups by number, to try in each pass, in plans of `room` bytes.

    A plan may take more, alone in its pass; UserError where it does not fit at all.
    """
    passes: list[list[tuple[str, int, int]]] = [[]]
    left = room
    for policy, number, one in itertools.product(POLICIES, range(len(sizes[0])), range(len(groups))):
        ahead = window if policy == POLICIES[0] else 0
        needed = planner_bytes(groups[one].rows, sizes[one][number], groups[one].unique, ahead, batches=steps)
        if needed > left and passes[-1]:
            passes.append([])
            left = room
        if needed > left:
            require_memory(needed)
        passes[-1].append((policy, number, one))
        left -= needed
    return passes


def _optima(group: Group, sizes: Sequence[int], steps: int, window: int) -> Simulation:
    """Return what finds the best that caches of these sizes could do."""
    others = group.costs, group.host
    return Simulation(group.rows, sizes, steps, None, window, group.costs, policies=(), others=others)


def require_memory(needed: int) -> None:
    """Raise UserError where planners of so many bytes do not fit."""
    free = available_bytes()
    if needed > free:
        raise UserError(
            f"the simulation needs {format_bytes(needed)} for a cache's plan, but "
            f"{format_bytes(free)} of host memory are free; "
            "use a smaller batch size or window"
        )


def curves_of(
    groups: list[Group], sizes: list[list[int]], ended: list[dict[str, list[Simulated]]], bus: Bus
) -> Curves:  # fmt: skip
    """Return the points of each policy, of simulations of each group that have ended."""
    return {
        policy: [
            Point([mine[i] for mine in sizes], [one[policy][i] for one in ended], groups, bus)
            for i in range(len(sizes[0]))
        ]
        for policy in ended[0]
        if all(policy in one for one in ended)
    }
