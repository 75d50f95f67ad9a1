"""Progressive validation: each file is scored before it is trained on, so that its rows are new to the model.

AUC, log loss and calibration are reported for each file, and for the rows of the last files together. The scores of
earlier files are not kept for that: each file leaves a histogram of its outputs.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.data.schema import Targets, columns_of
from hostdev.train.scores import Figures, losses, make_auc, make_keys
from hostdev.train.target_scores import Evaluation, evaluation_of

MOST_BINS = 1 << 14
_SUMS = 4  # sums for each label: predictions, labels, losses or squared errors, absolute errors
NAN = float("nan")


class Histogram(NamedTuple):
    """The numbers of negative and positive rows by output.

    Outputs whose sortable 32-bit keys are equal without their last `shift` bits share a bin. `shift` is the smallest
    number for which there are at most 16,384 bins, so that the histogram of at most so many rows is exact.

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


class Scored(NamedTuple):
    """The summary of a file's scores; the scores themselves are not kept.

    Attributes:
        rows: The number of rows.
        sums: float64 [labels, 4]: sums of predictions, of labels, and of losses and 0 (for a label that is 0 or 1) or
            of squared and absolute errors (for a label that is a number).
        bins: For each label, the numbers of negative and of positive rows by logit; empty for a numeric label.
    """

    rows: int
    sums: npt.NDArray[np.float64]
    bins: tuple[Histogram, ...]

    def calibration(self) -> list[float]:
        """Return, for each label, the mean prediction divided by the mean label; NaN if the latter is 0."""
        predicted, label = self.sums[:, 0], self.sums[:, 1]
        return [a / b if b else NAN for a, b in zip(predicted.tolist(), label.tolist(), strict=True)]


class OutputSums:
    """Adds up the outputs and labels of a file's rows.

    Args:
        labels: Names of all labels.
        targets: Says which labels are numbers.
    """

    def __init__(self, labels: tuple[str, ...], targets: Targets) -> None:
        self._is_number = [name in targets.numeric for name in labels]
        self._rows = 0
        self._sums = np.zeros((len(labels), _SUMS))
        self._bins = [Histogram.empty() for _ in labels]

    def add(self, outputs: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> None:
        """Add samples: outputs and labels, each float32 [n], or [n, labels] if there are several labels."""
        self._rows += len(labels)
        for i, (output, label) in enumerate(zip(columns_of(outputs), columns_of(labels), strict=True)):
            x, sums = output.astype(np.float64), self._sums[i]
            sums[1] += label.sum(dtype=np.float64)
            if self._is_number[i]:
                errors = x - label
                sums[0] += x.sum()
                sums[2:] += np.square(errors).sum(), np.abs(errors).sum()
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                sums[0] += (1 / (1 + np.exp(-x))).sum()
            sums[2] += losses(output, label).sum()
            self._bins[i] = merge([self._bins[i], Histogram.of(output, label)])

    def result(self) -> Scored:
        """Return the summary of the rows that were added."""
        return Scored(self._rows, self._sums, tuple(self._bins))


class ScoreWindow:
    """The scores of the last files."""

    def __init__(self, files: int, targets: tuple[bool, ...]) -> None:
        self._files: deque[Scored] = deque(maxlen=files)
        self._is_number = targets

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def add(self, scored: Scored) -> None:
        """Add a file; if the window is full, it replaces the oldest file."""
        self._files.append(scored)

    def total(self) -> Scored:
        """Return the scores of all files of the window together; it must have at least one file."""
        rows, sums, bins = zip(*self._files, strict=True)
        return Scored(sum(rows), np.sum(sums, axis=0), tuple(map(merge, zip(*bins, strict=True))))

    def evaluation(self) -> Evaluation:
        """Return the quality over the window's rows; the AUC counts rows in the same bin of a histogram as equal."""
        return evaluate(self.total(), self._is_number)

    def as_values(self) -> dict[str, Any]:
        """Return the scores as values for a checkpoint."""
        return {"files": [[each.rows, each.sums, [list(one) for one in each.bins]] for each in self._files]}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Replace the files by those that `as_values` converted to these values."""
        self._files.clear()
        for rows, sums, bins in values["files"]:
            self.add(Scored(rows, sums, tuple(Histogram(*one) for one in bins)))


def evaluate(scored: Scored, is_number: tuple[bool, ...]) -> Evaluation:
    """Return the quality of scores; `is_number` tells for each label whether it is a number."""
    each = []
    for i, numeric in enumerate(is_number):
        if numeric:
            _, _, squares, sizes = (scored.sums[i] / scored.rows).tolist()
            each.append(Figures(NAN, NAN, scored.rows, 0, squares**0.5, sizes))
            continue
        each.append(Figures(scored.bins[i].auc(), float(scored.sums[i, 2]) / scored.rows, scored.rows, 0))
    return evaluation_of(each)
