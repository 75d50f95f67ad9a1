"""The planner of a cache: it decides, from the ids of batches in order, which rows to admit, evict and bypass.

A row may enter when a batch uses it, and leaves when a better row needs its slot; any row may take any slot. Rows enter
and leave after the batch's step, so even rows of the batch may leave. Rows that are not worth their transfers bypass
the cache.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.cache import planning
from hostdev.cache.directory import ROW, AllRows, Directory, find_quantile, most_bytes
from hostdev.cache.next_uses import NextUses
from hostdev.cache.options import MOST_WINDOW, POLICIES, WINDOW
from hostdev.cache.plan import Plan, Statistics, take
from hostdev.cache.planning import FINE_BITS, KEYS, LOOKAHEAD, NEAREST, STATIC, PlanContext
from hostdev.cache.prices import MOST_BITS, Costs, get_price_index, prices
from hostdev.core.disk_storage import MOST_DISK_WINDOW
from hostdev.kernels.arrays import AnyIds, Positions, scratch
from hostdev.kernels.pool import KernelTask, parallel_for, ranges, run_tasks
from hostdev.kernels.unique import count_occurrences

BUDGET = 192 << 20  # bytes; if all rows fit in it, a directory would only cost time
MOST_ROWS = 2**31 - 1  # positions and slots are int32
_GRAIN = 1 << 14
# (a, b): per batch, a newcomer must save more than a * (saving of the C-th likeliest row) + b, in units of half a
# bypass. Both are lower without counts, since more rows are then unexpected.
_GATE, _OPEN_GATE = (0.7, 0.045), (0.5, 0.03)
_SAMPLED, _SAMPLED_EVERY = 1024, 4  # rows sampled every 4 batches to estimate the C-th largest probability
_DECAY = 2 ** (-1 / 15)  # factor by which recent uses decay per batch
_WATCHED, _WATCHED_OF_BATCH = 1024, 64  # rows used to judge the counts, and how many of them a batch adds
_JUDGED_OF = 4  # in each batch, one in four watched rows is judged
_FORGOTTEN = 0.97  # decay of the scores per batch
# Candidates for the weight of the counts, measured in recent uses.
_WEIGHTS = np.array([planning.SURE, 64, 32, 16, 8, 4, 2, 1, 0.5], np.float32)
_DECAYS = np.float32(_DECAY) ** np.arange(planning.DECAYS, dtype=np.float32)
_SCANNED, _SCANNED_PER_SWAP = 1 << 13, 8  # slots to search for evictions: minimum, and per swap of the last batch


def planner_bytes(
    rows: int, capacity: int, unique: int = 0, window: int = WINDOW, *, batches: int | None = None, budget: int = BUDGET
) -> int:
    """Return a planner's maximum size in bytes, which depends on the batches unless all rows fit the budget.

    Args:
        rows: V.
        capacity: Number of slots.
        unique: Number of unique ids per batch; 0 omits the bytes that batches add.
        window: The planner's window; 0 for a policy without lookahead.
        batches: The number of batches, if known.
        budget: As for `Planner`.
    """
    if rows * ROW <= budget:
        return rows * ROW + capacity * 4
    seen = rows if batches is None else min(rows, batches * unique)
    slots = min(capacity, seen)
    room = most_bytes(seen, slots, window, _get_least_rows(budget), unique)
    return room + slots * 4 + (window + 1) * unique * 4


class Planner:
    """A planner that decides which of a table's rows a cache of `capacity` slots holds.

    Memory: 32 bytes per row and 4 per slot. If there are too many rows for the budget: 4 bytes per slot, 4 per id of an
    announced batch, and about 40 for each row whose data is kept. Data is kept for the rows that have a slot or occur
    in an announced batch, for a quarter as many other rows, and for the rows of two batches; but for at least 3 million
    rows. The planner does not copy `counts`, which may be in a file, or the ids of announced batches.

    Args:
        rows: V, at most 2^31 - 1.
        capacity: Number of slots, in 0..V.
        policy: "lookahead" minimizes the cost, given the uses within the window and the probability of later uses;
            "lru" keeps the rows used last, "lfu" the rows used most so far, cached or not, and "static" the rows with
            the largest `counts`. "nearest" keeps the rows with the nearest announced or expected use; it is for caches
            that each row of a batch must enter. If more than 8,192 slots are occupied, a batch may
            search only some for evictions.
        window: Number of batches announced in addition to the one that is planned; only for lookahead and nearest.
            Lookahead allows at most 32, of which it considers the first 16 individually, but all of them count for
            probabilities.
        counts: How often each row is used, [V], in any unit: required by "static". Lookahead weighs counts against
            recent uses by how well each predicts; other policies ignore counts.
        costs: Costs of a bypass, an admission and an eviction; only for lookahead.
        budget: Bytes that the data of all rows may take. If these are too few, the data of only some rows is kept, in
            half of the budget, or more if needed.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        policy: str = "lookahead",
        *,
        window: int = WINDOW,
        counts: npt.NDArray[Any] | None = None,
        costs: Costs = Costs(),  # noqa: B008 (immutable)
        budget: int = BUDGET,
    ) -> None:
        kind = _kind(policy)
        if not 0 <= capacity <= rows <= MOST_ROWS:
            raise ValueError(f"a cache needs 0 <= capacity <= rows <= {MOST_ROWS}, not {capacity=} and {rows=}")
        most = MOST_DISK_WINDOW if kind == NEAREST else MOST_WINDOW
        if not isinstance(window, int | np.integer) or not 0 <= window <= most:
            raise ValueError(f"the window must be in 0..{most} batches, not {window!r}")
        if counts is not None and np.shape(counts) != (rows,):
            raise ValueError(f"counts must have the shape ({rows},), not {np.shape(counts)}")
        self.rows, self.capacity, self.policy = rows, capacity, policy
        self._looks_ahead = kind in (LOOKAHEAD, NEAREST)
        self.window = window if self._looks_ahead else 0
        self.statistics = Statistics()
        self.filled = 0  # occupied slots; only `restore` frees slots
        self._kind = kind
        self._margin = (1 << FINE_BITS) - 1 if kind == LOOKAHEAD else 0
        self._directory = (
            AllRows(rows, capacity)
            if rows * ROW <= budget
            else Directory(rows, capacity, self.window, _get_least_rows(budget))
        )
        self._slots = np.empty(capacity, np.int32)  # positions, in the directory, of the first `filled` slots' rows
        self._exchanging = False  # True: an interruption left the slots inconsistent
        if kind == STATIC:
            if counts is None:
                raise ValueError(f"the policy static needs counts of shape ({rows},), not None")
            self._directory.choose(np.asarray(counts))
        self._bits = min(self.window, MOST_BITS)
        self._indices = prices(costs, self._bits).reshape(2, -1)  # used only by lookahead
        self._counts = (
            np.asarray(counts) if kind == LOOKAHEAD and counts is not None else None
        )  # kept until the first batch shows how many uses a batch has
        self._least, self._gate, self._counted = np.float32(0), 0, False  # from the counts; `_counted`: if usable
        self._least_of_late, self._gate_of_late = np.float32(0), 0
        self._watched = np.empty(0, np.int32)  # rows used to judge the counts
        self._scores, self._believed = np.zeros(len(_WEIGHTS)), _WEIGHTS[0]
        self._scanned = 0  # the next slot to search for evictions
        self._swapped = 0  # evictions of the last batch
        self._announced: deque[tuple[AnyIds, Positions | int, AnyIds]] = deque()  # ids, uses, positions
        self._next_uses = NextUses(window) if kind == NEAREST else None
        self._planned = 0  # number of planned batches
        self._has_hits = True  # whether the statistics include the hits of the last planned batch

    def __len__(self) -> int:
        """Return the number of batches announced but not yet planned."""
        return len(self._announced)

    @property
    def is_settled(self) -> bool:
        """Whether no batch is announced, and no interrupted call has left a change incomplete."""
        return not self._announced and not self._exchanging and not self._next_uses

    @property
    def slot_ids(self) -> Positions:
        """The row in each slot, int32 [C]; -1 if the slot is free."""
        ids = np.full(self.capacity, -1, np.int32)
        ids[: self.filled] = self._directory.ids_of(self._slots[: self.filled])
        return ids

    @property
    def nbytes(self) -> int:
        """Current size of the planner in bytes, without the counts and the ids and uses of announced batches."""
        beside = sum(positions.nbytes for ids, _, positions in self._announced if positions is not ids)
        return self._directory.nbytes + self.filled * 4 + beside + (self._next_uses.nbytes if self._next_uses else 0)

    def announce(self, ids: AnyIds, uses: Positions | int) -> None:
        """Announce the next batch; at most `window` + 1 batches may wait to be planned.

        Args:
            ids: The unique ids, int32 or int64 [U], each in [0, V) (not checked).
            uses: How often the batch uses each id, int32 [U]. For lookahead, their sum is enough; `renumber` then
                counts the hits.
        """
        if isinstance(uses, int) and not self._looks_ahead:
            raise ValueError(f"the policy {self.policy} needs the uses of each id, not their sum")
        if len(self._announced) > self.window:
            raise ValueError(f"{len(self._announced)} batches are already announced; plan one before announcing more")
        if self._counts is not None and len(ids):
            self._store_probabilities(self._counts, uses if isinstance(uses, int) else int(uses.sum()))
            self._counts = None
        now = self._make_context(self._planned + len(self._announced))
        positions = self._directory.place(ids, self._planned)
        self._announced.append((ids, uses, positions))
        known = self._directory.rows, self._directory.values, _DECAYS
        if self._next_uses is None:
            of_each = None if isinstance(uses, int) else uses
            parallel_for(planning.announce, len(ids), positions, of_each, now, *known, grain=_GRAIN)
        else:
            self._next_uses.announce(positions, now, *known)
        if self._looks_ahead:
            self._learn(ids, now)

    def plan(self) -> Plan:
        """Plan the earliest announced batch."""
        now = self._make_context(self._planned + len(self._announced) - 1)
        ids, uses, positions = self._announced.popleft()
        U = len(ids)
        self._planned += 1
        if self._next_uses is not None:
            self._next_uses.plan(positions, self._directory.rows)
        known = (now, self._directory.rows, self._directory.values, _DECAYS, self._indices)
        hits, hit_slots, missed = (scratch(name, (U,), np.int32) for name in ("hits", "hit_slots", "missed"))
        keys = scratch("keys", (U,), np.uint16)
        pieces = ranges(U, _GRAIN)
        histograms, totals = np.zeros((len(pieces), KEYS), np.int32), np.zeros((len(pieces), 3), np.int64)
        of_each = None if isinstance(uses, int) else uses
        self._has_hits = of_each is not None
        shared = (positions, of_each, *known, hits, hit_slots, missed, keys, histograms, totals)
        run_tasks([KernelTask(planning.classify, U, _GRAIN, len(pieces), shared)])

        slots, leaving, first_in = self._choose(known, histograms.sum(0, dtype=np.int64))
        starts, stops = (np.array([edges[end] for edges in pieces], np.int64) for end in (0, 1))
        found, hit_uses, all_uses = totals.T
        admitted = np.empty(len(slots) + 1, np.int32)
        passed = np.empty(U - int(found.sum()) - len(slots) + 1, np.int32)
        planning.divide(*first_in, missed, keys, starts, stops - found, admitted, passed)
        evicted = np.empty(len(leaving), positions.dtype)
        plan = Plan(
            ids=ids,
            hits=_join_parts(hits, starts, starts + found),
            hit_slots=_join_parts(hit_slots, starts, starts + found),
            admitted=admitted[:-1],
            admitted_slots=slots,
            passed=passed[:-1],
            evicted=evicted,
            evicted_slots=leaving,
        )
        moved = (positions, plan.admitted, slots, evicted, self._directory.rows, self._slots)
        self._exchanging = True
        parallel_for(planning.exchange, len(slots), *moved, grain=_GRAIN)
        self.filled += len(slots) - len(leaving)
        self._exchanging = False
        self._swapped = len(leaving)
        if positions is not ids:
            plan = plan._replace(evicted=self._directory.ids_of(evicted).astype(ids.dtype))
        self._count(plan, int(hit_uses.sum()), uses if isinstance(uses, int) else int(all_uses.sum()))
        return plan

    def renumber(self, inverse: Positions, plan: Plan, places: Positions) -> Positions:
        """Return places[inverse], int32 [N]: for each of a batch's N ids, its row's position in the plan's order.

        This also counts the hits if the batch was announced without the uses of each id. So it may be called only once
        for a plan, and before the next plan; `places` is `plan.places`.
        """
        found, hits = take(inverse, places, len(plan.hits))
        if not self._has_hits:
            self.statistics.hits += hits
        return found

    def _make_context(self, latest: int) -> PlanContext:
        """Return the context for valuing rows; `latest` is the number of the last announced batch."""
        by_counts = self._counted and self._believed >= planning.SURE
        return PlanContext(
            number=self._planned,
            latest=latest,
            kind=self._kind,
            bits=self._bits,
            believed=self._believed,
            per_batch=np.float32((1 - _DECAY) / (1 - _DECAY ** (latest + 1))),
            per_announced=np.float32(0 if self._counted else 1 / (latest + 1)),
            least=self._least if by_counts else self._least_of_late,
            gate=self._gate if by_counts else self._gate_of_late,
        )

    def _learn(self, ids: AnyIds, now: PlanContext) -> None:
        """Weigh counts against recent uses by how well each predicted the rows of the last announced batch."""
        if now.latest > 0:
            self._scores *= _FORGOTTEN
            known = self._make_context(now.latest - 1)._replace(latest=now.latest)  # with the rates before this batch
            some = self._watched[now.latest % _JUDGED_OF :: _JUDGED_OF].copy()
            positions, rows, values = self._directory.look(some)
            planning.judge(positions, known, rows, values, _DECAYS, _WEIGHTS, self._scores)
            self._believed = _WEIGHTS[np.argmax(self._scores)]
        fresh = ids[:: max(1, len(ids) // _WATCHED_OF_BATCH)][:_WATCHED_OF_BATCH]
        self._watched = np.concatenate([self._watched, fresh.astype(np.int32)])[-_WATCHED:]
        if now.latest % _SAMPLED_EVERY == 0 and self.capacity:
            some = np.arange(0, self.rows, max(1, self.rows // _SAMPLED), dtype=np.int32)
            chances = np.empty(len(some), np.float32)
            positions, rows, values = self._directory.look(some)
            planning.likely(positions, self._make_context(now.latest), rows, values, _DECAYS, chances)
            self._least_of_late = find_quantile(chances, self.capacity / self.rows)
            self._gate_of_late = _get_gate(self._least_of_late, _OPEN_GATE)

    def _store_probabilities(self, counts: npt.NDArray[Any], uses: int) -> None:
        """Estimate from `counts` how likely a batch of `uses` ids is to use each row; store this, and thresholds."""
        total = float(counts.sum(dtype=np.float64))
        per_use = np.float32(uses / total) if total > 0 else np.float32(0)
        self._counted = bool(per_use > 0)  # False if all counts are 0, or their sum overflows
        if not self._counted or not self.capacity:
            return
        # A row that is used once per epoch is not worth a transfer.
        above = 1.0 if np.issubdtype(counts.dtype, np.integer) else -np.inf
        self._least = self._directory.expect(counts, per_use, above=above)
        self._gate = _get_gate(self._least, _GATE)

    def restore(self, slot_ids: Positions) -> None:
        """Discard announced batches, and set the row in each slot to `slot_ids` [C]; free slots are -1 and come last.

        The recorded uses of rows in planned batches are kept.
        """
        taken = np.flatnonzero(slot_ids >= 0)
        if len(taken) and taken[-1] >= len(taken):
            raise ValueError("slot_ids must have the free slots (-1) last, but a free slot precedes an occupied slot")
        for _, uses, positions in self._announced if self._kind != STATIC else ():
            added = 1 if self._looks_ahead else uses
            rows = self._directory.rows
            counts = rows[positions, planning.COUNT] - added  # an interrupted `announce` may have added only some
            rows[positions, planning.COUNT] = np.maximum(counts, 0)
        self._announced.clear()
        if self._next_uses is not None:
            self._next_uses.clear()
        self._exchanging = True
        self.filled = len(taken)
        self._slots[: self.filled] = self._directory.place(slot_ids[taken], self._planned)
        known = self._directory.known
        known[:, planning.SLOT] = -1
        last = known[:, planning.LAST]
        np.minimum(last, self._planned - 1, out=last)
        if self._next_uses is not None:
            self._next_uses.forget(known)
        known[self._slots[: self.filled], planning.SLOT] = taken
        self._exchanging = False

    def holds(self, slot_ids: Positions) -> bool:
        """Return whether the slots hold these rows, [C], where -1 stands for a free slot."""
        if self._exchanging:
            return False
        here = self._directory.ids_of(self._slots[: self.filled])
        return bool((slot_ids[self.filled :] < 0).all()) and np.array_equal(here, slot_ids[: self.filled])

    def _choose(
        self, known: tuple[Any, ...], newcomers: npt.NDArray[np.int64]
    ) -> tuple[Positions, Positions, tuple[int, int]]:
        """Return the slots of admitted rows, the slots of evicted rows, and the pair (key, ties).

        The admitted rows are those with a key above `key`, and the first `ties` rows with a key equal to it.
        """
        willing = int(newcomers[1:].sum())
        free = min(self.capacity - self.filled, willing)
        leaving = np.empty(0, np.int32)
        if willing > free and self._kind != STATIC:
            first, last = self._get_slots_to_scan()
            keys = scratch("resident_keys", (last - first,), np.uint16)
            pieces = len(ranges(last - first, _GRAIN))
            histograms = np.zeros((pieces, KEYS), np.int32)
            shared = (self._slots[first:last], *known, keys, histograms)
            run_tasks([KernelTask(planning.score, last - first, _GRAIN, pieces, shared)])
            residents = histograms.sum(0, dtype=np.int64)
            swaps = int(planning.exchanges(_drop_best(newcomers, free), residents, self._margin))
            if swaps:
                leaving = np.empty(swaps + 1, np.int32)
                planning.worst(*_find_key(residents, swaps), keys, leaving)
                leaving = leaving[:-1] + np.int32(first)
        fresh = np.arange(self.filled, self.filled + free, dtype=np.int32)
        slots = np.concatenate([fresh, leaving])
        return slots, leaving, _find_key_from_top(newcomers, len(slots))

    def _get_slots_to_scan(self) -> tuple[int, int]:
        """Return the range of slots to search for evictions: all, or the next part if there are very many."""
        most = max(_SCANNED, _SCANNED_PER_SWAP * self._swapped)
        if self.filled <= most:
            return 0, self.filled
        first = min(self._scanned, self.filled - most)
        self._scanned = first + most if first + most < self.filled else 0
        return first, first + most

    def _count(self, plan: Plan, hits: int, uses: int) -> None:
        total = self.statistics
        total.batches += 1
        total.uses += uses
        total.hits += hits
        total.unique += len(plan.ids)
        total.unique_hits += len(plan.hits)
        total.admitted += len(plan.admitted)
        total.evicted += len(plan.evicted)


def _get_least_rows(budget: int) -> int:
    """Return the number of rows that a directory may have before it forgets any."""
    return budget // 2 // ROW


def _kind(policy: str) -> int:
    if policy == "nearest":
        return NEAREST
    if policy not in POLICIES:
        raise ValueError(f"the policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    return POLICIES.index(policy)


def _get_gate(least: np.float32, gate: tuple[float, float]) -> int:
    """Return the key that a newcomer must exceed, given the C-th largest probability."""
    return get_price_index(2 * gate[0] * float(least) + gate[1]) << FINE_BITS


def _find_key(histogram: npt.NDArray[np.int64], count: int) -> tuple[int, int]:
    """Take the `count` rows with the smallest keys; return their largest key, and how many of these rows have it.

    `count` must be positive.
    """
    up_to = np.cumsum(histogram)
    key = int(np.searchsorted(up_to, count))
    return key, int(count - (up_to[key] - histogram[key]))


def _find_key_from_top(histogram: npt.NDArray[np.int64], count: int) -> tuple[int, int]:
    """Take the `count` rows with the largest keys; return their smallest key, and how many of these rows have it."""
    key, ties = _find_key(histogram[::-1], count) if count else (0, 0)
    return KEYS - 1 - key, ties


def _drop_best(histogram: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return a copy of the histogram without the `count` largest keys."""
    key, ties = _find_key_from_top(histogram, count)
    left = histogram.copy()
    left[key + 1 :] = 0
    left[key] -= ties
    return left


def _join_parts(values: Positions, starts: Iterable[int], stops: Iterable[int]) -> Positions:
    parts = [values[start:stop] for start, stop in zip(starts, stops, strict=True)]
    return np.concatenate(parts) if parts else values[:0].copy()


def warm_up(id_dtype: npt.DTypeLike) -> None:
    """Compile all kernels that a planner uses for ids of this dtype, or load the kernels from numba's cache."""
    for policy, counts, budget in itertools.product(
        ("lookahead", "lru", "nearest"), (None, np.arange(8)), (BUDGET, 0)
    ):  # with lru, every batch swaps rows
        planner = Planner(8, 1, policy, window=1, counts=counts, budget=budget)
        for row, uses in ((0, 1), (1, 8), (1, 8), (2, 1)):
            of_each = count_occurrences(np.zeros(uses, np.int32), 1)
            planner.announce(np.array([row], id_dtype), of_each if policy == "lru" else uses)
            if len(planner) > planner.window:
                plan = planner.plan()
                planner.renumber(np.zeros(1, np.int32), plan, plan.places)
