"""Columns of tables, ids by hash, and narrowed numbers, against NumPy."""

import numpy as np
import pytest

from hostdev.kernels.columns import hash_keys, hash_rows, narrowed, place_column
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
    np.testing.assert_array_equal(rows, np.stack([np.zeros(50), values[codes], np.zeros(50)], axis=1))


@pytest.mark.parametrize(("buckets", "dtype"), [(7, "int32"), (1 << 20, "int32"), (2**62, "int64")])
def test_rows_are_hashed_as_columns_are(buckets, dtype):
    rng = np.random.default_rng(buckets)
    keys, order = rng.integers(-(2**63), 2**63 - 1, (300, 5)), rng.permutation(300)[:200]
    of_columns, missing = rng.integers(0, 2**63, 5).astype(np.uint64), keys[order[3]]
    ids, lacking = hash_rows(keys, order, of_columns, np.uint64(buckets), 39, missing, dtype)
    assert ids.dtype == dtype and lacking.sum() == 5 and lacking[:, 3].all()
    for column, of_column in enumerate(of_columns):
        expected = hash_keys(np.ascontiguousarray(keys[order, column]), of_column, np.uint64(buckets), 39)
        np.testing.assert_array_equal(ids[:, column], expected)


@pytest.mark.parametrize(
    ("numbers", "short"),
    [([1.5, np.nan, -0.0, 2.0**24], True), ([], True), ([2.0**24 + 1], False), ([1.0, 0.1], False), ([1e300], False)],
)
def test_numbers_are_narrowed_where_nothing_is_lost(numbers, short):
    found = narrowed(np.array(numbers, np.float64))
    assert found.dtype == (np.float32 if short else np.float64)
    np.testing.assert_array_equal(found.astype(np.float64), np.array(numbers, np.float64))
