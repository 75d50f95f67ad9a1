"""Simulation of caches of several policies and sizes in one pass over the batches; only their planners run."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.cache import bound
from hostdev.cache.bound import optimal, optimum_fits
from hostdev.cache.options import POLICIES
from hostdev.cache.plan import Statistics
from hostdev.cache.planner import Planner
from hostdev.cache.prices import Costs
from hostdev.kernels.unique import count_occurrences, unique

OPTIMUM = "optimum"
_MOST_RECORDED = 1 << 25  # unique ids, for the optimum
_VISITS = 1e8  # uses visited for each bound


class Simulated(NamedTuple):
    """Results of a cache, or of the optimum; each figure of the optimum may come from a different cache."""

    statistics: Statistics
    planning: float = 0.0  # seconds, over the same batches
    least: tuple[float, ...] = ()  # for the optimum: the lowest cost for each of `others`


class Simulation:
    """A simulation of caches for a group of tables, with several policies and sizes, over the same batches.

    Args:
        rows: Number of rows of each table.
        sizes: Sizes of the caches, in rows.
        steps: Number of batches; results cover the second half of them.
        counts: Uses of each row, [V], for "static", or None to omit that policy.
        window: Number of batches that lookahead knows in advance.
        costs: Costs of moving a row, which lookahead minimizes.
        told: Whether lookahead also gets the counts.
        policies: A subset of `POLICIES`.
        optimum: Whether to find the optimum, too: the most hits, and the lowest cost for each of `others`.
        others: Other costs of moving a row, for example in bytes or nanoseconds, for which the optimum is found.
    """

    def __init__(
        self,
        rows: int,
        sizes: Sequence[int],
        steps: int,
        counts: Any,
        window: int,
        costs: Costs = Costs(),  # noqa: B008
        *,
        told: bool = True,
        policies: Sequence[str] = POLICIES,
        optimum: bool = True,
        others: Sequence[Costs] = (),
    ) -> None:
        self._rows, self._sizes, self._steps, self._half = rows, list(sizes), steps, steps // 2
        self._others = others
        self.policies = [policy for policy in policies if policy != "static" or counts is not None]
        known = {policy: counts if told or policy == "static" else None for policy in self.policies}
        self._planners = {
            (policy, number): Planner(rows, size, policy, window=window, counts=known[policy], costs=costs)
            for policy in self.policies
            for number, size in enumerate(sizes)
        }
        self._at_half = {key: Simulated(Statistics()) for key in self._planners}
        self._planned = dict.fromkeys(self._planners, 0)
        self._seconds = dict.fromkeys(self._planners, 0.0)
        self._recorded: list[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]] = []
        self._room = _MOST_RECORDED if optimum else -1

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Add the next batch: all its ids, int32 or int64 [N]."""
        found, inverse = unique(ids)
        self.add_unique(found, count_occurrences(inverse, len(found)))

    def add_unique(self, ids: npt.NDArray[Any], uses: npt.NDArray[np.int32]) -> None:
        """Add the next batch: its unique ids [U], and how often it uses each id, int32 [U]."""
        self._room -= len(ids)
        if self._room >= 0:
            self._recorded.append((ids, uses))
        for key, planner in self._planners.items():
            start = time.perf_counter()
            planner.announce(ids, uses)
            self._seconds[key] += time.perf_counter() - start
            if len(planner) > planner.window:
                self._plan(key)

    def _plan(self, key: tuple[str, int]) -> None:
        start = time.perf_counter()
        self._planners[key].plan()
        self._seconds[key] += time.perf_counter() - start
        self._planned[key] += 1
        if self._planned[key] == self._half:
            self._at_half[key] = Simulated(replace(self._planners[key].statistics), self._seconds[key])

    def end(self) -> dict[str, list[Simulated]]:
        """Return, by policy, the results for each size; and those of the optimum if host memory suffices to find it."""
        for key, planner in self._planners.items():
            while len(planner):
                self._plan(key)
        numbers = range(len(self._sizes))
        found = {policy: [self._since_half((policy, i)) for i in numbers] for policy in self.policies}
        if len(self._recorded) == self._steps and self._can_know():
            found[OPTIMUM] = self._optimum()
        return found

    def _since_half(self, key: tuple[str, int]) -> Simulated:
        before, total = self._at_half[key], self._planners[key].statistics
        since = Statistics(**{name: value - getattr(before.statistics, name) for name, value in vars(total).items()})
        return Simulated(since, self._seconds[key] - before.planning)

    def _can_know(self) -> bool:
        unique = sum(len(ids) for ids, _ in self._recorded)
        return bound.fits(unique, self._steps) and optimum_fits(self._recorded, self._rows, max(self._sizes, default=0))

    def _optimum(self) -> list[Simulated]:
        """Return the results of the best caches over the second half of the batches.

        For the lowest costs, a cache may begin the second half with any rows.
        """
        uses = bound.uses_of([ids for ids, _ in self._recorded[self._half :]])
        return [
            Simulated(
                optimal(self._recorded, self._rows, size, since=self._half),
                least=tuple(bound.least_cost(uses, size, costs, first=0.0, visits=_VISITS) for costs in self._others),
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
