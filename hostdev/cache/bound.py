"""What caches can reach at best on known batches: a lower bound on their cost, and the best hit rate.

The bound is the Lagrangian dual of offline caching's linear program.

Between two uses of a row, a cache either keeps the row, which takes a slot in every batch in between, or evicts it and
pays again for the next use. With C slots, it keeps at most C rows at a time. Once a slot has a price in each batch,
every row can be decided independently, by dynamic programming over its uses. The sum of the rows' costs minus the price
of the C slots is a lower bound on the cost of every cache. The largest such bound, over all prices, is the program's
value.

Rows may be cached before the first batch, at the cost of admission, or for free if earlier batches are not counted.
Rows that are cached after the last batch are not written back.

Sources: Albers, Arora & Khanna, "Page Replacement for General Caching Problems", SODA 1999 (the program); Held, Wolfe &
Crowder, "Validation of Subgradient Optimization", Mathematical Programming 6 (1974) (the steps); Camerini, Fratta &
Maffioli, "On Improving Relaxation Methods by Modified Gradient Techniques", Mathematical Programming Study 3 (1975).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.cache.plan import Statistics
from hostdev.cache.prices import Costs
from hostdev.core.memory import available_bytes
from hostdev.kernels.arrays import AnyIds, Positions
from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import KernelTask, ranges, run_tasks

_SEARCHED, _LEAST_STEPS, _MOST_STEPS = 16, 60, 300  # bisection steps; limits of the number of subgradient steps
VISITS = 4e8  # default for the uses visited over all steps; to visit them takes a few seconds
_GRAIN = 1 << 13  # rows per task
_SHRINK_AFTER = 12  # steps without a clearly better bound, after which `gap` is halved
_DEFLECTION = 1.5  # a parameter of the modified gradient (Camerini et al.)
_NEVER = np.float32(np.inf)
_VISITS_A_BATCH = 1000  # the fixed cost of a batch, in visits to rows


class RowUses(NamedTuple):
    """The batches that use each row: for the i-th used row, batches[starts[i]:starts[i + 1]], in ascending order."""

    starts: npt.NDArray[np.int64]
    batches: npt.NDArray[np.int32]
    total: int  # number of batches


def fits(unique: int, batches: int) -> bool:
    """Return whether host memory suffices for `least_cost`; `unique`: number of unique ids, summed over batches."""
    pieces = len(ranges(unique, _GRAIN))
    return 40 * unique + (10 * pieces + 64) * (batches + 2) <= available_bytes()


def uses_of(batches: Sequence[npt.NDArray[Any]]) -> RowUses:
    """Return the batches that use each row, given the unique ids [U] of each batch."""
    ids = np.concatenate([*batches, np.empty(0, np.int32)])
    order = np.argsort(ids, kind="stable")
    numbers = np.repeat(np.arange(len(batches), dtype=np.int32), [len(batch) for batch in batches])[order]
    ids = ids[order]
    first = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]]) if len(ids) else np.empty(0, np.int64)
    return RowUses(np.r_[first, len(ids)].astype(np.int64), numbers, len(batches))


def least_cost(
    uses: RowUses,
    capacity: int,
    costs: Costs,
    *,
    first: float | None = None,
    visits: float = VISITS,
    progress: Callable[[], object] = lambda: None,
) -> float:
    """Return a lower bound on the cost of these uses with `capacity` slots, at most about 0.3% below the highest bound.

    Subgradient steps find the slots' prices, starting from the best price that is equal for all batches.

    Args:
        uses: The batches that use each row.
        capacity: Number of slots.
        costs: Costs of moving a row.
        first: Cost of caching a row before the first batch, by default `costs.admitted`; 0 if earlier batches, which
            are not counted, paid for it.
        visits: The approximate number of uses visited over all steps; fewer visits may loosen the bound.
        progress: Called after each step; its exceptions propagate.
    """
    batches = uses.total
    if not len(uses.batches):
        return 0.0
    pieces = ranges(len(uses.starts) - 1, _GRAIN)
    prices, kept = np.zeros(batches + 1), np.empty((len(pieces), batches + 2), np.int64)
    choices = np.empty((len(pieces), int(np.diff(uses.starts).max()) + 1, 2), np.bool_)
    totals, entry = np.empty(len(pieces)), float(costs.admitted if first is None else first)

    def bound(prices: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        """Return the bound at these prices, and the excess demand for slots before each batch."""
        until = np.r_[0.0, np.cumsum(prices)]
        shared = (uses.starts, uses.batches, until, entry, *map(float, costs), choices, kept, totals)
        run_tasks([KernelTask(_pay, len(uses.starts) - 1, _GRAIN, len(pieces), shared)])
        wanted: npt.NDArray[np.float64] = np.cumsum(kept.sum(0))[: batches + 1] - np.float64(capacity)
        return float(totals.sum()) - capacity * float(prices.sum()), wanted

    best, wanted = bound(prices)
    low, high = 0.0, float(costs.passed)
    at = prices
    for _ in range(_SEARCHED):  # bisection: the bound is concave; at its maximum, demand equals C
        middle = np.full(batches + 1, (low + high) / 2)
        value, more = bound(middle)
        if value > best:
            best, wanted, at = value, more, middle
        low, high = (middle[0], high) if more.sum() > 0 else (low, middle[0])
        progress()
    prices, value, gap, stale = at.copy(), best, 0.02 * best, 0
    direction = np.zeros(batches + 1)
    for _ in range(int(np.clip(visits / max(1, len(uses.batches)), _LEAST_STEPS, _MOST_STEPS))):
        steepness = float(direction @ direction)
        back = max(0.0, -_DEFLECTION * float(direction @ wanted) / steepness) if steepness else 0.0
        direction = wanted + back * direction
        steepness = float(direction @ direction)
        if steepness == 0 or gap < 1e-6 * max(best, 1.0):
            break
        prices = np.maximum(prices + (best + gap - value) / steepness * direction, 0)
        value, wanted = bound(prices)
        stale = 0 if value > best + 0.1 * gap else stale + 1
        if value > best:
            best, at = value, prices.copy()
        if stale >= _SHRINK_AFTER:
            gap, stale, prices, direction = gap / 2, 0, at.copy(), np.zeros(batches + 1)
            value, wanted = bound(prices)
        progress()
    return max(best, 0.0)


@kernel
def _pay(
    start: Any,
    stop: Any,
    starts: Any,
    batches: Any,
    until: Any,
    entry: Any,
    passed: Any,
    admitted: Any,
    evicted: Any,
    choices: Any,
    kept: Any,
    totals: Any,
    piece: Any,
) -> None:
    """Minimize the cost of each row in [start, stop), including the price of its slots.

    Args:
        until: float64 [T + 2] for T batches, cumulative prices of a slot.
        entry: The cost of caching a row before the first batch.
        choices: Scratch space, bool [pieces, most uses of a row + 1, 2].
        kept: Output, int64 [pieces, T + 2]: changes from batch to batch in the number of rows that are kept.
        totals: Output, float64 [pieces]: the total cost of each piece's rows.
    """
    total, last, held_more, choice = 0.0, len(until) - 1, kept[piece], choices[piece]
    held_more[:] = 0
    for i in range(start, stop):
        begin, end = starts[i], starts[i + 1]
        uses = end - begin
        # Before each use: the least cost so far, without and with the row cached; `choices` are for backtracking.
        without, cached = 0.0, entry + until[batches[begin] + 1]
        choice[0, 0], choice[0, 1] = False, False
        for k in range(uses):
            batch = batches[begin + k]
            until_next = until[batches[begin + k + 1] + 1] if k + 1 < uses else until[last]
            slot = until_next - until[batch + 1]
            from_host, let_go = without + passed, cached + evicted
            entered, stayed = without + admitted + slot, cached + slot
            choice[k + 1, 0], choice[k + 1, 1] = let_go < from_host, stayed <= entered
            without, cached = min(from_host, let_go), min(entered, stayed)
        held = cached < without
        total += min(without, cached)
        for k in range(uses, -1, -1):
            if held:
                held_more[batches[begin + k - 1] + 1 if k else 0] += 1
                held_more[batches[begin + k] + 1 if k < uses else last] -= 1
            held = choice[k, np.int64(held)]
    totals[piece] = total


def optimum_fits(batches: Sequence[tuple[AnyIds, Positions]], rows: int, capacity: int) -> bool:
    """Return whether host memory suffices for `optimal`.

    It needs 9 bytes per row, 8 per unique id of each batch, and 48 per slot and per unique id of the largest batch.
    """
    sizes = [len(ids) for ids, _ in batches]
    needed = 9 * rows + 8 * sum(sizes) + 48 * (min(capacity, rows) + max(sizes, default=0))
    return needed <= available_bytes()


def visits(unique: int, rows: int, capacity: int) -> int:
    """Return the number of rows that `optimal` visits for a batch of `unique` ids; a visit takes 20 to 40 ns."""
    return unique + min(capacity, rows) + _VISITS_A_BATCH


def optimal(
    batches: Sequence[tuple[AnyIds, Positions]],
    rows: int,
    capacity: int,
    *,
    since: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> Statistics:
    """Return the offline optimum's statistics: Belady with bypass over all batches, weighted by uses.

    After each batch, the cache chooses among its rows and the batch's rows, and keeps those with the highest density. A
    row's density is its uses in the next batch that uses it, divided by the number of batches until then. Over 90
    batches of Criteo and of Zipf ids, the hit rate was within 0.001 of the linear program's dual bound (see
    `least_cost`).

    Args:
        batches: For each batch, in order: its unique ids [U], and how often it uses each, int32 [U].
        rows: V.
        capacity: Number of slots.
        since: Index of the first batch that the statistics count.
        progress: Called after each batch; its exceptions propagate.
    """
    total = Statistics(batches=len(batches) - since)
    following = _next_uses(batches, rows)
    cached, next_batch, next_uses = np.zeros(rows, bool), np.empty(rows, np.float32), np.empty(rows, np.float32)
    held = np.empty(0, np.int64)
    for now, (ids, uses) in enumerate(batches):
        hit, counts = cached[ids], now >= since
        total.uses += counts * int(uses.sum())
        total.hits += counts * int(uses[hit].sum())
        total.unique += counts * len(ids)
        total.unique_hits += counts * int(hit.sum())
        next_batch[ids], next_uses[ids] = following.pop()
        candidates = np.concatenate([held, ids[~hit]])
        candidates = candidates[next_batch[candidates] != _NEVER]
        if len(candidates) > capacity:
            density = next_uses[candidates] / (next_batch[candidates] - now)
            candidates = candidates[np.argpartition(-density, capacity)[:capacity]]
        admitted = int(np.count_nonzero(~cached[candidates]))
        total.admitted += counts * admitted
        total.evicted += counts * (len(held) + admitted - len(candidates))
        cached[held] = False
        held = candidates
        cached[held] = True
        progress()
    return total


def _next_uses(batches: Sequence[tuple[AnyIds, Positions]], rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for each batch from last to first, the next batch that uses each id, and how often it uses the id."""
    next_batch, next_uses = np.full(rows, _NEVER), np.zeros(rows, np.float32)
    found = []
    for number in range(len(batches) - 1, -1, -1):
        ids, uses = batches[number]
        found.append((next_batch[ids], next_uses[ids]))
        next_batch[ids], next_uses[ids] = number, uses
    return found
