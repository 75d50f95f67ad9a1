import numpy as np
import pytest

from hostdev.kernels import cardinality
from hostdev.kernels.cardinality import draw_sample, join, total


def same(a, b):
    order_a, order_b = np.argsort(a.keys), np.argsort(b.keys)
    return all(np.array_equal(x[order_a], y[order_b]) for x, y in zip(a, b, strict=True))


def test_the_sum_of_few_is_exact_and_counts_each_once():
    a = draw_sample(np.array([3, 1, 2], np.uint64), np.array([30, 0, 20]))
    b = draw_sample(np.array([2, 9], np.uint64), np.array([20, 7]))
    assert total(a) == 50
    assert total(join(a, b)) == total(join(b, a)) == 57
    assert total(join(a, a)) == 50
    assert total(draw_sample(np.empty(0, np.uint64), np.empty(0, np.int64))) == 0


@pytest.mark.parametrize("heavy", [0.5, 0.01, 0.0005])
def test_the_sum_of_many_is_near_whatever_they_weigh(heavy):
    """Also for keys in many parts, and for a few heavy keys."""
    rng = np.random.default_rng(3)
    keys = np.arange(40_000, dtype=np.uint64)
    weights = np.where(rng.random(len(keys)) < heavy, 5000, rng.integers(1, 10, len(keys)))
    some = None
    for start in range(0, len(keys), 5000):
        part = np.unique(np.concatenate([np.arange(1000), np.arange(start, start + 5000)]))
        found = draw_sample(keys[part], weights[part])
        some = found if some is None else join(found, some)
    assert len(some.keys) == cardinality._SAMPLED + 1
    assert same(some, draw_sample(keys, weights))
    assert total(some) == pytest.approx(weights.sum(), rel=0.05)
