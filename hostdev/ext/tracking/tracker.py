"""The base class of trackers, such as TensorBoard's and MLflow's: converts a run's events to scalars by tag.

`Callback` is the interface of a callback of `hostdev train`; its methods receive the events of
`hostdev.core.run_events`.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.run_events import CheckpointInfo, EndInfo, EpochInfo, RunInfo, StepInfo

__all__ = ["METHODS", "Callback", "CheckpointInfo", "EndInfo", "EpochInfo", "RunInfo", "StepInfo"]
Norms = npt.NDArray[np.float32]


class Callback:
    """Receives what `hostdev train --callback package.module:Class` reports; override the methods that you need.

    The class is created without arguments. With several processes, only rank 0 has callbacks. Methods are called one
    after another, in the main thread, between steps: training waits for them. The global random number generators are
    restored after each call, so that a callback does not change the results. An exception ends the run, after a
    checkpoint if the run saves any.
    """

    def on_start(self, run: RunInfo) -> None:
        """Receive the run before its first step."""

    def on_step(self, step: StepInfo) -> None:
        """Receive a step's losses."""

    def on_epoch(self, epoch: EpochInfo) -> None:
        """Receive the evaluation after an epoch, or of a file with --follow."""

    def on_checkpoint(self, checkpoint: CheckpointInfo) -> None:
        """Receive a checkpoint, once it is complete."""

    def on_end(self, end: EndInfo) -> None:
        """Receive the end of the run, once its files are complete; not called if the process is killed."""


METHODS = ("on_start", "on_step", "on_epoch", "on_checkpoint", "on_end")


class Tracker(Callback):
    """A callback that writes to a tool that displays runs. Its errors do not end the run.

    A package registers its tracker as an entry point of `hostdev.tracker`; `hostdev train --log-to NAME` then imports
    the class, and creates an object without arguments. `hostdev.testing.check_tracker` checks a tracker.

    Attributes:
        name: The name that messages use.
    """

    name = ""

    @classmethod
    def require(cls) -> None:
        """Raise UserError if this tracker cannot be used here; called before a run reads data."""

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        """Write a value of this step."""
        raise NotImplementedError

    def add_histogram(self, tag: str, values: Norms, global_step: int) -> None:
        """Write the distribution of one or more values, all of which are finite."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error of a thread that writes in the background, if there is one."""

    def abandon(self, status: str) -> None:
        """Write what can be written within about a second; called in another thread before the process ends."""

    def close(self) -> None:
        """Release what the tracker holds; called once, after `on_end` or after an error."""

    def take_again(self, step: StepInfo | None) -> None:
        """Before `on_start`, receive the last step if a resumed run repeats its evaluation, else None."""

    def on_step(self, step: StepInfo) -> None:
        """Write the losses."""
        for name, value in step.losses.items():
            self.add_scalar(f"loss/{name}", value, step.step)

    def on_epoch(self, epoch: EpochInfo) -> None:
        """Write the metrics."""
        for split, metrics in epoch.metrics.items():
            for name, value in metrics.items():
                self.add_scalar(f"{split}/{name}", value, epoch.step)

    def write(self, scalars: Mapping[str, float], histograms: Mapping[str, Norms], step: int) -> None:
        """Write figures of the runtime."""
        for tag, value in scalars.items():
            self.add_scalar(tag, value, step)
        for tag, values in histograms.items():
            self.add_histogram(tag, values, step)


def final_figures(end: EndInfo) -> dict[str, float]:
    """Return the numbers among the entries of summary.json."""
    return {
        name: float(value)
        for name, value in end.summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by names such as "versions.torch", without those that are None."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found


def clean(text: str) -> str:
    """Return text that can be encoded as UTF-8; bytes of file names that are not UTF-8 are escaped."""
    return text.encode(errors="backslashreplace").decode()


def files_of(run_dir: Path, names: Iterable[str]) -> list[Path]:
    """Return the files of a run directory, among `names`, that exist."""
    return [run_dir / name for name in names if (run_dir / name).is_file()]
