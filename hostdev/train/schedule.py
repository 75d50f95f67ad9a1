"""How many steps and evaluations a run has."""

from typing import NamedTuple


class Schedule(NamedTuple):
    """The steps of a run.

    Attributes:
        epochs: Passes over the training samples, unless a limit or a signal stops the run.
        epoch_steps: Steps of an epoch.
        max_steps: Limit of all steps; None for no limit.
        evaluation_steps: Batches of an evaluation.
    """

    epochs: int
    epoch_steps: int
    max_steps: int | None
    evaluation_steps: int

    @property
    def steps(self) -> int:
        """Steps of the run, unless it is stopped."""
        steps = self.epochs * self.epoch_steps
        return min(steps, self.max_steps or steps)

    @property
    def evaluations(self) -> int:
        """Evaluations of the run, unless it is stopped."""
        return -(-self.steps // self.epoch_steps)

    def find(self, steps: int) -> tuple[int, int]:
        """Return the epoch, from 1, and its steps that are taken: all of them rather than none of the next epoch."""
        epoch = max(1, -(-steps // self.epoch_steps))
        return epoch, steps - (epoch - 1) * self.epoch_steps
