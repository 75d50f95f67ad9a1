import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.kernels.claims import MOST_UNFINISHED, Claims, claim, intersect, others


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sets(st.integers(0, 15), max_size=12), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 3))
def test_claims_are_intersections(batches, oldest, staleness):
    """Against sets: a row conflicts if a batch from `oldest` on has it; its owner is the last such batch."""
    claims = Claims(16)
    sent = [np.array(sorted(batch, key=lambda row: (row * 7) % 16), np.int32) for batch in batches]
    for number, ids in enumerate(sent, 1):
        newest = number - 1 - staleness
        found = claim(ids, claims, number, oldest, newest)
        expected = {}
        for position, row in enumerate(ids):
            having = [earlier for earlier in range(1, number) if row in sent[earlier - 1]]
            owner = min(having[-1], newest) if having else 0
            if having and having[-1] >= oldest and owner >= oldest:
                expected[position] = owner
        assert found.rows.tolist() == sorted(expected)
        assert found.owner.tolist() == [expected[u] for u in found.rows]
        if number > 1:
            shared = [u for u, row in enumerate(sent[number - 2]) if row in ids]
            assert intersect(sent[number - 2], ids, claims, number).tolist() == shared


@pytest.mark.parametrize("gap", [0, 60, 150, 255, 256])
@pytest.mark.parametrize("window", [1, 3, MOST_UNFINISHED])
def test_old_claims_are_forgotten_before_their_tags_repeat(window, gap):
    """Also with batches without claims in between, as in an evaluation, and at any number."""
    rng = np.random.default_rng(window)
    rows = 2000
    claims, last = Claims(rows), np.zeros(rows, int)
    number = 0
    for step in range(1, 1200):
        number += 1 + gap * (step % 95 == 0)
        # Few rows per batch, so that most claims grow old.
        ids = rng.choice(rows, rng.integers(0, 9), replace=False)
        oldest = max(1, number - window)
        found = claim(ids, claims, number, oldest, number - 1)
        late = [u for u, row in enumerate(ids) if last[row] >= oldest]
        assert found.rows.tolist() == late, number
        assert found.owner.tolist() == [last[ids[u]] for u in late]
        last[ids] = number


def test_too_many_unfinished():
    message = "batch 200 cannot claim rows while batch 99, more than 100 batches earlier, is unfinished"
    with pytest.raises(ValueError, match=message):
        claim(np.array([1]), Claims(4), 200, 99, 199)


@pytest.mark.parametrize("n", [0, 1, 7])
def test_others(n):
    for chosen in range(2**n):
        positions = np.array([i for i in range(n) if chosen >> i & 1], np.int32)
        assert others(n, positions).tolist() == [i for i in range(n) if not chosen >> i & 1]
