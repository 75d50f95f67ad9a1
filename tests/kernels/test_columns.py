"""Columns of tables, ids by hash, and narrowed numbers, against NumPy."""

import numpy as np
import pytest

from hostdev.kernels.columns import hash_keys, narrowed, place_column
from hostdev.kernels.counter import mix64


@pytest.mark.parametrize("buckets", [1, 7, 1 << 20, 2**40 + 3, 2**62])
def test_keys_are_hashed_as_by_numpy(buckets):
    keys = np.random.default_rng(buckets).integers(-(2**63), 2**63 - 1, 5000)
    of_column = np.uint64(12345678901234567890)
    expected = 39 + (mix64(keys.astype(np.uint64) ^ of_column) % np.uint64(buckets)).astype(np.int64)
    np.testing.assert_array_equal(hash_keys(keys, of_column, np.uint64(buckets), 39), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_column_is_placed(dtype):
    rows, values = np.zeros((50, 3), np.int32), np.arange(100, 140, dtype=np.int32)
    codes = (np.arange(50) * 7 % 40).astype(dtype)
    place_column(codes, values, rows, 1)
    place_column(codes.astype(np.int32), None, rows, 2)
    np.testing.assert_array_equal(rows, np.stack([np.zeros(50), values[codes], codes], axis=1))


@pytest.mark.parametrize(
    ("numbers", "short"),
    [([1.5, np.nan, -0.0, 2.0**24], True), ([], True), ([2.0**24 + 1], False), ([1.0, 0.1], False), ([1e300], False)],
)
def test_numbers_are_narrowed_where_nothing_is_lost(numbers, short):
    found = narrowed(np.array(numbers, np.float64))
    assert found.dtype == (np.float32 if short else np.float64)
    np.testing.assert_array_equal(found.astype(np.float64), np.array(numbers, np.float64))
