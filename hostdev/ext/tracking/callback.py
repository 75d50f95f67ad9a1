"""The interface of a callback of `hostdev train`; its methods receive the events of `hostdev.core.run_events`."""

from hostdev.core.run_events import CheckpointInfo, EndInfo, EpochInfo, RunInfo, StepInfo

__all__ = ["METHODS", "Callback", "CheckpointInfo", "EndInfo", "EpochInfo", "RunInfo", "StepInfo"]


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
