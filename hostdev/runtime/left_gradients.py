"""Gradients of rows that a loop left without a step: they are dropped, and the next use of the tables says so."""

import warnings
from collections.abc import Sequence
from typing import Any

from hostdev.runtime.features import Table


class LeftGradients:
    """The `core.tables.Owner` of tables whose rows have lost gradients, until a warning has said so.

    It is unknown whether `break` or an exception ended the body: a program may drop the gradients on purpose, may
    forget the step, or may save what it has after an error. So this is a warning, and it waits for the next use.

    Args:
        tables: The runtime's tables.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._step = 0  # the number of the step in its loop, from 1; 0 if nothing was left

    def note(self, step: int) -> None:
        """Record that a loop was left with gradients of the rows of this step."""
        self.forget()
        self._step = step
        for table in self._tables:
            table.add_owner(self)

    def forget(self) -> None:
        """Forget the gradients that were left."""
        if self._step:
            self._step = 0
            for table in self._tables:
                table.remove_owner(self)

    def report(self) -> None:
        """Warn once of gradients that were left without a step."""
        step = self._step
        self.forget()
        if step:
            warnings.warn(
                f"the last batch's gradients were left without a step: a loop over runtime.train() ended in its step "
                f"{step}, between backward() and the optimizer's step, and the gradients of the rows are dropped. Call "
                "optimizer.step(), or runtime.optimizer.step() without a dense optimizer, before you leave the loop; "
                "or runtime.optimizer.zero_grad() to drop them without this warning",
                stacklevel=5,
            )

    def before_read(self, table: Any) -> None:
        """See `core.tables.Owner`."""
        self.report()

    before_write = before_rekey = before_read

    def after_write(self, table: Any, ids: Any) -> None:
        """See `core.tables.Owner`."""
