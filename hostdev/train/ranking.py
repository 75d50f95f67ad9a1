"""Quality of predictions within groups of rows, such as the rows of a user: GAUC, NDCG and recall at k, in float64.

Rows of equal scores count as the mean over all their orders, so that no figure depends on the order of rows.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Ranked(NamedTuple):
    """Means over groups; NaN where no group counts.

    Attributes:
        gauc: Mean AUC of the groups with both labels, weighted by their rows (Zhu et al., KDD 2017).
        ndcg: Mean normalized discounted cumulative gain at k of the groups with a positive row (Jarvelin and
            Kekalainen, TOIS 2002), as scikit-learn's `ndcg_score`.
        recall: Mean share of a group's positive rows that are among its k rows of the highest scores.
        groups: Number of groups.
        mixed: Number of groups with both labels.
        positive: Number of groups with a positive row.
    """

    gauc: float
    ndcg: float
    recall: float
    groups: int
    mixed: int
    positive: int


def rank(
    groups: npt.NDArray[np.uint64], scores: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_], k: int
) -> Ranked:
    """Return the figures of n rows, given the key of each row's group, its score and its label."""
    n = len(scores)
    if n == 0:
        return Ranked(np.nan, np.nan, np.nan, 0, 0, 0)
    order = np.lexsort((-scores, groups))
    groups, scores, labels = groups[order], scores[order], labels[order]
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    sizes = np.diff(starts, append=n)
    positives = np.add.reduceat(labels.astype(np.int64), starts)
    # Runs of equal scores within a group: each row of one has the run's mean gain at any place of the run.
    is_first = np.concatenate([[True], (groups[1:] != groups[:-1]) | (scores[1:] != scores[:-1])])
    runs = np.flatnonzero(is_first)
    run_sizes = np.diff(runs, append=n)
    run_positives = np.add.reduceat(labels.astype(np.int64), runs)
    group_of_run = np.searchsorted(starts, runs, "right") - 1
    place = runs - starts[group_of_run]  # rows of the group before the run
    return Ranked(
        *_gauc(run_sizes, run_positives, group_of_run, sizes, positives),
        *_at_k(place, run_sizes, run_positives, group_of_run, sizes, positives, k),
        groups=len(starts),
        mixed=int(np.count_nonzero((positives > 0) & (positives < sizes))),
        positive=int(np.count_nonzero(positives)),
    )


def _gauc(
    run_sizes: npt.NDArray[np.int64],
    run_positives: npt.NDArray[np.int64],
    group: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    positives: npt.NDArray[np.int64],
) -> tuple[float]:
    """Return the weighted mean AUC; pairs are counted in integers."""
    run_negatives = run_sizes - run_positives
    ends = np.cumsum(run_negatives)
    before = np.concatenate([[0], np.cumsum(sizes - positives)])[group]
    below = (sizes - positives)[group] - (ends - before)  # negatives of the group with lower scores
    twice = np.zeros(len(sizes), np.int64)
    np.add.at(twice, group, run_positives * (2 * below + run_negatives))
    pairs = positives * (sizes - positives)
    mixed = pairs > 0
    if not mixed.any():
        return (float("nan"),)
    return (float(np.average(twice[mixed] / (2 * pairs[mixed]), weights=sizes[mixed])),)


def _at_k(
    place: npt.NDArray[np.int64],
    run_sizes: npt.NDArray[np.int64],
    run_positives: npt.NDArray[np.int64],
    group: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    positives: npt.NDArray[np.int64],
    k: int,
) -> tuple[float, float]:
    """Return NDCG and recall at k."""
    some = positives > 0
    if not some.any():
        return float("nan"), float("nan")
    discounts = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, k + 2)))])  # sums over the first places
    low, high = np.minimum(place, k), np.minimum(place + run_sizes, k)
    share = run_positives / run_sizes
    gain, found = np.zeros(len(sizes)), np.zeros(len(sizes))
    np.add.at(gain, group, share * (discounts[high] - discounts[low]))
    np.add.at(found, group, share * (high - low))
    best = discounts[np.minimum(positives, k)]
    return float(np.mean(gain[some] / best[some])), float(np.mean(found[some] / positives[some]))
