"""The plan of a batch, statistics over batches, and the numbering of a batch's rows in the plan's order."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hostdev.cache import planning
from hostdev.kernels.arrays import AnyIds, Positions, identity
from hostdev.kernels.pool import KernelTask, ranges, run_tasks

_GRAIN = 1 << 14


class Plan(NamedTuple):
    """The plan for a batch's unique ids [U], whose positions are in three groups: `hits`, `admitted` and `passed`.

    On the device, the batch's rows are in the order of these groups; within a group, positions ascend.
    """

    ids: AnyIds  # [U]
    hits: Positions  # [H], cached before the batch
    hit_slots: Positions  # [H], the slots of the hits
    admitted: Positions  # [A], cached from the end of the batch's step
    admitted_slots: Positions  # [A]: first free slots, then the slots of evicted rows, in the order of `evicted`
    passed: Positions  # [M], bypassing rows: looked up and updated on the host
    evicted: AnyIds  # [E], rows that leave at the end of the batch's step, before the admitted rows enter
    evicted_slots: Positions  # [E], the slots of the evicted rows

    @property
    def reads(self) -> AnyIds:
        """The rows that the batch reads from the host: bypassing, then admitted rows, [M + A]."""
        return np.concatenate([self.ids[self.passed], self.ids[self.admitted]])

    @property
    def writes(self) -> AnyIds:
        """The host rows that the batch writes: bypassing, then evicted rows, [M + E]."""
        return np.concatenate([self.ids[self.passed], self.evicted])

    @property
    def cached(self) -> AnyIds:
        """The rows on the device: hits, then admitted rows, [H + A]."""
        return np.concatenate([self.ids[self.hits], self.ids[self.admitted]])

    @property
    def order(self) -> Positions:
        """The positions of the ids in the order of their rows on the device, int32 [U]."""
        return np.concatenate([self.hits, self.admitted, self.passed])

    @property
    def places(self) -> Positions:
        """The position of each id's row on the device, int32 [U]: the inverse of `order`."""
        places = np.empty(len(self.ids), np.int32)
        places[self.order] = identity(len(places))
        return places


@dataclass
class Statistics:
    """Totals over batches; a use is a hit if its row was cached before the batch."""

    batches: int = 0
    uses: int = 0
    hits: int = 0
    unique: int = 0
    unique_hits: int = 0
    admitted: int = 0
    evicted: int = 0

    @property
    def passed(self) -> int:
        """Unique rows that bypassed the cache, summed over batches."""
        return self.unique - self.unique_hits - self.admitted

    def bytes_moved(self, passing: int, whole: int) -> tuple[int, int]:
        """Return the bytes of the rows sent to the device, and of the rows sent to the host.

        Args:
            passing: Bytes of a bypassing row.
            whole: Bytes of an admitted or evicted row, including its optimizer state.
        """
        return self.passed * passing + self.admitted * whole, self.passed * passing + self.evicted * whole

    @property
    def hit_rate(self) -> float:
        """Hits divided by uses."""
        return self.hits / self.uses if self.uses else 0.0

    @property
    def unique_hit_rate(self) -> float:
        """Hits divided by uses, counting each unique row of a batch once."""
        return self.unique_hits / self.unique if self.unique else 0.0


def renumber(inverse: Positions, places: Positions) -> Positions:
    """Return places[inverse], int32 [N]: the inverse after each unique row has moved to its position in `places`."""
    return take(inverse, places, 0)[0]


def take(inverse: Positions, places: Positions, below: int) -> tuple[Positions, int]:
    """Return places[inverse], int32 [N], and how many of its values are less than `below`."""
    out = np.empty_like(inverse)
    pieces = len(ranges(len(inverse), _GRAIN))
    counts = np.zeros(pieces, np.int64)
    run_tasks(
        [KernelTask(planning.take, len(inverse), _GRAIN, pieces, (inverse, places, np.int32(below), out, counts))]
    )
    return out, int(counts.sum())
