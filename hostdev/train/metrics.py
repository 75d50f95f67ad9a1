"""AUC and log loss, in float64, of samples in memory. The module `scores` handles samples that do not fit in memory."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

_AT_ONCE = 1 << 20  # values processed at a time


def auc(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> float:
    """Return the area under the ROC curve. Pairs with equal scores count half. NaN unless both labels occur.

    This is the Mann-Whitney statistic (Hanley & McNeil, Radiology 143, 1982). Pairs are counted in integers, so the
    result is rounded only once.

    Args:
        logits: float32 [N], any monotone score.
        labels: float32 [N], 0 or 1.
    """
    positives, negatives = np.sort(logits[labels != 0]), np.sort(logits[labels == 0])
    return make_auc(twice_above(positives, negatives), len(positives), len(negatives))


def twice_above(positives: npt.NDArray[Any], negatives: npt.NDArray[Any]) -> int:
    """Return a sum over all pairs of a positive and a negative sample.

    A pair counts 2 if the positive sample has the higher score, and 1 if the scores are equal.

    Args:
        positives: Sorted scores of positive samples [P].
        negatives: Sorted scores of negative samples [N], of the same dtype.
    """
    twice = 0
    for start in range(0, len(positives), _AT_ONCE):
        some = positives[start : start + _AT_ONCE]
        twice += sum(int(np.searchsorted(negatives, some, side).sum()) for side in ("left", "right"))
    return twice


def make_auc(twice: int, positives: int, negatives: int) -> float:
    """Return the AUC from the result of `twice_above` and the numbers of samples; NaN unless both labels occur."""
    return twice / (2 * positives * negatives) if positives and negatives else float("nan")


def log_loss(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> float:
    """Return the mean negative log likelihood, in nats; arguments as for `auc`."""
    return float(np.mean(losses(logits, labels)))


def losses(logits: npt.NDArray[np.float32], labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return each sample's negative log likelihood, float64 [N]; not finite if its logit is not. Labels may be bool."""
    found = np.empty(len(logits))
    for start, stop in pairwise([*range(0, len(logits), _AT_ONCE), len(logits)]):
        x = logits[start:stop].astype(np.float64)
        with np.errstate(invalid="ignore"):
            found[start:stop] = np.maximum(x, 0) - x * labels[start:stop] + np.log1p(np.exp(-np.abs(x)))
    return found
