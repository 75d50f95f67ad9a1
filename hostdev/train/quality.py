"""The model's quality after each epoch, and the best epoch."""

from typing import Any, NamedTuple

import numpy as np

from hostdev.train.evaluation import Evaluation


class Point(NamedTuple):
    """The evaluation after an epoch."""

    epoch: int  # from 1
    step: int  # since the start of training
    test: Evaluation  # on the validation rows, or on the test rows if there are none
    training: Evaluation | None  # on a subset of the training samples
    final: Evaluation | None = None  # on the test rows, if `test` is on validation rows and this may be the result

    def metrics(self, split: str, labels: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """Return the metrics by split and name; `split` names the split of `test`, "test" or "validation"."""
        splits = {split: self.test, "training": self.training, "test": self.final}
        if split == "test":
            splits["test"] = self.test
        return {name: found.metrics(labels) for name, found in splits.items() if found is not None}


class Quality:
    """The evaluations of a run. The best one is the first with the highest AUC (the lowest RMSE if no label is binary).

    Args:
        patience: Number of epochs without an improvement after which training stops; None for no early stop.
        split: The split that is evaluated: "test" or "validation".
        labels: Names of all labels.
    """

    def __init__(self, patience: int | None = None, split: str = "test", labels: tuple[str, ...] = ("label",)) -> None:
        self.points: list[Point] = []
        self.split, self.labels = split, labels
        self.best: Point | None = None
        self._patience = patience

    def add(self, point: Point) -> None:
        """Add the next epoch's evaluation. If all samples have the same label, the AUC is NaN and never the best."""
        self.points.append(point)
        if self.is_better(point.test):
            self.best = point

    def is_better(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation is better than all earlier ones."""
        return bool(np.isfinite(evaluation.score)) and (self.best is None or evaluation.score > self.best.test.score)

    @property
    def result(self) -> Evaluation | None:
        """The evaluation on the test rows: after the best epoch with validation rows and patience, else the last."""
        if self.split == "test":
            return self.points[-1].test if self.points else None
        point = self.best if self._patience is not None else self.points[-1] if self.points else None
        return None if point is None else point.final

    def as_values(self) -> list[Any]:
        """Return the evaluations as lists of numbers for a checkpoint."""
        return [
            [epoch, step, test.as_values(), *(None if one is None else one.as_values() for one in (training, final))]
            for epoch, step, test, training, final in self.points
        ]

    def restore(self, values: list[Any], before_epoch: float = np.inf) -> None:
        """Add evaluations from the result of `as_values`, but only those of epochs before `before_epoch`."""
        for epoch, step, test, *others in values:  # checkpoints of earlier versions have one value fewer
            if epoch < before_epoch:
                found = [None if one is None else Evaluation.from_values(one) for one in others]
                self.add(Point(epoch, step, Evaluation.from_values(test), *found))

    @property
    def is_enough(self) -> bool:
        """Whether training should stop early, because none of the last `patience` epochs was the best so far."""
        since = len(self.points) - (self.points.index(self.best) + 1 if self.best is not None else 0)
        return self._patience is not None and since >= self._patience

    def summary(self) -> dict[str, Any]:
        """Return the metrics and the best epoch, as entries of summary.json; None for a value that is not known."""
        last, best, result = self.points[-1] if self.points else None, self.best, self.result
        training = last.training if last is not None else None
        watched = last.test if last is not None and self.split == "validation" else None
        validation = {"validation_auc": watched.auc, "validation_logloss": watched.logloss} if watched else {}
        found: dict[str, Any] = {
            "auc": _finite(result and result.auc),
            "logloss": _finite(result and result.logloss),
            **{name: _finite(value) for name, value in validation.items()},
            "training_auc": _finite(training and training.auc),
            "training_logloss": _finite(training and training.logloss),
            "best_epoch": best and best.epoch,
            "best_auc": _finite(best and best.test.auc),
        }
        if last is not None and np.isfinite(last.test.rmse):
            found |= {
                "rmse": _finite(result and result.rmse),
                "mae": _finite(result and result.mae),
                "validation_rmse": _finite(watched and watched.rmse),
                "training_rmse": _finite(training and training.rmse),
                "best_rmse": _finite(best and best.test.rmse),
            }
        if result is not None and result.labels:
            found["labels"] = {
                name: {metric: _finite(value) for metric, value in each._asdict().items()}
                for name, each in zip(self.labels, result.labels, strict=True)
            }
        return found


def _finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite, because JSON cannot represent NaN and infinity."""
    return value if value is not None and np.isfinite(value) else None
