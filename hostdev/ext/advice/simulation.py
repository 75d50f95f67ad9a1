"""Simulation of a cache of one policy and size, and of the optimum, over known batches; only a cache's planner runs."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.cache import bound
from hostdev.cache.bound import optimal, optimum_fits
from hostdev.cache.plan import Statistics
from hostdev.cache.planner import Planner
from hostdev.cache.prices import Costs

OPTIMUM = "optimum"
_MOST_RECORDED = 1 << 25  # maximum number of unique ids that `Optimum` records
_VISITS = 1e8  # approximate number of uses that the computation of a bound visits

UniqueIds = tuple[npt.NDArray[Any], npt.NDArray[np.int32]]  # a batch's unique ids [U], and how often it uses each [U]


class Simulated(NamedTuple):
    """Results of a cache, or of the optimum; each figure of the optimum may come from a different cache."""

    statistics: Statistics
    planning: float = 0.0  # seconds of planning, for the batches that `statistics` covers
    least: tuple[float, ...] = ()  # for the optimum: the lowest cost for each of its `costs`


class SimulatedCache:
    """A cache for a group of tables.

    Args:
        rows: Number of rows of each table.
        size: Size of the cache, in rows.
        policy: The policy.
        steps: Number of batches; results cover the second half of them.
        window: Number of batches that lookahead knows in advance.
        counts: Uses of each row, [V], for "static", and for "lookahead" if it is to know them; else None.
        costs: Costs of moving a row, which lookahead minimizes.
    """

    def __init__(
        self,
        rows: int,
        size: int,
        policy: str,
        steps: int,
        window: int,
        counts: Any = None,  # Any: an array of any integers, or None
        costs: Costs = Costs(),  # noqa: B008
    ) -> None:
        self._planner = Planner(rows, size, policy, window=window, counts=counts, costs=costs)
        self._half, self._planned, self._seconds = steps // 2, 0, 0.0
        self._at_half = Simulated(Statistics())

    def add(self, ids: npt.NDArray[Any], uses: npt.NDArray[np.int32]) -> None:
        """Add the next batch: its unique ids [U], and how often it uses each id, int32 [U]."""
        start = time.perf_counter()
        self._planner.announce(ids, uses)
        self._seconds += time.perf_counter() - start
        if len(self._planner) > self._planner.window:
            self._plan()

    def _plan(self) -> None:
        start = time.perf_counter()
        self._planner.plan()
        self._seconds += time.perf_counter() - start
        self._planned += 1
        if self._planned == self._half:
            self._at_half = Simulated(replace(self._planner.statistics), self._seconds)

    def end(self) -> Simulated:
        """Plan the announced batches, and return the results."""
        while len(self._planner):
            self._plan()
        before, total = self._at_half, self._planner.statistics
        since = Statistics(**{name: value - getattr(before.statistics, name) for name, value in vars(total).items()})
        return Simulated(since, self._seconds - before.planning)


class Optimum:
    """The best caches for a group of tables: the most hits, and the lowest costs. Records up to 2**25 unique ids.

    Args:
        rows: Number of rows of each table.
        sizes: Sizes of the caches, in rows.
        steps: Number of batches; results cover the second half of them.
        costs: Several costs of moving a row, for example in bytes and in nanoseconds.
    """

    def __init__(self, rows: int, sizes: Sequence[int], steps: int, costs: Sequence[Costs]) -> None:
        self._rows, self._sizes, self._steps, self._costs = rows, sizes, steps, costs
        self._recorded: list[UniqueIds] = []
        self._room = _MOST_RECORDED

    def add(self, ids: npt.NDArray[Any], uses: npt.NDArray[np.int32]) -> None:
        """Add the next batch, as `SimulatedCache.add` does."""
        self._room -= len(ids)
        if self._room >= 0:
            self._recorded.append((ids, uses))

    def end(self) -> list[Simulated]:
        """Return the results of the best caches of each size; [] if there were too many ids, or memory is too small.

        For the lowest costs, a cache may begin the second half with any rows.
        """
        unique, half = sum(len(ids) for ids, _ in self._recorded), self._steps // 2
        if len(self._recorded) < self._steps or not bound.fits(unique, self._steps):
            return []
        if not optimum_fits(self._recorded, self._rows, max(self._sizes, default=0)):
            return []
        uses = bound.uses_of([ids for ids, _ in self._recorded[half:]])
        return [
            Simulated(
                optimal(self._recorded, self._rows, size, since=half),
                least=tuple(bound.least_cost(uses, size, costs, first=0.0, visits=_VISITS) for costs in self._costs),
            )
            for size in self._sizes
        ]


def add_up(parts: Iterable[Statistics]) -> Statistics:
    """Return the sum of the statistics of several caches on the same batches; each batch counts once."""
    total = Statistics()
    for part in parts:
        total = Statistics(**{name: value + getattr(part, name) for name, value in vars(total).items()})
        total.batches = part.batches
    return total
