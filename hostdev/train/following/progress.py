"""The progress of a run without an end: the losses of its last steps only."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from hostdev.train.checkpointing import Progress

MOST_STEPS = 1 << 14  # whose losses are kept


class RecentProgress(Progress):
    """The number of steps and samples in all, and the losses of the last 16,384 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep, self.rows = (deque(maxlen=MOST_STEPS) for _ in range(3))
        self._samples = 0

    def add(self, wide: float, deep: float, rows: int) -> None:
        """Record a step."""
        super().add(wide, deep, rows)
        self._samples += rows

    @property
    def samples(self) -> int:
        """The number of samples in all steps."""
        return self._samples

    def as_values(self) -> dict[str, Any]:
        """Return the progress as values for a checkpoint."""
        return {**super().as_values(), "samples": self._samples}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the progress that `as_values` converted to these values."""
        made = super().of(values)
        made._samples = values["samples"]
        return made
