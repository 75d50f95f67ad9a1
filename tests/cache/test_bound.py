"""The bound against exhaustive search, and the indices against their definition."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hostdev.cache import bound
from hostdev.cache.bound import least_cost, uses_of
from hostdev.cache.prices import HORIZON, PRICES, RATES, Costs, get_price_index, get_rate_middle, prices
from hostdev.kernels.pool import set_host_threads

COSTS = [Costs(), Costs(2, 1, 1), Costs(2, 5, 3), Costs.of(320, 960)]


def best_by_trying(batches, rows, capacity, costs, first=None):
    """Return the least cost of all sequences of caches: all subsets of rows, before the first batch and after each."""
    caches = [frozenset(kept) for n in range(capacity + 1) for kept in itertools.combinations(range(rows), n)]
    value = {kept: (costs.admitted if first is None else first) * len(kept) for kept in caches}
    for ids in batches:
        used, after = set(ids.tolist()), {}
        for cache, cost in value.items():
            for kept in caches:
                if kept <= cache | used:
                    admitted = len(kept - cache)
                    paid = cost + costs.evicted * len(cache - kept) + costs.admitted * admitted
                    paid += costs.passed * (len(used - cache) - admitted)
                    after[kept] = min(after.get(kept, np.inf), paid)
        value = after
    return min(value.values())


def test_steps_are_told_and_memory_is_counted(monkeypatch):
    """The memory per batch counts, too: with few ids per batch it is the largest part."""
    rng, steps = np.random.default_rng(0), []
    batches = [np.unique(rng.zipf(1.4, 40) % 50).astype(np.int32) for _ in range(90)]
    unique = sum(map(len, batches))
    least_cost(uses_of(batches), 10, COSTS[3], progress=lambda: steps.append(1))
    assert 16 < len(steps) <= 316
    monkeypatch.setattr(bound, "available_bytes", lambda: 50 * unique)
    assert bound.fits(unique, 2)
    assert not bound.fits(unique, unique)

    def fail():
        raise MemoryError

    with pytest.raises(MemoryError):
        least_cost(uses_of(batches), 10, COSTS[3], progress=fail)


@pytest.mark.parametrize("first", [None, 0.0])
@pytest.mark.parametrize("costs", COSTS)
def test_the_bound_is_below_all_that_is_possible_and_close(costs, first):
    ratios = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        batches = [np.unique(rng.zipf(1.4, 4) % 5).astype(np.int32) for _ in range(9)]
        for capacity in (1, 2, 4):
            best = best_by_trying(batches, 5, capacity, costs, first)
            found = least_cost(uses_of(batches), capacity, costs, first=first)
            assert found <= best * (1 + 1e-9)
            ratios.append(found / best if best else 1.0)
    assert np.mean(ratios) > 0.97


def best_of_the_program(batches, capacity, costs):
    """Return the linear program's value from a solver: for each row and interval, the share that is kept."""
    uses = {}
    for number, ids in enumerate(batches):
        for row in ids.tolist():
            uses.setdefault(row, []).append(number)
    cost, kept, moves, variables = [], [], [], itertools.count()
    for times in uses.values():
        before = None
        for begin, end in itertools.pairwise([-1, *times, len(batches)]):
            share = next(variables)
            cost.append(costs.admitted * (before is None) - costs.passed * (end < len(batches)))
            kept += [(slot, share) for slot in range(begin + 1, end + 1)]
            if before is not None:
                moves.append((before, share, next(variables), next(variables)))
                cost += [costs.admitted - costs.passed, costs.evicted]
            before = share
    shape = (len(moves), next(variables))
    of_moves = [
        (i, column, value) for i, four in enumerate(moves) for column, value in zip(four, (-1, 1, -1, 1), strict=True)
    ]
    i, j, value = map(np.array, zip(*of_moves, strict=True))
    slots, shares = map(np.array, zip(*kept, strict=True))
    found = linprog(
        cost,
        A_ub=coo_array((np.ones(len(slots)), (slots, shares)), (len(batches) + 1, shape[1])),
        b_ub=np.full(len(batches) + 1, capacity),
        A_eq=coo_array((value, (i, j)), shape),
        b_eq=np.zeros(len(moves)),
        bounds=(0, 1),
        method="highs",
    )
    return found.fun + costs.passed * sum(map(len, uses.values()))


@pytest.mark.parametrize("exponent", [1.1, 1.6])
def test_the_bound_is_the_programs_value(exponent):
    rng = np.random.default_rng(0)
    batches = [np.unique(rng.zipf(exponent, 150) % 400).astype(np.int32) for _ in range(40)]
    for capacity in (4, 20, 80, 200):
        exact = best_of_the_program(batches, capacity, Costs())
        assert 0.995 * exact <= least_cost(uses_of(batches), capacity, Costs()) <= exact * (1 + 1e-6)


def test_the_bound_without_slots_and_with_one_for_every_row():
    batches = [np.array(ids, np.int64) for ids in ([3, 1], [1], [2, 1, 3], [1])]
    assert least_cost(uses_of(batches), 0, Costs()) == pytest.approx(2 * 7)
    # Row 1 is used four times and stays: 3, or 8 if it passed by; row 3 twice: 3 to 4; row 2 once: 2 to 3.
    assert least_cost(uses_of(batches), 9, Costs()) == pytest.approx(3 + 3 + 2)
    assert least_cost(uses_of([]), 3, Costs()) == 0


@pytest.mark.parametrize("costs", COSTS)
def test_indices_are_what_a_slot_may_cost(costs):
    """Return, by the definition, the extra cost without the row for some states and every price."""
    table, rng = prices(costs, 5), np.random.default_rng(0)
    passed, admitted, evicted = np.array(costs) / costs.passed
    of = [1.01 * 2 ** ((i - PRICES + 1) / 16) for i in range(PRICES)]
    for rate, state in [
        (0, 0),
        (RATES - 1, 31),
        *zip(rng.integers(0, RATES, 12), rng.integers(0, 32, 12), strict=True),
    ]:
        stay, enter, close = 0, 0, 0
        for price in of:
            x, chance = 0.0, get_rate_middle(rate)
            for _ in range(HORIZON):
                used = np.clip(x, -evicted, admitted - passed) + passed
                x = chance * used + (1 - chance) * max(x, -evicted) - price
            for ahead in range(5):  # from the farthest known batch, the lowest bit, to the next one
                if state >> ahead & 1:
                    x = np.clip(x, -evicted, admitted - passed) + passed - price
                else:
                    x = max(x, -evicted) - price
            stay, enter = stay + (x > -evicted), enter + (x > admitted - passed)
            close += min(abs(x + evicted), abs(x - admitted + passed)) < 1e-4
        assert abs(int(table[0, rate, state]) - stay) <= close
        assert abs(int(table[1, rate, state]) - enter) <= close


def test_indices_rise_with_what_is_known():
    table = prices(Costs(), 4).astype(int)
    assert (np.diff(table, axis=1) <= 0).all()  # less likely rows
    for state in range(16):
        for bit in range(4):
            assert (table[:, :, state | 1 << bit] >= table[:, :, state]).all()
    assert (get_price_index(0), get_price_index(0.5), get_price_index(2.02), get_price_index(99)) == (0, 129, 161, 161)
    with pytest.raises(ValueError, match=r"0\.\.16"):
        prices(Costs(), 17)


def test_the_bound_is_the_same_on_any_threads():
    rng = np.random.default_rng(0)
    batches = [np.unique(rng.zipf(1.2, 9000) % 60_000).astype(np.int32) for _ in range(12)]
    found = []
    for threads in (1, 2, 5):
        set_host_threads(threads)
        found.append(least_cost(uses_of(batches), 2000, Costs()))
    assert found == pytest.approx([found[0]] * 3, rel=1e-3)


def test_costs():
    """Costs of the bus by bytes in each direction, plus those of the host."""
    assert Costs.of(324, 972) == (648, 972, 972)
    assert Costs.of(324, 972, down=0.5, up=0.25) == (243, 486, 243)
    both = Costs.of(10, 30, host=Costs(1, 2, 3))
    assert both == (21, 32, 33)
    assert both.paid(100, 10, 1) == 2100 + 320 + 33
