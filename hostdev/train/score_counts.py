"""Counts of samples by predicted probability, from which calibration and the distribution of scores are drawn."""

from typing import Any

import numpy as np

from hostdev.core.run_files import SCORE_BINS, SCORE_LIMIT
from hostdev.data.schema import Targets, columns_of
from hostdev.kernels.arrays import Values


class ScoreCounts:
    """Counts the samples of an evaluation by label and probability, in memory that does not grow.

    Bins have equal widths in log-odds, so that they are narrow where probabilities are small; the first and the last
    bin also hold the samples beyond them.

    Args:
        labels: Names of all labels.
        targets: Which of them are numbers; these have no probability, and are left out.
    """

    def __init__(self, labels: tuple[str, ...], targets: Targets) -> None:
        self._names = [None if name in targets.numeric else name for name in labels]
        self._counts = np.zeros((len(labels), 2, SCORE_BINS), np.int64)
        self._sums = np.zeros((len(labels), SCORE_BINS))

    def add(self, outputs: Values, labels: Values) -> None:
        """Add samples: logits and labels, each float32 [n], or [n, labels] if there are several labels."""
        for i, (output, label) in enumerate(zip(columns_of(outputs), columns_of(labels), strict=True)):
            if self._names[i] is None:
                continue
            known = np.isfinite(output)
            logits = output[known].astype(np.float64)
            positive = label[known] != 0
            scaled = (logits + SCORE_LIMIT) * (SCORE_BINS / (2 * SCORE_LIMIT))
            bins = np.clip(scaled, 0, SCORE_BINS - 1).astype(np.int64)
            for to, some in zip(self._counts[i], (bins[~positive], bins[positive]), strict=True):
                to += np.bincount(some, minlength=SCORE_BINS)
            with np.errstate(over="ignore"):
                self._sums[i] += np.bincount(bins, 1 / (1 + np.exp(-logits)), SCORE_BINS)

    def as_lists(self) -> dict[str, list[list[float]]]:
        """Return, by label, [bin, negatives, positives, sum of predictions] for each bin that has samples."""
        found: dict[str, list[list[float]]] = {}
        for name, (negatives, positives), sums in zip(self._names, self._counts, self._sums, strict=True):
            if name is not None:
                used = np.flatnonzero(negatives + positives)
                each: list[Any] = [used, negatives[used], positives[used], sums[used].round(6)]
                found[name] = [list(values) for values in zip(*(one.tolist() for one in each), strict=True)]
        return found
