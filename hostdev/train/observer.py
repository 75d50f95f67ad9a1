"""Who follows a run's events: callbacks and trackers, or nobody."""

from pathlib import Path
from typing import Any

from hostdev.core.errors import UserError
from hostdev.core.run_events import EpochInfo, RunInfo, StepInfo
from hostdev.runtime.runtime import Runtime


class CallbackError(UserError):
    """A callback has raised an exception, and the run has ended."""


class RunObserver:
    """Receives a run's events on rank 0; this one ignores them, and is false.

    Attributes:
        error: The error that ends the run.
    """

    error: CallbackError | None = None

    def __bool__(self) -> bool:
        """Return whether anybody listens."""
        return False

    def start(self, run: RunInfo, runtime: Runtime, again: StepInfo | None) -> None:
        """Receive the run before its first step; `again` is the last step whose evaluation is repeated, or None."""

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
