"""Which rows a cache admits, evicts and lets pass: a function of the batches' ids alone, whatever the timing.

A row enters when a batch uses it and leaves when a better one needs its slot; any row may take any slot. Both happen
after the batch's step, so rows that the batch uses may leave too. What is not worth its transfers passes by.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.cache import planning
from hostdev.cache.options import MOST_WINDOW, POLICIES, WINDOW
from hostdev.cache.planning import KEYS, LOOKAHEAD, NEVER, STATIC, STEPS_PER_OCTAVE
from hostdev.kernels.buffers import aligned_empty, scratch
from hostdev.kernels.pool import parallel_for, ranges, run_tasks
from hostdev.kernels.unique import count_uses

Ids = npt.NDArray[Any]
Positions = npt.NDArray[np.int32]

_GRAIN = 4096
_SLOTS_GRAIN = 1 << 15
_SCANNED, _SCANNED_PER_NEWCOMER = 1 << 16, 4  # slots


class Plan(NamedTuple):
    """What becomes of a batch's unique ids [U]. Each of their positions is in one of three groups, ascending."""

    ids: Ids  # [U]
    hits: Positions  # [H], cached before the batch
    hit_slots: Positions  # [H]
    admitted: Positions  # [A], cached from the end of the batch's step on
    admitted_slots: Positions  # [A]
    passed: Positions  # [M], looked up and updated on the host
    evicted: Ids  # [E], rows that leave at the end of the batch's step, before others are admitted
    evicted_slots: Positions  # [E]

    @property
    def reads(self) -> Ids:
        """The rows that the batch takes from the host: those that pass by, then those that are admitted, [M + A]."""
        return np.concatenate([self.ids[self.passed], self.ids[self.admitted]])

    @property
    def writes(self) -> Ids:
        """The rows of the host that the batch writes: those that pass by, then those that are evicted, [M + E]."""
        return np.concatenate([self.ids[self.passed], self.evicted])


@dataclass
class Statistics:
    """Sums over batches. A use is a hit if its row was cached before the batch came."""

    batches: int = 0
    uses: int = 0
    hits: int = 0
    unique: int = 0
    unique_hits: int = 0
    admitted: int = 0
    evicted: int = 0

    @property
    def passed(self) -> int:
        """Unique rows that passed by, summed over batches."""
        return self.unique - self.unique_hits - self.admitted

    def bytes_moved(self, passing: int, whole: int) -> tuple[int, int]:
        """Return the bytes of rows that went to the device and to the host.

        passing  of a row that passes by
        whole    of a row with its slots, which is admitted or evicted
        """
        return self.passed * passing + self.admitted * whole, self.passed * passing + self.evicted * whole

    @property
    def hit_rate(self) -> float:
        """Hits by uses."""
        return self.hits / self.uses if self.uses else 0.0

    @property
    def unique_hit_rate(self) -> float:
        """Hits by the batches' unique rows."""
        return self.unique_hits / self.unique if self.unique else 0.0


def planner_bytes(rows: int, capacity: int, window: int) -> int:
    """Return the bytes of a planner."""
    return rows * (32 if window <= 16 else 64) + capacity * 24


class Planner:
    """Plans a cache of `capacity` of `rows` rows.

    rows      V, at most 2^31 - 1
    capacity  slots, in 0..V
    policy    "lookahead": the density of the next use within the window, the frequency beyond it; "lru"; "lfu", by the
              uses so far, of rows that are not cached too; "static": those with the largest `counts`
    window    how many batches the caller announces ahead of the one that is planned, at most 32; lookahead only
    counts    [V], how often each row is used: "static" needs it, others ignore it
    moves     rows that go each way when one is exchanged, 1 + slots of the optimizer: lookahead exchanges rows only for
              a gain of a factor 1 + moves / 6 in density

    Memory: 32 bytes a row, 64 for a window above 16, and 24 a slot; the ids of the announced batches are kept.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        policy: str = "lookahead",
        *,
        window: int = WINDOW,
        counts: npt.NDArray[Any] | None = None,
        moves: float = 3.0,
    ) -> None:
        kind = _kind(policy)
        if not 0 <= capacity <= rows < NEVER:
            raise ValueError(f"a cache needs 0 <= capacity <= rows < {NEVER}, not {capacity} of {rows}")
        if not 0 <= window <= MOST_WINDOW:
            raise ValueError(f"the window must be in 0..{MOST_WINDOW} batches, not {window}")
        self.rows, self.capacity, self.policy = rows, capacity, policy
        self.window = window if kind == LOOKAHEAD else 0
        self.statistics = Statistics()
        self.filled = 0  # slots taken; one that was never becomes free again
        self.slot_ids = np.full(capacity, -1, np.int64)  # the row in each slot
        self._kind = kind
        self._margin = round(math.log2(1 + moves / 6) * STEPS_PER_OCTAVE) if kind == LOOKAHEAD else 0
        self._ring = 16 if self.window <= 16 else 32
        self._coming = aligned_empty((rows, 2 * self._ring), np.uint8)  # 32 or 64 bytes a row: within a cache line
        self._coming.fill(0)
        self._rows, self._masks = self._coming.view(np.int32), self._coming.view(np.uint64)
        self._rows[:, planning.SLOT] = -1
        if kind == STATIC:
            self._rows[:, planning.COUNT] = _most_used(counts, rows, capacity)
        self._slots = aligned_empty((max(capacity, 1), 4), np.int32)
        self._scanned = 0  # slots, so far, for those to leave
        self._announced: deque[tuple[Ids, Positions]] = deque()
        self._planned = 0  # batches

    def __len__(self) -> int:
        """Return the number of batches announced and not yet planned."""
        return len(self._announced)

    def announce(self, ids: Ids, uses: Positions) -> None:
        """Take in the next batch of the future: at most `window` + 1 may wait to be planned.

        ids   int32 or int64 [U], unique, each in [0, V) (not checked)
        uses  int32 [U], how often the batch has each
        """
        if len(self._announced) > self.window:
            raise ValueError(f"{len(self._announced)} batches are announced; plan one before the next")
        number = self._planned + len(self._announced)
        self._announced.append((ids, uses))
        args = (ids, uses, number, self._ring, self._kind, self._rows, self._masks, self._coming, self._slots)
        parallel_for(planning.announce, len(ids), *args, grain=_GRAIN)

    def plan(self) -> Plan:
        """Plan the earliest announced batch."""
        ids, uses = self._announced.popleft()
        number, U = self._planned, len(ids)
        self._planned += 1
        terms = (np.float32(1 / (self._planned + len(self._announced))), np.float32(1 / (self.window + 1)))
        slot_of, keys = scratch("slot_of", (U,), np.int32), scratch("keys", (U,), np.uint16)
        pieces = ranges(U, _GRAIN)
        histograms, totals = np.zeros((len(pieces), KEYS), np.int32), np.zeros((len(pieces), 2), np.int64)
        known = (self._rows, self._masks, self._coming, self._slots)
        shared = (ids, uses, number, self._ring, self._kind, *terms, *known, slot_of, keys, histograms, totals)
        run_tasks([(planning.classify, start, stop, (*shared, i)) for i, (start, stop) in enumerate(pieces)])
        hits, used = (int(total) for total in totals.sum(0))
        admitted, slots, evicted_slots = self._exchange(number, terms, keys, histograms.sum(0))
        evicted = self.slot_ids[evicted_slots].astype(ids.dtype)
        parallel_for(planning.evict, len(evicted), evicted, self._rows, grain=_GRAIN)
        entering = (number, self._ring, ids, admitted, slots, *known, self.slot_ids)
        parallel_for(planning.install, len(admitted), *entering, grain=_GRAIN)
        hit, hit_slots = np.empty((2, hits + 1), np.int32)
        passed = np.empty(U - hits - len(admitted) + 1, np.int32)
        planning.split(slot_of, admitted, hit, hit_slots, passed)
        self._count(U, int(uses.sum()), hits, used, len(admitted), len(evicted))
        return Plan(ids, hit[:-1], hit_slots[:-1], admitted, slots, passed[:-1], evicted, evicted_slots)

    def restore(self, slot_ids: npt.NDArray[np.int64]) -> None:
        """Forget what is announced, and take over these rows [C] as cached, -1 for none; the frequencies stay."""
        self._announced.clear()
        self.slot_ids[:] = slot_ids
        self._rows[:, planning.SLOT] = -1
        self._masks[:, 0] = 0
        taken = np.flatnonzero(slot_ids >= 0)
        self.filled = len(taken)
        self._rows[slot_ids[taken], planning.SLOT] = taken
        self._slots[: len(slot_ids), planning.NEXT] = NEVER

    def _exchange(
        self, number: int, terms: tuple[Any, ...], keys: npt.NDArray[np.uint16], newcomers: npt.NDArray[Any]
    ) -> tuple[Positions, Positions, Positions]:
        """Return who is admitted, the slots that they get, and those of them that were taken."""
        willing = int(newcomers[1:].sum())
        free = min(self.capacity - self.filled, willing)
        swaps, victims, tasks, turned = 0, np.empty(1, np.int32), [], np.uint16(KEYS - 1)
        first = last = 0
        if willing > free and self._kind != STATIC:
            first, last = self._to_scan(willing - free)
            resident_keys = scratch("resident_keys", (last - first,), np.uint16)
            pieces = [(first + start, first + stop) for start, stop in ranges(last - first, _SLOTS_GRAIN)]
            histograms = np.zeros((len(pieces), KEYS), np.int32)
            shared = (number, self._kind, *terms, self._slots, first, resident_keys, histograms)
            run_tasks([(planning.score, start, stop, (*shared, i)) for i, (start, stop) in enumerate(pieces)])
            residents = histograms.sum(0, dtype=np.int64)
            swaps = int(planning.exchanges(_without_best(newcomers, free), residents, self._margin))
            if swaps:
                victims = np.empty(swaps + 1, np.int32)
                tasks.append((planning.pick, *_threshold(residents, swaps), (resident_keys, turned, victims)))
        count = free + swaps
        admitted = np.empty(count + 1, np.int32)
        if count:
            tasks.append((planning.pick, *_threshold(newcomers[::-1], count), (keys, np.uint16(0), admitted)))
        run_tasks(tasks)
        fresh = np.arange(self.filled, self.filled + free, dtype=np.int32)
        self.filled += free
        leaving = victims[:-1] + np.int32(first)
        return admitted[:count], np.concatenate([fresh, leaving]), leaving

    def _to_scan(self, newcomers: int) -> tuple[int, int]:
        """The slots among which those that leave are looked for: all, or of very many a part in turn."""
        most = max(_SCANNED, _SCANNED_PER_NEWCOMER * newcomers)
        if self.filled <= most:
            return 0, self.filled
        first = min(self._scanned, self.filled - most)
        self._scanned = first + most if first + most < self.filled else 0
        return first, first + most

    def _count(self, unique: int, uses: int, hits: int, used: int, admitted: int, evicted: int) -> None:
        total = self.statistics
        total.batches += 1
        total.uses += uses
        total.hits += used
        total.unique += unique
        total.unique_hits += hits
        total.admitted += admitted
        total.evicted += evicted


def _kind(policy: str) -> int:
    if policy not in POLICIES:
        raise ValueError(f"the policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    return POLICIES.index(policy)


def _most_used(counts: npt.NDArray[Any] | None, rows: int, capacity: int) -> npt.NDArray[np.int32]:
    """Mark the most frequent rows, int32 [V]: the first of equally frequent ones."""
    shape = None if counts is None else np.shape(counts)
    if counts is None or shape != (rows,):
        raise ValueError(f"the policy static needs counts of shape ({rows},), not {shape}")
    chosen = np.zeros(rows, np.int32)
    chosen[np.argsort(-np.asarray(counts, np.float64), kind="stable")[:capacity]] = 1
    return chosen


def _threshold(histogram: npt.NDArray[Any], count: int) -> tuple[int, int]:
    """Return the key down to which there are at least `count`, and how many of those at that key are among the first.

    histogram  [KEYS], the largest key first
    """
    before = np.cumsum(histogram)
    place = int(np.searchsorted(before, count))
    return KEYS - 1 - place, int(count - (before[place] - histogram[place]))


def _without_best(histogram: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Return a histogram without the `count` largest keys."""
    left = histogram.astype(np.int64)
    if count:
        key, ties = _threshold(left[::-1], count)
        left[key + 1 :] = 0
        left[key] -= ties
    return left


def warm_up(id_dtype: npt.DTypeLike) -> None:
    """Compile, or load from numba's cache, all kernels of a planner for ids of this dtype."""
    planner = Planner(8, 1, window=1)
    for row, uses in ((0, 1), (1, 8), (1, 8), (2, 1)):
        planner.announce(np.array([row], id_dtype), count_uses(np.zeros(uses, np.int32), 1))
        if len(planner) > 1:
            planner.plan()
