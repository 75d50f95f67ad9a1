"""Progressive validation: each file is scored before it is trained on, so that its rows are new to the model.

AUC, log loss and calibration are reported for each file and for the rows of the last files together. The latter need
no scores of earlier files: each file leaves a histogram of its outputs.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.data.targets import Targets, columns_of
from hostdev.ext.streams.following.histogram import Histogram, merge
from hostdev.train.evaluation import Evaluation, evaluation_of
from hostdev.train.metrics import losses
from hostdev.train.scores import Figures

_SUMS = 4  # of predictions, of labels, of losses or squared errors, of absolute errors

NAN = float("nan")


class Scored(NamedTuple):
    """What is kept of a file's scores.

    Attributes:
        rows: The number of rows.
        sums: float64 [labels, 4]: sums of predictions, of labels, and of losses and 0 (for a label that is 0 or 1) or
            of squared and absolute errors (for a label that is a number).
        bins: For each label, the numbers of negative and of positive rows by logit; none for a numeric label.
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
        targets: Which of them are numbers.
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
            self._bins[i] = self._bins[i].plus(Histogram.of(output, label))

    def result(self) -> Scored:
        """Return what is kept of the file."""
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
        """Add a file, in place of the oldest if there are as many as the window has."""
        self._files.append(scored)

    def total(self) -> Scored:
        """Return the scores of all files of the window together; there must be one."""
        rows, sums, bins = zip(*self._files, strict=True)
        return Scored(sum(rows), np.sum(sums, axis=0), tuple(map(merge, zip(*bins, strict=True))))

    def evaluation(self) -> Evaluation:
        """Return the quality over the window's rows; the AUC counts rows in the same bin of a histogram as equal."""
        return evaluate(self.total(), self._is_number)

    def as_values(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {"files": [[each.rows, each.sums, [list(one) for one in each.bins]] for each in self._files]}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Hold the files that `as_values` converted to these values, and no others."""
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
