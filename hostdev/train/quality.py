"""The model's quality after each epoch, the best epoch, and their picture curve.png."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core import pictures
from hostdev.train.target_scores import Evaluation

_SMOOTHED_PARTS = 25  # the loss is smoothed over 1 / 25 of all steps
_MOST_POINTS = 4000
_MOST_EPOCH_LINES = 30
_LEAST_RANGE = 0.02  # minimum range of the axis, so that small differences look small
_TEST, _TRAINING = "C1", "C2"  # colours


class Point(NamedTuple):
    """The evaluation after an epoch."""

    epoch: int  # from 1
    step: int  # since the start of training
    test: Evaluation  # on the validation rows, or on the test rows if there are none
    training: Evaluation | None  # on a subset of the training samples
    final: Evaluation | None = None  # on the test rows, if this epoch may be the result and there are validation rows

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
        """The evaluation on the test rows after the last epoch or, with validation rows and patience, the best one."""
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
        """Add evaluations from the result of `as_values`, but only for epochs before `before_epoch`."""
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
            "auc": finite(result and result.auc),
            "logloss": finite(result and result.logloss),
            **{name: finite(value) for name, value in validation.items()},
            "training_auc": finite(training and training.auc),
            "training_logloss": finite(training and training.logloss),
            "best_epoch": best and best.epoch,
            "best_auc": finite(best and best.test.auc),
        }
        if last is not None and np.isfinite(last.test.rmse):
            found |= {
                "rmse": finite(result and result.rmse),
                "mae": finite(result and result.mae),
                "validation_rmse": finite(watched and watched.rmse),
                "training_rmse": finite(training and training.rmse),
                "best_rmse": finite(best and best.test.rmse),
            }
        if result is not None and result.labels:
            found["labels"] = {
                name: {metric: finite(value) for metric, value in each._asdict().items()}
                for name, each in zip(self.labels, result.labels, strict=True)
            }
        return found


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite, because JSON cannot represent NaN and infinity."""
    return value if value is not None and np.isfinite(value) else None


def draw(path: Path, losses: Sequence[float], rows: Sequence[int], quality: Quality) -> None:
    """Write the picture as PNG.

    Args:
        losses: Mean loss of each step's batch.
        rows: Samples in each step's batch.
    """
    figure = pictures.figure(12, 4.6)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, np.array(losses), np.array(rows), quality)
    _draw_metric(right, quality)
    figure.savefig(path, dpi=100)


def _draw_losses(axes: Any, losses: npt.NDArray[Any], rows: npt.NDArray[Any], quality: Quality) -> None:
    step = np.arange(1, len(losses) + 1)
    window = max(1, len(losses) // _SMOOTHED_PARTS)
    smooth = _means(losses, rows, window)
    some = slice(None, None, -(-len(losses) // _MOST_POINTS) or None)
    dots = "." if len(losses) < 10 else ""
    if window > 1:
        axes.plot(step[some], losses[some], color="C0", alpha=0.25, linewidth=0.8)
    label = f"training, mean of {window} steps" if window > 1 else "training, each step"
    middle = step[window - 1 :] - (window - 1) / 2
    axes.plot(middle[some], smooth[some], color="C0", marker=dots, label=label)
    at = [point.step for point in quality.points]
    shown = [*np.percentile(losses, [1, 99]), *smooth]
    is_logloss = not quality.points or set(quality.points[0].test.figures()) == {"AUC", "log loss"}
    is_logloss = is_logloss and not any(point.test.labels for point in quality.points)
    for name, color, values in _series(quality, "logloss") if is_logloss else ():
        if np.isfinite(values).any():
            axes.plot(at, values, color=color, marker="o", linestyle="--", linewidth=1, label=name)
            shown += values
    bottom, top = np.nanmin(shown), np.nanmax(shown)
    margin = 0.06 * (top - bottom) or 0.01
    axes.set(
        xlabel="step", ylabel="log loss" if is_logloss else "loss", title="Loss", ylim=(bottom - margin, top + margin)
    )
    if 1 < len(at) <= _MOST_EPOCH_LINES:
        for end in at[:-1]:
            axes.axvline(end, color="grey", linewidth=0.5)
    _format_integers(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _draw_metric(axes: Any, quality: Quality) -> None:
    epochs = [point.epoch for point in quality.points]
    metric = quality.points[-1].test.metric if quality.points else "AUC"
    for name, color, values in _series(quality, metric.lower()):
        if np.isfinite(values).any():
            axes.plot(epochs, values, color=color, marker="o", label=f"{name}: {values[-1]:.4f} at the end")
    if quality.best is not None:
        epoch, value = quality.best.epoch, quality.best.test.value
        ring = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "linestyle": "none", "color": _TEST}
        axes.plot([epoch], [value], **ring, label=f"best: {value:.4f} after epoch {epoch}")
    axes.set(xlabel="epoch", ylabel=metric, title=f"{metric} after each epoch")
    bottom, top = axes.get_ylim()
    margin = max(0.0, _LEAST_RANGE - (top - bottom)) / 2
    axes.set_ylim(bottom - margin, top + margin)
    axes.set_xlim(min(epochs, default=1) - 0.5, max(epochs, default=1) + 0.5)
    _format_integers(axes)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9)
    else:
        axes.text(0.5, 0.5, f"no {metric}", transform=axes.transAxes, ha="center")


def _series(quality: Quality, name: str) -> list[tuple[str, str, list[float]]]:
    """Return two curves of a metric over the evaluations, each as label, colour and values.

    The first is for test or validation samples, the second for training samples.
    """
    both = [(getattr(point.test, name), getattr(point.training, name, np.nan)) for point in quality.points]
    return [
        (f"{quality.split} rows", _TEST, [pair[0] for pair in both]),
        ("training rows (sampled)", _TRAINING, [pair[1] for pair in both]),
    ]


def _means(losses: npt.NDArray[Any], rows: npt.NDArray[Any], window: int) -> npt.NDArray[np.float64]:
    """Return the moving average of N losses over `window` steps, weighted by samples, float64 [N - window + 1]."""
    ends = np.arange(window, len(losses) + 1)
    sums, counts = (np.concatenate([[0.0], np.cumsum(part, dtype=np.float64)]) for part in (losses * rows, rows))
    means: npt.NDArray[np.float64] = (sums[ends] - sums[ends - window]) / (counts[ends] - counts[ends - window])
    return means


def _format_integers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
