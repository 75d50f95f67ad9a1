"""Quality of predictions within groups, such as the samples of each user: GAUC, NDCG and recall at k, in float64.

If samples have equal scores, a metric is the mean over all orders of these samples, so that no result depends on the
order of the samples.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Counts


class Ranked(NamedTuple):
    """Metrics, as means over groups of samples; NaN if there is no group of the kind that the metric needs.

    Attributes:
        gauc: Mean AUC of the groups with both labels, weighted by their samples (Zhu et al., KDD 2017).
        ndcg: Mean normalized discounted cumulative gain at k of the groups with a positive sample (Jarvelin
            and Kekalainen, TOIS 2002), as in scikit-learn's `ndcg_score`.
        recall: Mean share of a group's positive samples that are among its k highest-scored samples.
        groups: Number of groups.
        mixed: Number of groups with both labels.
        positive: Number of groups with a positive sample.
    """

    gauc: float
    ndcg: float
    recall: float
    groups: int
    mixed: int
    positive: int


class _Runs(NamedTuple):
    """Runs of samples that have the same group and equal scores, ordered by group and by decreasing score.

    The gain of each sample is the mean gain of its run. All arrays are int64.

    Attributes:
        group: Index of each run's group.
        place: Number of samples of the same group before each run.
        sizes: Samples of each run.
        positives: Positive samples of each run.
        group_sizes: Samples of each group.
        group_positives: Positive samples of each group.
    """

    group: Counts
    place: Counts
    sizes: Counts
    positives: Counts
    group_sizes: Counts
    group_positives: Counts


def rank(
    groups: npt.NDArray[np.uint64], scores: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_], k: int
) -> Ranked:
    """Return the metrics at k of samples with these group keys, scores and labels."""
    n = len(scores)
    if n == 0:
        return Ranked(np.nan, np.nan, np.nan, 0, 0, 0)
    order = np.lexsort((-scores, groups))
    groups, scores, labels = groups[order], scores[order], labels[order]
    is_new_group = np.concatenate([[True], groups[1:] != groups[:-1]])
    starts = np.flatnonzero(is_new_group)
    begins = np.flatnonzero(is_new_group | np.concatenate([[True], scores[1:] != scores[:-1]]))
    group = np.searchsorted(starts, begins, "right") - 1
    sizes, run_sizes = np.diff(starts, append=n), np.diff(begins, append=n)
    positives, run_positives = (np.add.reduceat(labels.astype(np.int64), each) for each in (starts, begins))
    runs = _Runs(group, begins - starts[group], run_sizes, run_positives, sizes, positives)
    return Ranked(
        _gauc(runs),
        *_at_k(runs, k),
        groups=len(starts),
        mixed=int(np.count_nonzero((positives > 0) & (positives < sizes))),
        positive=int(np.count_nonzero(positives)),
    )


def _gauc(runs: _Runs) -> float:
    """Return the weighted mean AUC; pairs are counted in integers."""
    negatives, group_negatives = runs.sizes - runs.positives, runs.group_sizes - runs.group_positives
    before = np.concatenate([[0], np.cumsum(group_negatives)])[runs.group]
    below = group_negatives[runs.group] - (np.cumsum(negatives) - before)  # the group's negatives with lower scores
    twice = np.zeros(len(runs.group_sizes), np.int64)
    np.add.at(twice, runs.group, runs.positives * (2 * below + negatives))
    pairs = runs.group_positives * group_negatives
    mixed = pairs > 0
    if not mixed.any():
        return float("nan")
    return float(np.average(twice[mixed] / (2 * pairs[mixed]), weights=runs.group_sizes[mixed]))


def _at_k(runs: _Runs, k: int) -> tuple[float, float]:
    """Return NDCG and recall at k."""
    some = runs.group_positives > 0
    if not some.any():
        return float("nan"), float("nan")
    discounts = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, k + 2)))])  # sums over the first ranks
    low, high = np.minimum(runs.place, k), np.minimum(runs.place + runs.sizes, k)
    share = runs.positives / runs.sizes
    gain, found = np.zeros(len(some)), np.zeros(len(some))
    np.add.at(gain, runs.group, share * (discounts[high] - discounts[low]))
    np.add.at(found, runs.group, share * (high - low))
    best = discounts[np.minimum(runs.group_positives, k)]
    return float(np.mean(gain[some] / best[some])), float(np.mean(found[some] / runs.group_positives[some]))
