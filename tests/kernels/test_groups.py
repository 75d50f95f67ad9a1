"""Deduplication of several groups at once, checks of their ids, and bags, against references, on any threads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.errors import UserError
from hostdev.kernels.groups import check_groups, drop_padding, offsets_of, unique_groups
from hostdev.kernels.pool import set_host_threads
from tests import naive

THREADS = [1, 2, 4]
DTYPES = [np.int32, np.int64]
SPANS = [1, 40, 3000, 1 << 17, 1 << 20, 2**31]  # limits of ids: indexed and hashed


def check_unique(groups):
    found = unique_groups(groups)
    assert len(found) == len(groups)
    for features, (ids, inverse) in zip(groups, found, strict=True):
        expected, expected_inverse = naive.unique(np.concatenate(features))
        assert ids.dtype == features[0].dtype
        assert inverse.dtype == np.int32
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(inverse, expected_inverse)


@st.composite
def small_groups(draw):
    """Return groups of a few features, of either dtype, some empty, with ids of any range."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    groups = []
    for sizes in draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=4), max_size=8)):
        dtype, span = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SPANS))
        low = draw(st.sampled_from([0, 0, -span]))
        groups.append([rng.integers(low, span, n).astype(dtype) for n in sizes])
    return groups


@settings(deadline=None)
@given(small_groups(), st.sampled_from(THREADS))
def test_groups_are_as_one_by_one(groups, threads):
    set_host_threads(threads)
    check_unique(groups)
    check_unique(groups)  # no state remains


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_all_sizes(dtype, threads):
    """Small groups share tasks; those of 65,536 ids and more are split, across features."""
    set_host_threads(threads)
    rng = np.random.default_rng(threads)
    sizes = [
        [70_000],
        [10, 65_000, 30_000, 0, 90_000],
        [0],
        [16_000] * 3,
        [65_535],
        [65_536],
        *[[1000]] * 20,
        [200_000],
    ]
    for span in (500, 100_000, 2**31):
        groups = [[(span * rng.random(n) ** 2).astype(dtype) for n in features] for features in sizes]
        check_unique(groups)


def test_the_ends_of_the_range_of_ids():
    for dtype in DTYPES:
        ends = np.iinfo(dtype)
        ids = np.array([ends.max, ends.min, -1, 0, ends.max, ends.min + 1], dtype)
        check_unique([[ids, ids[::-1].copy()], [np.arange(300, dtype=dtype), ids]])


@pytest.mark.parametrize("start", [(1 << 18) - 2, (1 << 18) - 1, 1 << 18])
def test_ids_at_the_limit_of_places(start):
    ids = np.arange(start, start + 2, dtype=np.int64)
    check_unique([[ids[::-1].copy(), ids]])


def test_ids_of_another_kind_are_refused():
    good = np.zeros(3, np.int32)
    with pytest.raises(TypeError, match="int32 or int64, not float32"):
        unique_groups([[good], [good.astype(np.float32)]])
    with pytest.raises(ValueError, match=r"one dimension; these have the shape \(3, 1\)"):
        unique_groups([[good[:, None]]])
    with pytest.raises(ValueError, match="C-contiguous"):
        check_groups([([good[::2]], 5)])
    with pytest.raises(ValueError, match="group 1 must have .* the same dtype"):
        unique_groups([[good], [good, good.astype(np.int64)]])
    with pytest.raises(ValueError, match="group 0 must have at least one feature"):
        unique_groups([[]])


@settings(deadline=None)
@given(st.data())
def test_the_first_id_outside(data):
    set_host_threads(data.draw(st.sampled_from(THREADS)))
    groups, expected = [], None
    for g in range(data.draw(st.integers(0, 4))):
        rows, features = data.draw(st.integers(0, 9)), []
        for f in range(data.draw(st.integers(0, 3))):
            dtype = data.draw(st.sampled_from(DTYPES))
            ids = data.draw(
                st.lists(st.integers(-1, 9) if data.draw(st.booleans()) else st.integers(0, max(0, rows - 1)))
            )
            features.append(np.array(ids, dtype))
            wrong = [(g, f, i) for i, value in enumerate(ids) if not 0 <= value < rows]
            expected = expected or next(iter(wrong), None)
        groups.append((features, rows))
    assert check_groups(groups) == expected


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("wrong", [-1, 1000, 2**40])
@pytest.mark.parametrize("where", [0, 65_535, 65_536, 130_000, 199_999])
def test_an_id_outside_among_many(where, wrong, threads):
    set_host_threads(threads)
    ids = np.random.default_rng(0).integers(0, 1000, 200_000)
    groups = [([ids[:70_000].astype(np.int32), ids], 1000), ([ids], 1000)]
    assert check_groups(groups) is None
    ids[where] = wrong
    assert check_groups(groups) == (0, 1, where)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000)), st.sampled_from(DTYPES))
def test_offsets(lengths, dtype):
    offsets = offsets_of(np.array(lengths, dtype))
    assert offsets.dtype == np.int32
    np.testing.assert_array_equal(offsets, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def test_lengths_that_are_none():
    with pytest.raises(UserError, match="length of bag 1 is -2; it must be 0 or more"):
        offsets_of(np.array([3, -2, -1]))
    offsets_of(np.array([2**31 - 2, 1]))
    for lengths in ([2**31 - 1, 1], [2**62, 2**62, 2**62, 2**62], [2**31]):
        with pytest.raises(UserError, match="bag lengths add up to more than 2147483647"):
            offsets_of(np.array(lengths))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=40),
    st.integers(-1, 5),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.sampled_from(THREADS),
)
def test_padding_is_dropped(bags, padding, weighted, dtype, threads):
    set_host_threads(threads)
    values = np.array([value for bag in bags for value in bag], dtype)
    lengths = np.array([len(bag) for bag in bags], np.int32)
    weights = np.random.default_rng(0).random(len(values), np.float32) if weighted else None
    kept_values, kept_lengths, kept_weights = drop_padding(values, lengths, padding, weights)
    kept = values != padding
    np.testing.assert_array_equal(kept_values, values[kept])
    np.testing.assert_array_equal(kept_lengths, [sum(value != padding for value in bag) for bag in bags])
    assert kept_values.dtype == dtype
    assert kept_lengths.dtype == np.int32
    if weights is None:
        assert kept_weights is None
    else:
        np.testing.assert_array_equal(kept_weights, weights[kept])
    if kept.all():
        assert kept_values is values


@pytest.mark.parametrize("threads", THREADS)
def test_padding_of_many_bags(threads):
    set_host_threads(threads)
    rng = np.random.default_rng(threads)
    lengths = rng.integers(0, 60, 5000).astype(np.int32)
    values, weights = rng.integers(-1, 3, lengths.sum()), rng.random(lengths.sum(), np.float32)
    bag = np.repeat(np.arange(5000), lengths)
    found = drop_padding(values, lengths, -1, weights)
    kept = values != -1
    for got, wanted in zip(found, (values[kept], np.bincount(bag[kept], minlength=5000), weights[kept]), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_padding_beyond_the_dtype_is_of_no_use():
    values, lengths = np.array([-1, 0], np.int32), np.array([2], np.int32)
    assert drop_padding(values, lengths, 2**32 - 1, None)[0] is values
    with pytest.raises(ValueError, match=r"lengths sum to 2; the number of values \(3\)"):
        drop_padding(np.zeros(3, np.int32), lengths, -1, None)
