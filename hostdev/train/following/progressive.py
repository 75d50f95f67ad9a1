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
from hostdev.train.evaluation import Evaluation, evaluation_of
from hostdev.train.metrics import losses, make_auc
from hostdev.train.scores import Figures

BINS = 4096  # of logits in [-16, 16); logits beyond are in the first and the last
_PER_LOGIT = 128
_SUMS = 4  # of predictions, of labels, of losses or squared errors, of absolute errors

NAN = float("nan")


class Scored(NamedTuple):
    """What is kept of a file's scores.

    Attributes:
        rows: The number of rows.
        sums: float64 [labels, 4]: sums of predictions, of labels, and of losses and 0 (for a label that is 0 or 1) or
            of squared and absolute errors (for a label that is a number).
        bins: int64 [labels, 2, BINS]: the numbers of negative and of positive rows by logit; 0 for numeric labels.
    """

    rows: int
    sums: npt.NDArray[np.float64]
    bins: npt.NDArray[np.int64]

    def plus(self, other: "Scored") -> "Scored":
        """Return the scores of both together."""
        return Scored(self.rows + other.rows, self.sums + other.sums, self.bins + other.bins)

    def calibration(self) -> list[float]:
        """Return, for each label, the mean prediction divided by the mean label; NaN if the latter is 0."""
        predicted, label = self.sums[:, 0], self.sums[:, 1]
        return [a / b if b else NAN for a, b in zip(predicted.tolist(), label.tolist(), strict=True)]


class Collector:
    """Adds up the outputs and labels of a file's rows.

    Args:
        labels: Names of all labels.
        targets: Which of them are numbers.
    """

    def __init__(self, labels: tuple[str, ...], targets: Targets) -> None:
        self._is_number = [name in targets.numeric for name in labels]
        self._rows = 0
        self._sums = np.zeros((len(labels), _SUMS))
        self._bins = np.zeros((len(labels), 2, BINS), np.int64)

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
                place = np.nan_to_num(np.clip(np.floor(x * _PER_LOGIT) + BINS // 2, 0, BINS - 1)).astype(np.int64)
            sums[2] += losses(output, label).sum()
            for positive in (0, 1):
                self._bins[i, positive] += np.bincount(place[(label != 0) == positive], minlength=BINS)

    def result(self) -> Scored:
        """Return what is kept of the file."""
        return Scored(self._rows, self._sums, self._bins)


class Window:
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
        first, *more = self._files
        for each in more:
            first = first.plus(each)
        return first

    def evaluation(self) -> Evaluation:
        """Return the quality over the window's rows; the AUC counts pairs in the same 1/128 of a logit as equal."""
        return evaluate(self.total(), self._is_number)

    def as_values(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        if not self._files:
            return {"rows": []}
        rows, sums, bins = zip(*self._files, strict=True)
        return {"rows": list(rows), "sums": np.stack(sums), "bins": np.stack(bins)}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Add the files that `as_values` converted to these values."""
        for i, rows in enumerate(values["rows"]):
            self.add(Scored(rows, np.array(values["sums"][i]), np.array(values["bins"][i])))


def evaluate(scored: Scored, is_number: tuple[bool, ...]) -> Evaluation:
    """Return the quality of scores; `is_number` tells for each label whether it is a number."""
    each = []
    for i, numeric in enumerate(is_number):
        if numeric:
            _, _, squares, sizes = (scored.sums[i] / scored.rows).tolist()
            each.append(Figures(NAN, NAN, scored.rows, 0, squares**0.5, sizes))
            continue
        negatives, positives = scored.bins[i]
        below = np.cumsum(negatives) - negatives
        twice = sum((positives * (2 * below + negatives)).tolist())
        auc = make_auc(twice, int(positives.sum()), int(negatives.sum()))
        each.append(Figures(auc, float(scored.sums[i, 2]) / scored.rows, scored.rows, 0))
    return evaluation_of(each)
