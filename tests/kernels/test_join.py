import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.kernels.claims import join


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 40), unique=True), st.lists(st.integers(0, 40), unique=True), st.booleans())
def test_a_join_is_an_intersection(ids, others, wide):
    kind = np.int64 if wide else np.int32
    scale = 1 << 40 if wide else 1 << 20
    first, second = join(np.array(ids, kind) * scale, np.array(others, kind) * scale)
    assert first.dtype == second.dtype == np.int32
    shared = [row for row in ids if row in others]
    assert [ids[at] for at in first] == [others[at] for at in second] == shared


@pytest.mark.parametrize("size", [1, 3, 1000, 70_000])
def test_a_large_join(size):
    rng = np.random.default_rng(size)
    ids, others = rng.permutation(3 * size)[: 2 * size].astype(np.int32), rng.permutation(3 * size)[:size]
    first, second = join(ids, others.astype(np.int32))
    np.testing.assert_array_equal(ids[first], others[second])
    assert len(first) == len(np.intersect1d(ids, others))
    assert (np.diff(first) > 0).all()
