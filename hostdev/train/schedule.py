"""The number of steps and evaluations in a run."""

from typing import NamedTuple

ENDLESS = 1 << 62  # steps of an epoch whose end nobody knows


class Schedule(NamedTuple):
    """The steps of a run.

    Attributes:
        epochs: Maximum number of passes over the training samples.
        epoch_steps: Number of steps of an epoch.
        max_steps: Maximum number of steps of the run; None for no limit.
        evaluation_steps: Number of batches of an evaluation.
    """

    epochs: int
    epoch_steps: int
    max_steps: int | None
    evaluation_steps: int

    @property
    def steps(self) -> int:
        """Number of steps if the run is not stopped early."""
        steps = self.epochs * self.epoch_steps
        return min(steps, self.max_steps or steps)

    @property
    def evaluations(self) -> int:
        """Number of evaluations if the run is not stopped early."""
        return -(-self.steps // self.epoch_steps)

    def find(self, steps: int) -> tuple[int, int]:
        """Return the epoch of step number `steps`, and the step's number in that epoch, from 1; (1, 0) for step 0."""
        epoch = max(1, -(-steps // self.epoch_steps))
        return epoch, steps - (epoch - 1) * self.epoch_steps
