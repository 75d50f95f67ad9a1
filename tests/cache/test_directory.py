"""A planner with data of only the rows that matter: plans, forgetting, memory, and the hash table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.cache.directory import AllRows, Directory, find_quantile
from hostdev.cache.likeliest import chance_at, likeliest
from hostdev.cache.options import POLICIES
from hostdev.cache.planner import BUDGET, Planner, planner_bytes
from hostdev.cache.planning import CHANCE, COUNT, ID, LAST, MEMBER, SLOT
from hostdev.kernels.pool import set_host_threads
from tests.cache.test_planner import counts_of, plans, zipf


def outcome(batches, planner):
    """Return all plans, and the rows in slots at the end."""
    found = [array.tobytes() for plan in plans(batches, planner) for array in plan]
    return [*found, planner.slot_ids.tobytes(), vars(planner.statistics)]


def keep_all(planner):
    """Make the directory large enough for all rows."""
    directory = planner._directory
    directory._room = planner.rows
    directory._reserve(planner.rows)
    directory._settle()


def drifted(rows, count, size, seed=0):
    """Batches with new rows again and again, so that most of a planner's data becomes useless."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        near = rng.integers(0, rows // 8, size) + number * rows // (2 * count)
        ids, first, uses = np.unique(near, return_index=True, return_counts=True)
        order = np.argsort(first)
        made.append((ids[order].astype(np.int32), uses[order].astype(np.int32)))
    return made


@pytest.mark.parametrize("policy", [*POLICIES, "lookahead without counts"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_plans_are_those_with_all_rows_while_none_is_forgotten(policy, dtype):
    rows, batches = 3000, zipf(3000, 40, size=2000, dtype=dtype)
    counts = counts_of(batches, rows) if "without" not in policy else None
    for capacity, window in ((0, 4), (1, 0), (300, 5), (300, 32), (3000, 5)):
        outcomes = []
        for budget in (BUDGET, 0):
            planner = Planner(rows, capacity, policy.partition(" ")[0], window=window, counts=counts, budget=budget)
            if not budget:
                keep_all(planner)
            outcomes.append(outcome(batches, planner))
        assert outcomes[0] == outcomes[1], (capacity, window)


@pytest.mark.parametrize("policy", ["lru", "static"])
def test_plans_of_policies_that_go_by_nothing_that_is_forgotten(policy):
    rows, batches = 40_000, drifted(40_000, 40, 900)
    counts = counts_of(batches, rows)
    dense, sparse = (Planner(rows, 500, policy, counts=counts, budget=budget) for budget in (BUDGET, 0))
    assert outcome(batches, dense) == outcome(batches, sparse)
    assert forgotten(batches, sparse) > rows / 8


def forgotten(batches, planner):
    """Return how many rows of the batches the planner has forgotten."""
    seen = np.unique(np.concatenate([ids for ids, _ in batches]))
    return np.count_nonzero(planner._directory._find(seen) < 0)


@pytest.mark.parametrize("policy", [*POLICIES, "lookahead without counts"])
@pytest.mark.parametrize("capacity", [1, 300])
def test_plans_are_valid_where_rows_are_forgotten(policy, capacity):
    rows, batches = 40_000, drifted(40_000, 60, 900)
    counts = counts_of(batches, rows) if "without" not in policy else None
    planner = Planner(rows, capacity, policy.partition(" ")[0], window=3, counts=counts, budget=0)
    slots = np.full(capacity, -1, np.int32)
    for (ids, _), plan in zip(batches, plans(batches, planner), strict=True):
        groups = (plan.hits, plan.admitted, plan.passed)
        assert np.array_equal(np.sort(np.concatenate(groups)), np.arange(len(ids)))
        assert np.array_equal(slots[plan.hit_slots], ids[plan.hits])
        assert not np.isin(ids[np.concatenate(groups[1:])], slots).any()
        assert np.array_equal(slots[plan.evicted_slots], plan.evicted)
        slots[plan.evicted_slots] = -1
        assert (slots[plan.admitted_slots] == -1).all()
        slots[plan.admitted_slots] = ids[plan.admitted]
        assert np.array_equal(planner.slot_ids, slots)
        assert planner.holds(slots)
    assert forgotten(batches, planner) > rows / 8
    assert planner.nbytes < rows * 32 / 2


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_forgetting_costs_little(share):
    """Lookahead's cost grows by at most 0.5%, with and without counts."""
    rows, batches = 20_000, zipf(20_000, 60, size=2000)
    for counts in (counts_of(batches, rows), None):
        costs = []
        for budget in (BUDGET, 0):
            planner = Planner(rows, int(share * rows), window=4, counts=counts, budget=budget)
            for _ in plans(batches, planner):
                pass
            total = planner.statistics
            costs.append(2 * total.passed + 3 * (total.admitted + total.evicted))
        assert forgotten(batches, planner) > rows / 4
        assert costs[1] <= 1.005 * costs[0]


def test_plans_do_not_depend_on_threads():
    rows, batches = 200_000, zipf(200_000, 24, size=40_000, exponent=0.6)
    outcomes = []
    for threads in (1, 2, 5):
        set_host_threads(threads)
        planner = Planner(rows, 10_000, window=1, counts=counts_of(batches, rows), budget=0)
        outcomes.append(outcome(batches, planner))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert planner.statistics.evicted > 0
    assert forgotten(batches, planner) > 0


@pytest.mark.parametrize("policy", ["lookahead", "lru", "lfu"])
@pytest.mark.parametrize("seen", [0, 30])
def test_restore(policy, seen):
    """It judges as with all rows, if all or none are known; new rows are inserted."""
    rows, batches = 5000, zipf(5000, 45, size=300)
    slots = np.full(60, -1, np.int32)
    slots[:50] = np.random.default_rng(1).permutation(rows)[:50]
    outcomes = []
    for budget in (BUDGET, 0):
        planner = Planner(rows, 60, policy, window=4, counts=counts_of(batches, rows), budget=budget)
        if not budget:
            keep_all(planner)
        for number, (ids, uses) in enumerate(batches[:seen]):
            planner.announce(ids, uses)
            if number >= planner.window:
                planner.plan()
        planner.restore(slots)
        assert len(planner) == 0
        assert planner.holds(slots)
        outcomes.append(outcome(batches[seen:], planner))
    assert outcomes[0] == outcomes[1]


def test_the_memory_is_that_of_rows_that_matter():
    """Its memory is reported, does not grow with the table, and is at most `planner_bytes`."""
    most = []
    for rows in (100_000_000, 2**31 - 1):
        rng = np.random.default_rng(0)
        planner = Planner(rows, 2000, window=3, budget=0)
        for _ in range(30):
            ids = np.unique(rng.integers(0, rows, 1000)).astype(np.int64)
            planner.announce(ids, np.ones(len(ids), np.int32))
            if len(planner) > planner.window:
                planner.plan()
        assert planner.nbytes <= planner_bytes(rows, 2000, 1000, 3, budget=0) < 1 << 19
        most.append(planner.nbytes)
    assert most[0] == most[1]
    assert planner_bytes(1000, 10) == 32 * 1000 + 4 * 10
    assert Planner(1000, 10).nbytes == 32 * 1000


batches_of_ids = st.lists(st.lists(st.integers(0, 199), unique=True, max_size=60), max_size=30)


@given(batches_of_ids, st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_a_directory_is_a_dict(batches, pinned):
    """Pinned rows keep distinct positions, and remaining rows keep their data."""
    directory, known, rng = Directory(200, 5, 0), {}, np.random.default_rng(0)
    for number, batch in enumerate(batches):
        ids = np.array(batch, np.int64)
        rows = directory.rows
        before = {row: known[row] for row in known if rows[known[row][0], ID] == row and rows[known[row][0], SLOT] >= 0}
        positions = directory.place(ids, number)
        assert len(set(positions.tolist())) == len(ids)
        for row, position in zip(batch, positions.tolist(), strict=True):
            here = directory.rows[position]
            assert here[ID] == row
            if here[COUNT]:  # not new
                assert known[row] == (position, here[COUNT])
            else:
                assert here[LAST] == here[SLOT] == -1
                assert row not in before
            here[COUNT], here[LAST] = 1 + rng.integers(1000), number
            here[SLOT] = 0 if row < pinned else -1
            known[row] = position, int(here[COUNT])
        assert all(directory.rows[position, ID] == row for row, (position, _) in before.items())
        live = directory.known[:, ID] >= 0
        assert np.count_nonzero(live) == directory._state[0]
        found = directory._find(directory.known[live, ID].copy())
        assert np.array_equal(found, np.flatnonzero(live))


def test_an_interruption_between_rows_and_hash_table():
    directory = Directory(10_000, 10, 0)
    first = np.arange(3000)
    positions = directory.place(first, 0)
    directory.rows[positions, LAST] = 0
    directory._sound = False  # rows went, and nobody counted them
    directory.rows[positions[:1000], ID] = -1
    assert np.array_equal(directory.place(first[1000:1500], 1), positions[1000:1500])
    again = directory.place(first, 1)
    assert np.array_equal(directory.rows[again, ID], first)
    assert directory._state[0] == len(np.unique(again)) == 3000


@pytest.mark.parametrize("capacity", [1, 30, 299, 300])
@pytest.mark.parametrize("kind", ["few", "many", "float", "below 0", "one", "huge"])
def test_the_likeliest_are_those_of_a_sort(capacity, kind):
    rng = np.random.default_rng(capacity)
    counts = {
        "few": rng.integers(0, 4, 300),
        "many": rng.integers(0, 10**6, 300),
        "one": np.ones(300, int),
        "float": np.abs(rng.normal(size=300).round(1)) * 100,
        "huge": rng.integers(2**52, 2**62, 300),
        "below 0": rng.normal(size=300).round(1),
    }[kind]
    ids = np.arange(300)
    all_rows, some = AllRows(300, capacity), Directory(300, capacity, 0)
    all_rows.choose(counts)
    some.choose(counts)
    positions = some.place(ids, 0)
    assert np.array_equal(some.rows[positions, COUNT], all_rows.rows[:, COUNT])
    all_rows, some = AllRows(300, capacity), Directory(300, capacity, 0)
    above = 1.0 if counts.dtype.kind == "i" else -np.inf
    before = some.place(ids[:50], 0)  # rows may be in before counts tell
    least = [rows.expect(counts, np.float32(3e-3), above=above) for rows in (all_rows, some)]
    assert least[0] == least[1]
    positions = some.place(ids, 0)
    assert np.array_equal(positions[:50], before)
    for word in (CHANCE, MEMBER):
        assert np.array_equal(some.rows[positions, word], all_rows.rows[:, word])


def test_the_likeliest_of_many_rows():
    """Rows are in several blocks, and the last of equal keys is in a later one."""
    counts = np.random.default_rng(0).integers(0, 3, 5_000_000)
    found = likeliest(counts, 4_500_000)
    zeros = np.flatnonzero(counts == 0)
    assert found.last == zeros[4_500_000 - np.count_nonzero(counts) - 1]
    found = likeliest(counts, 1000, np.float32(0.5))
    assert chance_at(found.key) == find_quantile((1 - np.exp(-0.5 * counts)).astype(np.float32), 1000 / len(counts))
