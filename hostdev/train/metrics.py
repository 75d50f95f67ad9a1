"""How good predictions are: AUC and log loss over all rows, in float64."""

import numpy as np
import numpy.typing as npt


def auc(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> float:
    """Return the area under the ROC curve; equal scores count half. NaN unless both labels occur.

    logits  float32 [N], any monotone score
    labels  float32 [N], 0 or 1

    The Mann-Whitney statistic (Hanley & McNeil, Radiology 143, 1982): the mean rank of the positives.
    """
    positives = int(np.count_nonzero(labels))
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, group, sizes = np.unique(logits, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(sizes) - (sizes - 1) / 2  # of each group of equal scores, from 1
    rank_sum = float(mean_rank[group[labels == 1]].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def log_loss(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> float:
    """Return the mean negative log likelihood, in nats; arguments as for `auc`."""
    x = logits.astype(np.float64)
    return float(np.mean(np.maximum(x, 0) - x * labels + np.log1p(np.exp(-np.abs(x)))))
