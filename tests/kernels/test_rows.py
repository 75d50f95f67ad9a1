"""Lookup and segment sum against references, on any number of threads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.kernels.adagrad import sgd
from hostdev.kernels.apply import apply_rows
from hostdev.kernels.bags import FeatureOccurrences, sum_uses
from hostdev.kernels.lookup import first_outside, lookup
from hostdev.kernels.loops import make_loop
from hostdev.kernels.norm import partial_squares, sum_of_squares, total
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import unique
from tests import naive

DIMS = [1, 3, 80, 128]
THREADS = [1, 2, 5]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("n", [0, 1, 5000])
def test_lookup(dim, n, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(n + dim)
    block = rng.standard_normal((777, 3, dim), dtype=np.float32)
    for dtype in (np.int32, np.int64):
        ids = rng.integers(0, 777, n).astype(dtype)
        out = np.full((n, dim), np.nan, np.float32)
        lookup(block, ids, out)
        np.testing.assert_array_equal(out, block[ids, 0])


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("n", "rows"), [(0, 5), (1, 1), (3000, 1), (3000, 40), (6000, 5900)])
def test_sums_in_order_of_occurrence(dim, n, rows, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(n + rows)
    grads = (rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-6, 6, (n, 1))).astype(np.float32)
    found, inverse = unique(rng.integers(0, rows, n))
    out = np.full((len(found), dim), np.nan, np.float32)
    sum_uses([FeatureOccurrences(inverse)], [grads], out)
    np.testing.assert_array_equal(out, naive.segment_sum(grads, inverse, len(found)))


@settings(deadline=None)
@given(st.lists(st.integers(-5, 15)), st.integers(1, 12))
def test_first_outside(ids, rows):
    expected = next((i for i, value in enumerate(ids) if not 0 <= value < rows), -1)
    assert first_outside(np.array(ids, np.int32), rows) == expected


@pytest.mark.parametrize("rows", [1, 4095, 4096, 4097, 10_000])
@pytest.mark.parametrize("dim", [1, 3, 80])
def test_sum_of_squares(dim, rows):
    rng = np.random.default_rng(rows)
    block = (rng.standard_normal((rows, 2, dim)) * 10.0 ** rng.integers(-6, 6, (rows, 1, 1))).astype(np.float32)
    expected = naive.partial_squares(block[:, 0])
    for threads in THREADS:
        set_host_threads(threads)
        np.testing.assert_array_equal(partial_squares(block), expected)
    found = sum_of_squares(block)
    assert found == expected.sum() == total(expected)
    assert found == pytest.approx(np.square(block[:, 0], dtype=np.float64).sum(), rel=1e-12)


def test_an_update_is_compiled_once_whether_positions_are_given_or_not():
    """Compiling takes seconds, and arrays of another layout or flag are another type."""
    block, row_slots = np.zeros((4, 1, 3), np.float32), np.zeros((4, 0), np.float32)
    ids, grads = np.array([2, 0], np.int32), np.ones((2, 3), np.float32)
    counts = []
    for positions in (None, np.array([1, 0], np.int32)):
        apply_rows("FusedSparseSGD", block, row_slots, ids, grads, (np.float32(0.5),), positions)
        counts.append(len(make_loop(sgd).signatures))
    assert counts[0] == counts[1]
    assert block[:, 0, 0].tolist() == [-1, 0, -1, 0]
