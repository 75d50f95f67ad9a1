"""The policy "nearest", for caches in which each row must enter that a batch uses."""

import numpy as np
import pytest

from hostdev.cache.optimum import optimal
from hostdev.cache.planner import Planner


def count_least(batches, rows, capacity):
    """Return the least misses of any cache (Belady)."""
    best = optimal([(batch, np.ones(len(batch), np.int32)) for batch in batches], rows, capacity)
    return best.unique - best.unique_hits


def count(batches, rows, capacity, policy="nearest", window=16):
    planner, announced, misses = Planner(rows, capacity, policy, window=window), 0, 0
    for _ in batches:
        while announced < len(batches) and len(planner) <= planner.window:
            uses = np.ones(len(batches[announced]), np.int32)
            planner.announce(batches[announced], len(uses) if planner.window else uses)
            announced += 1
        plan = planner.plan()
        misses += len(plan.ids) - len(plan.hits)
    return misses


def draw(random, rows, steps, n):
    shares = np.arange(1, rows + 1) ** -1.05
    edges = np.cumsum(shares) / shares.sum()
    places = random.permutation(rows).astype(np.int32)
    return [np.unique(places[np.searchsorted(edges, random.random(n))]) for _ in range(steps)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", [20, 100, 400])
def test_it_is_optimal_if_all_batches_are_announced(capacity, seed):
    batches = draw(np.random.default_rng(seed), 1_000, 17, 300)
    assert count(batches, 1_000, capacity) == count_least(batches, 1_000, capacity)


def test_it_misses_less_than_others_if_they_are_not():
    batches = draw(np.random.default_rng(9), 5_000, 200, 400)
    least = count_least(batches, 5_000, 2_000)
    nearest, lru, lfu = (count(batches, 5_000, 2_000, policy) for policy in ("nearest", "lru", "lfu"))
    assert least < nearest < min(lru, lfu)
    assert nearest < 1.5 * least
