"""Planners of every policy and size over one pass of batches: what caches would do, without rows."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.cache.optimum import optimal
from hostdev.cache.options import POLICIES
from hostdev.cache.planner import Planner, Statistics
from hostdev.cache.prices import Costs
from hostdev.kernels.unique import count_uses, unique

OPTIMUM = "optimum"
_MOST_RECORDED = 1 << 25  # unique ids, for the optimum


class Simulation:
    """Caches of the tables of a group, of every policy and several sizes, over the same batches.

    rows    of the tables
    sizes   of the caches, in rows
    steps   batches to come; what is returned is about the second half of them
    counts  [V], for "static"; without them it is left out
    window  batches that lookahead knows in advance
    costs   of a row's ways, which lookahead keeps low
    """

    def __init__(
        self,
        rows: int,
        sizes: Sequence[int],
        steps: int,
        counts: Any,
        window: int,
        costs: Costs = Costs(),  # noqa: B008
    ) -> None:
        self._rows, self._sizes, self._steps, self._half = rows, list(sizes), steps, steps // 2
        self.policies = [policy for policy in POLICIES if policy != "static" or counts is not None]
        self._planners = {
            (policy, number): Planner(rows, size, policy, window=window, counts=counts, costs=costs)
            for policy in self.policies
            for number, size in enumerate(sizes)
        }
        self._at_half = {key: Statistics() for key in self._planners}
        self._planned = dict.fromkeys(self._planners, 0)
        self._recorded: list[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]] = []
        self._room = _MOST_RECORDED

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Take in the next batch: all its ids, int32 or int64 [N]."""
        found, inverse = unique(ids)
        uses = count_uses(inverse, len(found))
        self._room -= len(found)
        if self._room >= 0:
            self._recorded.append((found, uses))
        for key, planner in self._planners.items():
            planner.announce(found, uses)
            if len(planner) > planner.window:
                self._plan(key)

    def _plan(self, key: tuple[str, int]) -> None:
        self._planners[key].plan()
        self._planned[key] += 1
        if self._planned[key] == self._half:
            self._at_half[key] = replace(self._planners[key].statistics)

    def end(self) -> dict[str, list[Statistics]]:
        """Return what the caches of each policy have done, by size; the optimum's where its batches fit in memory."""
        for key, planner in self._planners.items():
            while len(planner):
                self._plan(key)
        numbers = range(len(self._sizes))
        found = {
            policy: [_since(self._planners[policy, i].statistics, self._at_half[policy, i]) for i in numbers]
            for policy in self.policies
        }
        if len(self._recorded) == self._steps:
            found[OPTIMUM] = [optimal(self._recorded, self._rows, size, since=self._half) for size in self._sizes]
        return found


def _since(total: Statistics, before: Statistics) -> Statistics:
    return Statistics(**{name: value - getattr(before, name) for name, value in vars(total).items()})


def add_up(parts: Iterable[Statistics]) -> Statistics:
    """Return the sums over several caches that see the same batches."""
    total = Statistics()
    for part in parts:
        total = Statistics(**{name: value + getattr(part, name) for name, value in vars(total).items()})
        total.batches = part.batches
    return total
