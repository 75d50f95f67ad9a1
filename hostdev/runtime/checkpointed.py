"""The parts of a runtime that a checkpoint saves and restores."""

from typing import Any

from hostdev.runtime.random_streams import Place
from hostdev.runtime.table_optimizer import TableOptimizer


class CheckpointedState:
    """The tables, their torch optimizer, and the position in the sequence of batches, for `hostdev.runtime.saving`.

    Args:
        runtime: A `Runtime`, untyped because its module imports this one.
    """

    def __init__(self, runtime: Any) -> None:
        self.tables, self.pipeline, self.world = runtime.tables, runtime.pipeline, runtime.world
        self._settings, self._loops = runtime.settings, runtime.loops
        self.learning_rates = self._settings.learning_rates
        self.go_on_at = self._loops.iterators.continue_at

    @property
    def optimizer(self) -> TableOptimizer:
        """The tables' torch optimizer."""
        made: TableOptimizer = self._settings.make_optimizer(lambda: self._loops)
        return made

    @property
    def has_optimizer(self) -> bool:
        """Whether the program uses `optimizer`."""
        return self._settings.optimizer is not None

    @property
    def cursor(self) -> Any:
        """The program's position after the last batch whose step is in the tables; None if it gives none."""
        return self._loops.cursor

    @cursor.setter
    def cursor(self, value: Any) -> None:
        self._loops.cursor = value

    @property
    def place(self) -> Place | None:
        """The training loop's position in its sequence of batches; without an open loop, that of the last one."""
        place: Place | None = self._loops.place
        return place
