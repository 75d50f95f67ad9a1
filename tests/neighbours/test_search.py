"""Nearest rows equal those of a plain NumPy search, whatever the blocks."""

import numpy as np
import pytest

import hostdev
from hostdev.checkpoint import remote
from hostdev.checkpoint.layers import Layers
from hostdev.core.errors import UserError
from hostdev.ext.neighbours import METRICS, search
from hostdev.ext.neighbours.search import find_nearest

NONE = np.empty(0, np.int64)


def saved(path, weights):
    """Save a table with these weights; return its rows as a search sees them."""
    table = hostdev.HostTable(*weights.shape, hostdev.SGD(lr=0.0), name="t")
    table.write_rows(np.arange(len(weights)), weights[:, None], np.empty((len(weights), 0), np.float32))
    hostdev.Runtime({"x": table}, depth=0).save(path)
    return search.NamedRows(Layers(remote.newest(path).chain), "t", None, None)


def naive(weights, query, metric):
    """Return all scores in float64; the nearest row has the largest."""
    weights, query = weights.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        return np.array([-np.linalg.norm(row - query) for row in weights])
    lengths = [np.linalg.norm(row) * np.linalg.norm(query) if metric == "cosine" else 1 for row in weights]
    return np.array([row @ query / length if length else 0 for row, length in zip(weights, lengths, strict=True)])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("block", [1 << 22, 7 * 4 * 5])
def test_equals_numpy(tmp_path, monkeypatch, metric, block):
    monkeypatch.setattr(search, "_BLOCK_BYTES", block)
    weights = np.random.default_rng(1).normal(size=(101, 5)).astype(np.float32)
    weights[50] = 0
    found = find_nearest(saved(tmp_path, weights), weights[[3, 77]], 9, metric, np.array([3]))
    for number, query in enumerate((3, 77)):
        scores = naive(weights, weights[query], metric)
        scores[3] = -np.inf
        expected = np.argsort(-scores, kind="stable")[:9]
        assert found.ids[number].tolist() == expected.tolist()
        np.testing.assert_allclose(found.scores[number], (-1 if metric == "l2" else 1) * scores[expected], atol=1e-12)


def test_equal_scores_are_in_the_order_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_BLOCK_BYTES", 3 * 4 * 2)
    weights = np.tile(np.array([[1, 2]], np.float32), (20, 1))
    weights[[4, 11]] = [[2, 4], [-1, -2]]
    found = find_nearest(saved(tmp_path, weights), weights[:1], 19, "l2", np.array([0]))
    assert found.ids[0].tolist() == [*range(1, 4), *range(5, 11), *range(12, 20), 4, 11]
    assert found.scores[0, :2].tolist() == [0, 0]


def test_rows_that_are_not_finite_are_left_out(tmp_path):
    weights = np.ones((6, 2), np.float32)
    opened = saved(tmp_path, weights)
    weights[2], weights[4, 0] = np.nan, np.inf
    opened.lookup = lambda ids: weights[ids]
    found = find_nearest(opened, weights[:1], 4, "dot", NONE)
    assert (found.ids[0].tolist(), found.not_finite) == ([0, 1, 3, 5], 2)
    with pytest.raises(UserError, match="there are only 4 rows with finite values"):
        find_nearest(opened, weights[:1], 5, "dot", NONE)
    with pytest.raises(UserError, match="not finite"):
        find_nearest(opened, weights[2:3], 1, "dot", NONE)
    with pytest.raises(UserError, match="only zeros"):
        find_nearest(opened, np.zeros((1, 2), np.float32), 1, "cosine", NONE)


def test_picked_rows_are_spread_over_segments(tmp_path):
    from hostdev.data.schema import Space

    opened = saved(tmp_path, np.ones((20, 2), np.float32))
    opened._segments = list(Space("s", 0, 3, 4, ((10, 5), (18, 1))).segments)
    assert len(opened) == 10
    assert opened.pick(100).tolist() == [3, 4, 5, 6, 10, 11, 12, 13, 14, 18]
    assert opened.pick(2).tolist() == [3, 18]
    assert [number for number in range(20) if opened.has(number)] == opened.pick(100).tolist()
    assert np.concatenate([ids for ids, _ in opened.blocks()]).tolist() == opened.pick(100).tolist()
