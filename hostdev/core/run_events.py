"""What a training run reports to callbacks and trackers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostdev.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run that is about to take its first step.

    Attributes:
        run_dir: The run directory, which has the logs and config.json.
        config: The content of config.json: all options, the versions, and how the data was prepared.
        rows: The numbers of samples, by split: "train", "test" and, if there are any, "validation".
        steps: The number of steps at the end of the run, if it is not stopped early; None if it is unknown, as with
            --follow.
        first_step: The number of steps that a resumed run has already taken; 0 for a new run.
        processes: The number of processes that train together.
    """

    run_dir: Path
    config: Mapping[str, Any]
    rows: Mapping[str, int]
    steps: int | None
    first_step: int
    processes: int


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """A step whose losses are known; the next step may already be in progress.

    Attributes:
        step: The step's number since the start of training, from 1.
        epoch: The epoch's number, from 1; always 1 with --follow.
        losses: The losses of the step before its update, as in loss.log: "wide_loss" without an L2 term, and
            "deep_loss", which includes it.
        samples: The number of samples in the step, over all processes.
    """

    step: int
    epoch: int
    losses: Mapping[str, float]
    samples: int


@dataclass(frozen=True, kw_only=True)
class EpochInfo:
    """The evaluation after an epoch or, with --follow, the evaluation of a file before training on it.

    Attributes:
        epoch: The epoch's number or, with --follow, the file's number, from 1.
        step: The number of steps so far.
        metrics: The metrics, as {split: {name: value}}; empty if nothing is evaluated. Names are "auc" and "logloss",
            or "rmse" and "mae" for labels that are numbers, and "rows". With several labels, these are means over the
            labels, and the metrics of each label have names such as "LABEL/auc". Splits are "validation" (or "test" if
            there are no validation rows) and "training", a part of the training rows; with validation rows, also "test"
            after an epoch whose result may be the run's. With --follow, the splits are "file" and "window", the last
            files together. A metric that is not defined is NaN, such as the AUC of rows that all have the same label.
        file: With --follow, the file's name; otherwise None.
    """

    epoch: int
    step: int
    metrics: Mapping[str, Mapping[str, float]]
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that is complete on this machine's disk; an upload to a store may still be in progress.

    Attributes:
        step: The number of steps that it contains.
        path: Its folder.
        seconds: The time from the beginning of the saving until the run noticed that it was complete.
    """

    step: int
    path: Path
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EndInfo:
    """The end of a run.

    Attributes:
        status: "finished", "stopped early", "interrupted" (by a signal) or "failed" (also by a callback's error).
        steps: The number of steps taken.
        summary: The content of summary.json.
    """

    status: str
    steps: int
    summary: Mapping[str, Any]


class CallbackError(UserError):
    """A callback has raised an exception, and the run has ended."""


class RunObserver:
    """Receives a run's events on rank 0; this base class ignores them.

    Attributes:
        error: The error that ends the run.
        listens: Whether anybody receives the events.
    """

    error: CallbackError | None = None
    listens = False

    def start(self, run: RunInfo, runtime: Any, again: StepInfo | None) -> None:
        """Receive the run before its first step; `again` is the last step if it is evaluated again first, else None."""

    def step(self, info: StepInfo) -> None:
        """Receive a step's losses."""

    def end_training(self) -> None:
        """Receive the end of training before an evaluation."""

    def epoch(self, info: EpochInfo) -> None:
        """Receive an evaluation; no loop over the tables may be open."""

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """Receive a checkpoint that is complete."""

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """Receive the end of the run; a second call does nothing."""

    def abandon(self, status: str) -> None:
        """Receive the end of the process, which follows at once."""
