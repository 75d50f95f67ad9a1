"""curve.png: a run's losses by step and its AUC or RMSE by epoch, on test and training samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core import pictures
from hostdev.train.quality import Quality

_SMOOTHED_PARTS = 25  # the loss is smoothed over 1 / 25 of all steps
_MOST_POINTS = 4000
_MOST_EPOCH_LINES = 30
_LEAST_RANGE = 0.02  # minimum range of the axis, so that small differences look small
_TEST, _TRAINING = "C1", "C2"  # colours


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
