import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import IdMap, tally, unique
from tests import naive

DTYPES = [np.int32, np.int64]


@settings(deadline=None)
@given(st.lists(st.integers(0, 50)), st.sampled_from(DTYPES))
def test_matches_the_naive_twin(ids, dtype):
    ids = np.array(ids, dtype)
    found, inverse = unique(ids)
    expected, expected_inverse = naive.unique(ids)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(inverse, expected_inverse)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=300))
def test_any_64_bit_id(ids):
    ids = np.array(ids, np.int64)
    found, inverse = unique(ids)
    assert len(set(found.tolist())) == len(found)
    np.testing.assert_array_equal(found[inverse], ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_distinct_ids_grow_the_table(dtype):
    ids = np.random.default_rng(0).permutation(200_000).astype(dtype) * 7919
    found, inverse = unique(np.concatenate([ids, ids[::-1]]))
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_array_equal(inverse, np.concatenate([np.arange(200_000), np.arange(200_000)[::-1]]))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 32_767, 65_536, 200_001])
@pytest.mark.parametrize("rows", [1, 50, 100_000])
def test_parts_are_numbered_as_one_pass_would(n, rows, threads):
    set_host_threads(threads)
    ids = np.random.default_rng(n).integers(0, rows, n).astype(np.int32)
    found, inverse = unique(ids)
    expected, expected_inverse = naive.unique(ids)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(inverse, expected_inverse)


def test_ids_that_share_their_low_bits():
    ids = np.arange(5000, dtype=np.int64) << 40
    np.testing.assert_array_equal(unique(np.repeat(ids, 2))[0], ids)


def test_map_goes_on_across_calls():
    seen = IdMap()
    np.testing.assert_array_equal(seen.add(np.array([5, 7, 5])), [0, 1, 0])
    np.testing.assert_array_equal(seen.add(np.array([9, 7])), [2, 1])
    np.testing.assert_array_equal(seen.find(np.array([9, 8, 5])), [2, -1, 0])
    np.testing.assert_array_equal(seen.ids, [5, 7, 9])
    assert len(seen) == 3


def test_tally_counts_uses():
    counts = np.zeros(3, np.int64)
    tally(np.array([0, 2, 2], np.int32), counts)
    np.testing.assert_array_equal(counts, [1, 0, 2])
