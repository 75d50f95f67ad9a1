"""The report of a run that follows a folder: a line for each file, summary.json, and the picture."""

import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hostdev.core import pictures
from hostdev.core.printable import printable
from hostdev.ext.streams.arrivals.converting import Converted
from hostdev.ext.streams.following.progress import MOST_STEPS, RecentQuality
from hostdev.ext.streams.following.progressive import Scored, ScoreWindow
from hostdev.ext.streams.following.state import FollowState
from hostdev.train.checkpointing import Progress
from hostdev.train.target_scores import Evaluation


def make_line(
    number: int,
    file: Converted,
    step: int,
    labels: tuple[str, ...],
    found: tuple[Evaluation, Scored],
    window: ScoreWindow,
) -> dict[str, Any]:
    """Return a line of files.jsonl.

    Args:
        number: The file's number among those taken, from 1.
        step: The number of steps before the file was scored.
        found: The file's quality and scores.
        window: The scores of the last files, with this one.
    """
    return {
        "number": number,
        "file": file.name,
        "sha256": file.sha256,
        "bytes": file.nbytes,
        "after": file.part.after,
        "rows": file.rows,
        "rejected": file.rejected,
        "step": step,
        **_figures(*found, labels),
        "window": _over(window, labels),
        "modified": _when(file.state.modified / 1e9),
        "at": _when(time.time()),
    }


def _over(window: ScoreWindow, labels: tuple[str, ...]) -> dict[str, Any]:
    """Return the number of files and rows of a window, and their metrics."""
    scored = window.total()
    return {"files": len(window), "rows": scored.rows, **_figures(window.evaluation(), scored, labels)}


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _figures(found: Evaluation, scored: Scored, labels: tuple[str, ...]) -> dict[str, Any]:
    """Return metrics by name; None for one that is not known."""
    made: dict[str, Any] = {name.lower().replace(" ", ""): _finite(value) for name, value in found.figures().items()}
    calibration = scored.calibration()
    made["calibration"] = _finite(calibration[0])
    if found.labels:
        made["labels"] = {
            name: {**{metric: _finite(value) for metric, value in one._asdict().items()}, "calibration": _finite(ratio)}
            for name, one, ratio in zip(labels, found.labels, calibration, strict=True)
        }
    return made


def get_metrics(labels: tuple[str, ...], found: dict[str, tuple[Evaluation, Scored]]) -> dict[str, dict[str, float]]:
    """Return metrics, with the calibration of the first label, by what they are about and by name."""
    return {
        name: {**one.metrics(labels), "calibration": scored.calibration()[0]} for name, (one, scored) in found.items()
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def describe(line: dict[str, Any], found: Evaluation, window: Evaluation) -> str:
    """Return a line of files.jsonl as text."""
    over = line["window"]
    last = "" if over["files"] == 1 else f"; last {over['files']} files: {_in_words(window, over['calibration'])}"
    return printable(
        f"{line['file']}: {_in_words(found, line['calibration'])} on {line['rows']:,} rows, before training on them"
        f"{last}; step {line['step']:,}"
    )


def _in_words(found: Evaluation, calibration: float | None) -> str:
    shown = [f"{name} {'unknown' if math.isnan(value) else f'{value:.4f}'}" for name, value in found.figures().items()]
    return ", ".join([*shown, *([] if calibration is None else [f"calibration {calibration:.3f}"])])


def summarize(state: FollowState, labels: tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of summary.json about files and quality."""
    over = _over(state.window, labels) if len(state.window) else {}
    metrics: dict[str, Any] = {name: over.get(name) for name in ("auc", "logloss", "rmse", "mae") if name in over}
    return {
        "epochs": 1,
        "auc": None,
        "logloss": None,
        **metrics,
        "best_epoch": None,
        "files": {
            "taken": state.seen.taken,
            "set_aside": state.set_aside,
            "changed": state.changed,
            "last": state.seen.last,
            "waiting_rows": state.waiting,
            "window": over or None,
        },
    }


def draw(path: Path, progress: Progress, recent: RecentQuality) -> None:
    """Write the picture of the last steps' losses and of the quality by file as PNG."""
    figure = pictures.figure(12, 4.6)
    left, right = figure.subplots(1, 2)
    losses, end = np.array(progress.wide)[-MOST_STEPS:], progress.steps
    left.plot(np.arange(end - len(losses) + 1, end + 1), losses, color="C0", linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", title=f"Loss of the last {len(losses):,} steps")
    numbers, *figures = recent.points().T
    for label, color, values in zip(("each file", "the last files"), ("C1", "C2"), figures, strict=True):
        if np.isfinite(values).any():
            right.plot(numbers, values, color=color, label=f"{label}: {values[-1]:.4f}")
            right.legend(fontsize=9)
    right.set(xlabel="file", ylabel=recent.metric, title=f"{recent.metric} before training on a file")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
