"""Bags and sums of gradients over several features against their references, bit for bit, on any number of threads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.kernels.arrays import Strided
from hostdev.kernels.bags import FeatureOccurrences, Uses, pool, sum_uses
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import unique
from tests import naive
from tests.combinations import pairs_first

THREADS = [1, 2, 4]
DIMS = [1, 3, 16, 80, 128]


def to_bfloat16(x):
    """Return the 16 bits of float32 x rounded to nearest, ties to even, as uint16; x has no NaN."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(stored):
    return (stored.astype(np.uint32) << 16).view(np.float32)


def same(got, wanted):
    """Return whether the bits are equal: -0 is not 0."""
    assert got.shape == wanted.shape
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), wanted.view(f"u{wanted.itemsize}"))


def batch(rng, lengths, span, *, weighted, pooled, mean, seen=()):
    """Return a feature of bags of these lengths, with ids below `span`; `seen` are the ids of earlier features."""
    N = int(np.sum(lengths))
    ids = np.concatenate([np.array(seen, np.int64), rng.integers(0, span, N)])
    inverse = unique(ids)[1][len(seen) :].copy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) if pooled else None
    weights = rng.choice([1.0, 0.37, 0.0, -1.7], N).astype(np.float32) if weighted else None
    return FeatureOccurrences(inverse, offsets, weights, mean), ids


def numbers(rng, *shape):
    """Return numbers of all magnitudes, including -0."""
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, (shape[0], 1))).astype(np.float32)
    values[rng.random(shape) < 0.05] = -0.0
    return values


def among_others(rows):
    """Return the rows as every third one of a larger array, from its row 2."""
    values = np.full((2 + 3 * len(rows), rows.shape[1]), 77, rows.dtype)
    values[2::3] = rows
    return Strided(values, 2, 3)


def check(features, ids, rng, dim):
    rows = numbers(rng, len(unique(ids)[0]), dim)
    for feature in features:
        if feature.offsets is None:
            continue
        expected = naive.pool(rows, *feature)
        out = np.full(expected.shape, np.nan, np.float32)
        pool(rows, feature, out)
        same(out, expected)
        stored = np.full(expected.shape, 77, np.uint16)
        pool(rows, feature, stored)
        same(stored, to_bfloat16(expected))
    grads, terms = [], []
    for number, feature in enumerate(features):
        grad = numbers(rng, len(feature.inverse) if feature.offsets is None else len(feature.offsets) - 1, dim)
        grads.append(to_bfloat16(grad) if number % 3 == 2 else grad)
        grad = from_bfloat16(grads[-1]) if number % 3 == 2 else grad
        terms.append(naive.terms_of(grad, *feature[1:]))
    inverse = np.concatenate([feature.inverse for feature in features])
    expected = naive.segment_sum(np.concatenate(terms), inverse, len(rows))
    uses = Uses(features, len(rows))
    for place in (Strided, among_others):  # the second time reuses the sorted occurrences
        out = np.full_like(rows, np.nan)
        uses.sum([place(grad) for grad in grads], out)
        same(out, expected)
    # Numbered in any order, and with rows that do not occur.
    number = rng.permutation(len(rows) + 3).astype(np.int32)
    moved = [feature._replace(inverse=number[feature.inverse]) for feature in features]
    out = np.full((len(rows) + 3, dim), np.nan, np.float32)
    sum_uses(moved, grads, out, in_order=False)
    same(out[number[: len(rows)]], expected)
    same(out[number[len(rows) :]], np.full((3, dim), -0.0, np.float32))


LENGTHS = [[], [0], [1], [0, 0, 3, 0], [5] * 40, [0, 300, 1, 0, 64, 65]]


@pairs_first(
    "lengths, dim, weighted, mean, threads",
    LENGTHS,
    DIMS,
    [False, True],
    [False, True],
    THREADS,
    ids=lambda value: str(value[:6] if isinstance(value, list) else value),
)
def test_one_feature(lengths, dim, weighted, mean, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(dim)
    for span in (1, 30):
        feature, ids = batch(rng, lengths, span, weighted=weighted, pooled=True, mean=mean)
        check([feature], ids, rng, dim)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dim", DIMS)
def test_features_that_share_rows(dim, threads):
    """With and without pooling and weights, float32 and bfloat16, one without ids, one without bags."""
    set_host_threads(threads)
    rng = np.random.default_rng(dim)
    features, ids = [], ()
    kinds = [(False, False), (True, False), (False, True), (True, True)]
    for pooled, weighted in [*kinds, *reversed(kinds)]:
        for lengths in (rng.integers(0, 9, 200), [0] * 7, []):
            mean = bool(rng.integers(2))
            feature, ids = batch(rng, lengths, 90, weighted=weighted, pooled=pooled, mean=mean, seen=ids)
            features.append(feature)
    check(features, ids, rng, dim)


@settings(deadline=None)
@given(st.data())
def test_any_features(data):
    set_host_threads(data.draw(st.sampled_from(THREADS)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dim, span = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 60))
    features, ids = [], ()
    for lengths in data.draw(st.lists(st.lists(st.integers(0, 12), max_size=12), min_size=1, max_size=4)):
        weighted, pooled, mean = (data.draw(st.booleans()) for _ in range(3))
        feature, ids = batch(rng, lengths, span, weighted=weighted, pooled=pooled, mean=mean, seen=ids)
        features.append(feature)
    check(features, ids, rng, dim)


@pytest.mark.parametrize("threads", THREADS)
def test_many_uses(threads):
    """Enough for all threads, in bags of very different sizes."""
    set_host_threads(threads)
    rng = np.random.default_rng(threads)
    lengths = rng.zipf(1.5, 3000).clip(0, 4000) - 1
    for weighted, mean in ((False, True), (True, False)):
        feature, ids = batch(rng, lengths, 5000, weighted=weighted, pooled=True, mean=mean)
        other, ids = batch(rng, [1] * 20_000, 9000, weighted=weighted, pooled=False, mean=mean, seen=ids)
        check([feature, other], ids, rng, 8)


@pytest.mark.parametrize("dim", [1, 8])
def test_what_is_not_finite_stays_in_its_bag(dim):
    rows = np.ones((4, dim), np.float32)
    rows[1], rows[2] = np.nan, np.inf
    offsets = np.array([0, 2, 4, 5, 5], np.int32)
    out = np.empty((4, dim), np.float32)
    pool(rows, FeatureOccurrences(np.array([0, 1, 0, 2, 3], np.int32), offsets, mean=True), out)
    np.testing.assert_array_equal(out[:, 0], [np.nan, np.inf, 1, 0])
    stored = np.empty((4, dim), np.uint16)
    pool(rows, FeatureOccurrences(np.array([0, 1, 0, 2, 3], np.int32), offsets, mean=True), stored)
    np.testing.assert_array_equal(stored[:, 0], [0x7FC0, 0x7F80, 0x3F80, 0])
