"""A histogram of outputs, from which the AUC of several files together is computed without their scores."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.train.metrics import make_auc
from hostdev.train.scores import make_keys

MOST_BINS = 1 << 14


class Histogram(NamedTuple):
    """The numbers of negative and positive rows by output.

    Outputs whose sortable 32-bit keys are equal without their last `shift` bits share a bin. `shift` is the smallest
    number for which there are at most 16,384 bins, so that the histogram of fewer rows is exact.

    Attributes:
        keys: int32 [bins], ascending.
        counts: int32 [2, bins], of negatives and of positives.
    """

    shift: int
    keys: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]

    @classmethod
    def empty(cls) -> "Histogram":
        """Return the histogram of no rows."""
        return cls(0, np.zeros(0, np.int32), np.zeros((2, 0), np.int32))

    @classmethod
    def of(cls, outputs: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> "Histogram":
        """Return the histogram of outputs float32 [n], with labels [n] of 0 or 1."""
        positive = labels != 0
        counts = np.stack([~positive, positive]).astype(np.int32)
        return _joined(0, make_keys(outputs), counts)

    def plus(self, *others: "Histogram") -> "Histogram":
        """Return the histogram of these rows and others."""
        return merge([self, *others])

    def auc(self) -> float:
        """Return the AUC, where rows in the same bin count as equal; NaN unless both labels occur."""
        negatives, positives = self.counts.astype(np.int64)
        below = np.cumsum(negatives) - negatives
        twice = int((positives * (2 * below + negatives)).sum())
        return make_auc(twice, int(positives.sum()), int(negatives.sum()))


def merge(histograms: Sequence[Histogram]) -> Histogram:
    """Return the histogram of the rows of all histograms, at least one."""
    shift = max(each.shift for each in histograms)
    keys = np.concatenate([each.keys >> (shift - each.shift) for each in histograms])
    return _joined(shift, keys, np.concatenate([each.counts for each in histograms], axis=1))


def _joined(shift: int, keys: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> Histogram:
    """Return the histogram of keys [n], which may repeat, with counts [2, n]."""
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[:, order]
    while True:
        starts = np.flatnonzero(np.concatenate([np.ones(len(keys[:1]), np.bool_), keys[1:] != keys[:-1]]))
        keys, counts = keys[starts], np.add.reduceat(counts, starts, axis=1) if len(starts) else counts[:, :0]
        if len(keys) <= MOST_BINS:
            return Histogram(shift, keys, counts)
        shift, keys = shift + 1, keys >> 1
