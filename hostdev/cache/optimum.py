"""The hit rate of a cache that knows the whole future, computed offline with NumPy only."""

from collections.abc import Callable, Sequence

import numpy as np

from hostdev.cache.plan import Statistics
from hostdev.core.memory import available_bytes
from hostdev.kernels.arrays import AnyIds, Positions

_NEVER = np.float32(np.inf)
_VISITS_A_BATCH = 1000  # the fixed cost of a batch, in visits to rows


def fits(batches: Sequence[tuple[AnyIds, Positions]], rows: int, capacity: int) -> bool:
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
    batches of Criteo and of Zipf ids, the hit rate was within 0.001 of the linear program's dual bound (sources in
    `bound`).

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
