import numpy as np
import pytest

from hostdev.train import scores as metrics
from tests import naive


@pytest.mark.parametrize("levels", [2, 10, 10**6])
def test_auc_matches_the_pairs(levels):
    rng = np.random.default_rng(levels)
    scores = (rng.integers(0, levels, 500) / 7).astype(np.float32)
    labels = (rng.random(500) < 0.3).astype(np.float32)
    assert metrics.auc(scores, labels) == pytest.approx(naive.auc(scores, labels), abs=1e-12)


def test_auc_of_known_cases():
    labels = np.array([0, 0, 1, 1], np.float32)
    assert metrics.auc(np.array([1, 2, 3, 4], np.float32), labels) == 1
    assert metrics.auc(np.array([4, 3, 2, 1], np.float32), labels) == 0
    assert metrics.auc(np.zeros(4, np.float32), labels) == 0.5
    assert np.isnan(metrics.auc(np.zeros(4, np.float32), np.ones(4, np.float32)))


def test_log_loss():
    logits = np.array([0, 2, -100, 100, -1000], np.float32)
    labels = np.array([1, 0, 0, 0, 1], np.float32)
    expected = np.mean([np.log(2), np.log1p(np.exp(2)), 0, 100, 1000])
    assert metrics.log_loss(logits, labels) == pytest.approx(expected, rel=1e-12)
