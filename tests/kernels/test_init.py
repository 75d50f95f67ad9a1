import math

import numpy as np
import pytest

from hostdev.core.initializers import Constant, Normal, initial_array
from hostdev.core.optimizers import FTRL, LazyAdam
from hostdev.host.table import HostTable
from hostdev.kernels.counter import key64, mix64, permutation, uniform
from hostdev.kernels.init import fill_normal, fill_uniform
from hostdev.kernels.pool import set_host_threads
from tests import naive

NO_SLOTS = np.empty(0, np.float32)


def fill(rows, dim, key, first_row=0, std=0.01):
    block = np.empty((rows, 1, dim), np.float32)
    fill_normal(block, key, std, NO_SLOTS, first_row=first_row)
    return block[:, 0]


@pytest.mark.parametrize("dim", [1, 2, 3, 80, 128])
def test_matches_the_naive_twin_to_the_bit(dim):
    key = key64(7, "deep")
    np.testing.assert_array_equal(fill(3000, dim, key), naive.normal(np.arange(3000), dim, key, 0.01))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dim", [1, 3, 80])
def test_uniform_values_are_the_twins(dim, threads):
    set_host_threads(threads)
    key, slots = key64(7, "deep"), np.array([0.5, 2], np.float32)
    for rows, first in ((0, 0), (1, 0), (3000, 2**33 + 5)):
        block = np.empty((rows, 3, dim), np.float32)
        fill_uniform(block, key, -0.3, 1.7, slots, first_row=first)
        np.testing.assert_array_equal(block[:, 0], naive.uniform(first + np.arange(rows), dim, key, -0.3, 1.7))
        assert (block[:, 1:] == slots[:, None]).all()
    ids = np.array([5, 2**40, 5])
    fill_uniform(block[:3], key, -0.3, 1.7, slots, ids=ids)
    np.testing.assert_array_equal(block[:3, 0], naive.uniform(ids, dim, key, -0.3, 1.7))


def test_a_value_depends_on_seed_name_row_and_column_only():
    key = key64(1, "deep")
    whole = fill(5000, 80, key)
    np.testing.assert_array_equal(fill(3000, 80, key), whole[:3000])  # growth
    np.testing.assert_array_equal(fill(7, 80, key, first_row=1234), whole[1234:1241])
    np.testing.assert_array_equal(fill(5000, 33, key), whole[:, :33])
    set_host_threads(1)
    np.testing.assert_array_equal(fill(5000, 80, key), whole)
    for other in (key64(2, "deep"), key64(1, "wide")):
        assert not np.any(fill(100, 80, other) == whole[:100])


def test_rows_beyond_32_bits():
    key, first = key64(1, "deep"), 2**33 + 5
    np.testing.assert_array_equal(fill(9, 6, key, first_row=first), naive.normal(first + np.arange(9), 6, key, 0.01))


def test_the_distribution_is_normal():
    x = np.sort(fill(50_000, 80, key64(3, "x"), std=1.0).ravel().astype(np.float64))
    n = len(x)
    for power, moment in [(1, 0), (2, 1), (3, 0), (4, 3), (6, 15)]:
        spread = math.sqrt(math.prod(range(2 * power - 1, 0, -2)))  # of x^power, at most
        assert abs((x**power).mean() - moment) < 5 * spread / math.sqrt(n)
    grid = np.linspace(-4, 4, 401)
    cdf = np.array([0.5 * math.erfc(-g / math.sqrt(2)) for g in grid])
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
    assert np.abs(np.searchsorted(x, grid) / n - cdf).max() < 1.95 / math.sqrt(n)


def test_neighbours_are_not_correlated():
    x = fill(40_000, 80, key64(4, "x"), std=1.0).astype(np.float64)
    pairs = {
        "columns": (x[:, :-1], x[:, 1:]),
        "rows": (x[:-1], x[1:]),
        "radii of columns": (x[:, :-2] ** 2 - 1, x[:, 2:] ** 2 - 1),
        "radii of rows": (x[:-1] ** 2 - 1, x[1:] ** 2 - 1),
        "seeds": (x, fill(40_000, 80, key64(5, "x"), std=1.0)),
    }
    for name, (a, b) in pairs.items():
        correlation = (a * b).mean() / (a.std() * b.std())
        assert abs(correlation) < 5 / math.sqrt(a.size), name


def test_slots_start_at_their_constants():
    table = HostTable(300, 5, FTRL(initial_accum=0.1), name="t")
    assert np.all(table.slots["accum"] == np.float32(0.1))
    assert np.all(table.slots["linear"] == 0)
    adam = HostTable(300, 5, LazyAdam(), name="t", init=Constant(0.5))
    assert np.all(adam.weights == 0.5)
    assert not adam.slots["m"].any()
    assert not adam.slots["v"].any()


def test_dense_arrays_take_the_same_numbers():
    expected = naive.normal(np.zeros(1, np.int64), 6, key64(1, "bias"), 0.01)
    np.testing.assert_array_equal(initial_array((2, 3), Normal(0.01), 1, "bias"), expected.reshape(2, 3))


def test_counters():
    assert int(mix64(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF  # SplitMix64's first output from seed 0
    order = permutation(1000, 5)
    assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(order, permutation(1000, 6))
    for n in (0, 1, 2, 4097, 100_000):  # some of the last share two digits of their hashes
        for key in (0, 5, key64(1, "order"), 2**64 - 1):
            order = permutation(n, key)
            assert order.dtype == np.int64
            np.testing.assert_array_equal(order, naive.permutation(n, key))
    u = uniform(9, np.arange(100_000))
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(u))


def test_std_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        Normal(0.0)
