"""The model's quality after each epoch, and the best epoch."""

from typing import Any, NamedTuple

import numpy as np

from hostdev.train.trainer import Evaluation


class Point(NamedTuple):
    """The evaluation after an epoch."""

    epoch: int  # from 1
    step: int  # since the start of training
    test: Evaluation
    training: Evaluation | None  # on a subset of the training samples


class Quality:
    """The evaluations of a run. The best is the first one with the highest test AUC.

    Args:
        patience: Epochs without a better AUC before training stops. None: no early stop.
    """

    def __init__(self, patience: int | None = None) -> None:
        self.points: list[Point] = []
        self.best: Point | None = None
        self._patience = patience

    def add(self, point: Point) -> None:
        """Add the next epoch's evaluation. A NaN AUC, as with a single label, is never the best."""
        self.points.append(point)
        if np.isfinite(point.test.auc) and (self.best is None or point.test.auc > self.best.test.auc):
            self.best = point

    def as_values(self) -> list[Any]:
        """Return the evaluations as lists of numbers for a checkpoint."""
        return [
            [point.epoch, point.step, list(point.test), None if point.training is None else list(point.training)]
            for point in self.points
        ]

    def restore(self, values: list[Any], before_epoch: float = np.inf) -> None:
        """Add the evaluations of `as_values` from epochs before `before_epoch`."""
        for epoch, step, test, training in values:
            if epoch < before_epoch:
                self.add(Point(epoch, step, Evaluation(*test), None if training is None else Evaluation(*training)))

    @property
    def is_enough(self) -> bool:
        """Whether none of the last `patience` epochs has improved the best AUC."""
        since = len(self.points) - (self.points.index(self.best) + 1 if self.best is not None else 0)
        return self._patience is not None and since >= self._patience

    def summary(self) -> dict[str, Any]:
        """Return the entries in summary.json; None for unknown values."""
        last, best = self.points[-1] if self.points else None, self.best
        training = last.training if last is not None else None
        return {
            "auc": _finite(last and last.test.auc),
            "logloss": _finite(last and last.test.logloss),
            "training_auc": _finite(training and training.auc),
            "training_logloss": _finite(training and training.logloss),
            "best_epoch": best and best.epoch,
            "best_auc": _finite(best and best.test.auc),
        }


def _finite(value: float | None) -> float | None:
    """Return the value, or None for NaN, which JSON lacks; the AUC of a single label, for example, is NaN."""
    return value if value is not None and np.isfinite(value) else None
