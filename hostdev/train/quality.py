"""How good the model is after each epoch, and which epoch was the best."""

from typing import Any, NamedTuple

import numpy as np

from hostdev.train.trainer import Evaluation


class Point(NamedTuple):
    """An evaluation."""

    epoch: int  # from 1
    step: int  # since the start of the training
    test: Evaluation
    training: Evaluation | None  # of a sample of the training rows


class Quality:
    """The evaluations of a run. The best is the one with the highest AUC on test rows, of equal ones the first.

    patience  epochs without a better one after which it is enough; None: never
    """

    def __init__(self, patience: int | None = None) -> None:
        self.points: list[Point] = []
        self.best: Point | None = None
        self._patience = patience

    def add(self, point: Point) -> None:
        """Take in the next epoch's evaluation. An AUC that is not a number, as of rows with one label, is no better."""
        self.points.append(point)
        if np.isfinite(point.test.auc) and (self.best is None or point.test.auc > self.best.test.auc):
            self.best = point

    def as_values(self) -> list[Any]:
        """Return the evaluations as lists of numbers, for a checkpoint."""
        return [
            [point.epoch, point.step, list(point.test), None if point.training is None else list(point.training)]
            for point in self.points
        ]

    def restore(self, values: list[Any], before_epoch: float = np.inf) -> None:
        """Take in the evaluations of `as_values`; of epochs before this one only."""
        for epoch, step, test, training in values:
            if epoch < before_epoch:
                self.add(Point(epoch, step, Evaluation(*test), None if training is None else Evaluation(*training)))

    @property
    def is_enough(self) -> bool:
        """Tell whether the last `patience` epochs were not better than one before."""
        since = len(self.points) - (self.points.index(self.best) + 1 if self.best is not None else 0)
        return self._patience is not None and since >= self._patience

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says: None for what is not known."""
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
    """JSON has no NaN: the AUC of rows with one label only is null."""
    return value if value is not None and np.isfinite(value) else None
