"""GAUC, NDCG and recall at k against plain Python over all orders of equal scores."""

import itertools

import numpy as np
import pytest

from hostdev.ext.predict.measures import rank
from hostdev.train import scores as metrics


def orders(scores):
    """Yield all orders of rows by falling score, where equal scores may stand in any order."""
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            yield list(order)


def by_hand(groups, scores, labels, k):
    aucs, weights, ndcgs, recalls = [], [], [], []
    for group in np.unique(groups):
        mine = groups == group
        some, which = scores[mine], labels[mine]
        if 0 < which.sum() < len(which):
            aucs.append(metrics.auc(some, which.astype(np.float32)))
            weights.append(len(which))
        if which.any():
            best = sum(1 / np.log2(2 + place) for place in range(min(k, which.sum())))
            each = [which[order[:k]] for order in orders(some)]
            ndcgs.append(np.mean([sum(one / np.log2(np.arange(2, 2 + len(one)))) for one in each]) / best)
            recalls.append(np.mean([one.sum() for one in each]) / which.sum())
    nan = float("nan")
    return (
        np.average(aucs, weights=weights) if aucs else nan,
        np.mean(ndcgs) if ndcgs else nan,
        np.mean(recalls) if recalls else nan,
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("k", [1, 3, 10])
def test_figures_of_groups(seed, k):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 26))
    groups = rng.integers(0, 9, n).astype(np.uint64) << np.uint64(60)
    scores = rng.integers(-2, 4, n).astype(np.float32)
    labels = rng.random(n) < rng.random()
    found = rank(groups, scores, labels, k)
    np.testing.assert_allclose(found[:3], by_hand(groups, scores, labels, k), rtol=1e-12)
    shuffled = rng.permutation(n)
    np.testing.assert_allclose(rank(groups[shuffled], scores[shuffled], labels[shuffled], k), found, rtol=1e-12)
    assert found.groups == len(np.unique(groups))


def test_no_rows_and_one_label():
    none = np.zeros(0, np.uint64), np.zeros(0, np.float32), np.zeros(0, np.bool_)
    assert rank(*none, 5).groups == 0
    found = rank(np.zeros(3, np.uint64), np.arange(3, dtype=np.float32), np.ones(3, np.bool_), 2)
    assert np.isnan(found.gauc)
    assert (found.ndcg, found.recall, found.mixed, found.positive) == (1.0, 2 / 3, 0, 1)
