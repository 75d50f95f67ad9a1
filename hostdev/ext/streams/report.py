"""The report of a run that follows a folder: its progress and waits, a line for each file, summary.json, the picture.

The losses of the last steps and the quality on the last files are held in arrays: one small, long-lived object for each
step would fragment the heap.
"""

import math
import shutil
import sys
import time
from array import array
from collections.abc import Mapping, MutableSequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hostdev.core import pictures
from hostdev.core.printable import printable
from hostdev.core.progress import interval, note, overwrite
from hostdev.ext.streams.converting import Converted
from hostdev.ext.streams.progressive import Scored, ScoreWindow
from hostdev.ext.streams.state import FollowState
from hostdev.train.checkpointing import Progress
from hostdev.train.quality import finite
from hostdev.train.target_scores import Evaluation

MOST_STEPS = 1 << 14  # number of last steps whose losses are kept
MOST_FILES = 1 << 12  # number of last files whose quality is kept for the picture
_QUIET_SECONDS = 2.0  # a shorter wait is not mentioned


class RecentProgress(Progress):
    """The total numbers of steps and samples, and the losses of at least the last 16,384 steps."""

    def __init__(self) -> None:
        super().__init__()
        self._samples = 0

    def add(self, wide: float, deep: float, rows: int) -> None:
        """Record a step."""
        super().add(wide, deep, rows)
        for values in (self.wide, self.deep, self.rows):
            _shorten(values, MOST_STEPS)
        self._samples += rows

    @property
    def samples(self) -> int:
        """The number of samples in all steps."""
        return self._samples

    def as_values(self) -> dict[str, Any]:
        """Return the progress as values for a checkpoint, with the losses of the last 16,384 steps."""
        values = super().as_values()
        last = {name: values[name][-MOST_STEPS:] for name in ("wide", "deep", "rows")}
        return {**values, **last, "samples": self._samples}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the progress that `as_values` converted to these values."""
        made = super().of(values)
        made._samples = values["samples"]
        return made


class RecentQuality:
    """A metric of the model before training on a file, over its rows and the window's, for the last 4,096 files."""

    def __init__(self) -> None:
        self.metric = "AUC"
        self._last = 0
        self._values = array("d")  # for each file, the value on its rows and on the window's

    def add(self, number: int, metric: str, file: float, window: float) -> None:
        """Record the next file: its number among all files, and the metric's value on its rows and on the window's."""
        self._last, self.metric = number, metric
        self._values.extend((file, window))
        _shorten(self._values, 2 * MOST_FILES)

    def points(self) -> npt.NDArray[np.float64]:
        """Return [files, 3]: each file's number, the value on its rows, and that on the window's."""
        values = np.array(self._values).reshape(-1, 2)[-MOST_FILES:]
        return np.column_stack([np.arange(self._last - len(values), self._last) + 1, values])


def _shorten(values: MutableSequence[Any], most: int) -> None:
    """Remove the first `most` values if there are at least twice as many."""
    if len(values) >= 2 * most:
        del values[:most]


class WaitingLine:
    """Shows why a run waits: a line that is overwritten on a terminal, else one line for each reason to wait."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._shown = ""
        self._is_live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Show the reason for which the run waits, if it has waited for a while."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < _QUIET_SECONDS:
            return
        if self._is_live:
            text = f"({interval(now - self._since)}) {printable(text)}"[: shutil.get_terminal_size().columns - 1]
        if text == self._shown:
            return
        self._shown = text
        if self._is_live:
            overwrite(text)
        else:
            print(printable(text), flush=True)

    def note(self, text: str) -> None:
        """Remove the line about the wait, and print lines that stay."""
        self._clear()
        note(text)

    def end(self) -> None:
        """Remove the line about the wait, because the run continues."""
        self._clear()
        self._since = None

    def _clear(self) -> None:
        if self._is_live and self._shown:
            overwrite()
            self._shown = ""


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
    """Return metrics by name; a metric that is not defined is None."""
    made: dict[str, Any] = {name.lower().replace(" ", ""): finite(value) for name, value in found.figures().items()}
    calibration = scored.calibration()
    made["calibration"] = finite(calibration[0])
    if found.labels:
        made["labels"] = {
            name: {**{metric: finite(value) for metric, value in one._asdict().items()}, "calibration": finite(ratio)}
            for name, one, ratio in zip(labels, found.labels, calibration, strict=True)
        }
    return made


def get_metrics(labels: tuple[str, ...], found: dict[str, tuple[Evaluation, Scored]]) -> dict[str, dict[str, float]]:
    """Return the metrics of each entry of `found` by name, with the calibration of the first label."""
    return {
        name: {**one.metrics(labels), "calibration": scored.calibration()[0]} for name, (one, scored) in found.items()
    }


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
