"""The policy "nearest", for caches in which each row must enter that a batch uses."""

import numpy as np
import pytest

from hostdev.cache import planner
from hostdev.cache.bound import optimal
from hostdev.cache.planner import Planner


def count_least(batches, rows, capacity):
    """Return the least misses of any cache (Belady)."""
    best = optimal([(batch, np.ones(len(batch), np.int32)) for batch in batches], rows, capacity)
    return best.unique - best.unique_hits


def count(batches, rows, capacity, policy="nearest", window=16, budget=planner.BUDGET, one=None):
    one = one or Planner(rows, capacity, policy, window=window, budget=budget)
    announced = misses = 0
    for _ in batches:
        while announced < len(batches) and len(one) <= one.window:
            uses = np.ones(len(batches[announced]), np.int32)
            one.announce(batches[announced], len(uses) if one.window else uses)
            announced += 1
        plan = one.plan()
        misses += len(plan.ids) - len(plan.hits)
    return misses


def draw(random, rows, steps, n):
    shares = np.arange(1, rows + 1) ** -1.05
    edges = np.cumsum(shares) / shares.sum()
    places = random.permutation(rows).astype(np.int32)
    return [np.unique(places[np.searchsorted(edges, random.random(n))]) for _ in range(steps)]


@pytest.mark.parametrize("budget", [planner.BUDGET, 0])
@pytest.mark.parametrize("window", [16, 99])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [20, 100, 400])
def test_it_is_optimal_if_all_batches_are_announced(capacity, seed, window, budget):
    batches = draw(np.random.default_rng(seed), 1_000, window + 1, 300)
    misses = count(batches, 1_000, capacity, window=window, budget=budget)
    assert misses == count_least(batches, 1_000, capacity)


def test_a_longer_window_misses_less():
    batches = draw(np.random.default_rng(3), 5_000, 300, 300)
    found = [count(batches, 5_000, 1_000, window=window) for window in (0, 16, 64, 256)]
    assert found == sorted(found, reverse=True) and found[-1] < 1.02 * count_least(batches, 5_000, 1_000)
    assert found[0] > 1.2 * found[-1]


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_were_announced_and_not_planned_are_forgotten(seed):
    random = np.random.default_rng(seed)
    batches, others = draw(random, 1_000, 21, 200), draw(random, 1_000, 21, 200)
    one = Planner(1_000, 150, "nearest", window=20)
    for number, batch in enumerate(others):
        one.announce(batch, len(batch))
        if number == 20:
            one.plan()
    one.restore(np.full(150, -1, np.int32))
    assert count(batches, 1_000, 150, one=one) == count_least(batches, 1_000, 150)


def test_it_misses_less_than_others_if_they_are_not():
    batches = draw(np.random.default_rng(9), 5_000, 200, 400)
    least = count_least(batches, 5_000, 2_000)
    nearest, lru, lfu = (count(batches, 5_000, 2_000, policy) for policy in ("nearest", "lru", "lfu"))
    assert least < nearest < min(lru, lfu)
    assert nearest < 1.5 * least
