"""Ten thousand random cases per kernel against the NumPy twins: shape, duplicates, id order, thread count."""

import numpy as np
import pytest

from hostdev.host.table import HostTable
from hostdev.kernels import segment
from hostdev.kernels.bags import FeatureOccurrences, sum_uses
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import unique
from tests import naive
from tests.host.test_updates import OPTIMIZERS, assert_equal

CASES = 10_000


def ids_of(rng, rows, n):
    """Random ids: all equal, ascending, descending, or skewed."""
    kind = rng.integers(5)
    if kind == 0:
        return np.full(n, rng.integers(rows))
    if kind == 1:
        return np.sort(rng.integers(0, rows, n))
    if kind == 2:
        return np.sort(rng.integers(0, rows, n))[::-1]
    if kind == 3:
        return (rng.zipf(1.5, n) - 1) % rows
    return rng.integers(0, rows, n)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_apply(name, monkeypatch):
    rng = np.random.default_rng(0)
    for _ in range(CASES):
        rows, dim, n = rng.integers(1, 60), rng.integers(1, 40), rng.integers(0, 80)
        set_host_threads(int(rng.integers(1, 9)))
        monkeypatch.setattr(segment, "_PART", int(rng.integers(1, 100)))
        table = HostTable(int(rows), int(dim), OPTIMIZERS[name], name="t", seed=int(rng.integers(1000)))
        twin = naive.Table(table.weights, OPTIMIZERS[name])
        for _ in range(2):
            ids = ids_of(rng, rows, n).astype(rng.choice([np.int32, np.int64]))
            grads = (rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-10, 6)).astype(np.float32)
            np.testing.assert_array_equal(table.lookup(ids), twin.weights[ids])
            table.apply(ids, grads)
            twin.apply(ids, grads)
        assert_equal(table, twin)


@pytest.mark.slow
def test_unique_and_sum():
    rng = np.random.default_rng(1)
    for case in range(CASES):
        rows = int(10 ** rng.uniform(0, 5))
        n = int(rng.integers(0, 300)) if case % 100 else int(rng.integers(65_000, 140_000))
        set_host_threads(int(rng.integers(1, 9)))
        ids = ids_of(rng, rows, n).astype(rng.choice([np.int32, np.int64]))
        found, inverse = unique(ids)
        expected, expected_inverse = naive.unique(ids)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(inverse, expected_inverse)
        if n < 300:
            grads = rng.standard_normal((n, int(rng.integers(1, 40))), dtype=np.float32)
            out = np.empty((len(found), grads.shape[1]), np.float32)
            sum_uses([FeatureOccurrences(inverse)], [grads], out)
            np.testing.assert_array_equal(out, naive.segment_sum(grads, inverse, len(found)))
