import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.kernels.claims import claim, others


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sets(st.integers(0, 15), max_size=12), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 3))
def test_claims_are_intersections(batches, oldest, staleness):
    """Against sets: a row is late if a batch from `oldest` on has it; its owner is the last such batch."""
    owners = np.zeros((16, 2), np.int32)
    sent = [np.array(sorted(batch, key=lambda row: (row * 7) % 16), np.int32) for batch in batches]
    for number, ids in enumerate(sent, 1):
        newest = number - 1 - staleness
        found = claim(ids, owners, number, oldest, newest)
        expected = {}
        for position, row in enumerate(ids):
            having = [earlier for earlier in range(1, number) if row in sent[earlier - 1]]
            owner = min(having[-1], newest) if having else 0
            if owner >= oldest:
                expected[position] = (owner, list(sent[having[-1] - 1]).index(row))
        assert found.late.tolist() == sorted(expected)
        assert found.free.tolist() == [u for u in range(len(ids)) if u not in expected]
        assert list(zip(found.owner, found.source, strict=True)) == [expected[u] for u in found.late]


@pytest.mark.parametrize("n", [0, 1, 7])
def test_others(n):
    for chosen in range(2**n):
        positions = np.array([i for i in range(n) if chosen >> i & 1], np.int32)
        assert others(n, positions).tolist() == [i for i in range(n) if not chosen >> i & 1]
