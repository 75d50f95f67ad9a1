"""Keeps gradients of rows if a loop ends before a step has used them, and applies them with the next step."""

from collections.abc import Sequence

from hostdev.pipeline.pipeline import Pipeline
from hostdev.runtime import scaling
from hostdev.runtime.features import GroupSpec
from hostdev.runtime.pending import FirstBatch, Pending, take_step
from hostdev.runtime.table_settings import TableSettings


class CarriedGradients:
    """Gradients of rows from a step that its loop did not finish; they wait for the next step.

    Args:
        groups: The groups of tables.
        pipeline: Updates the tables.
        settings: The tables' settings.
    """

    def __init__(self, groups: Sequence[GroupSpec], pipeline: Pipeline, settings: TableSettings) -> None:
        self._groups, self._pipeline, self._settings = groups, pipeline, settings
        self._pending: Pending | None = None
        self.is_training = False  # whether a loop over `train` is open; then the loop takes the steps

    def keep(self, pending: Pending) -> None:
        """Keep the gradients of a loop that ended before a step used them; forget earlier ones."""
        self.forget()
        self._pending = pending
        scaling.watch_pending(pending)

    def forget(self) -> None:
        """Forget the kept gradients."""
        if self._pending is not None:
            scaling.forget_pending(self._pending)
            self._pending = None

    def drop(self) -> None:
        """Exclude the gradients from the next step."""
        if self._pending is not None:
            self._pending.drop()

    def first_batch(self) -> FirstBatch | None:
        """Return the object that adds kept gradients to those of the next loop's first batch; None if none are kept."""
        pending = self._pending
        if pending is None or not pending.is_kept():
            self.forget()
            return None
        self._require_no_keys()
        return FirstBatch(pending, [group.tables for group in self._groups], self._pipeline, self._forget_decided)

    def _require_no_keys(self) -> None:
        for group in self._groups:
            if group.has_keys:
                raise ValueError(
                    f"the rows of table {group.tables[0].name!r} have gradients of an earlier loop that had no step, "
                    "but a table by key cannot apply them later: take the step in the loop, or call the optimizer's "
                    "zero_grad() to drop the gradients"
                )

    def _forget_decided(self, pending: Pending) -> None:
        if self._pending is pending:  # otherwise a loop has left newer gradients
            self.forget()

    def apply(self, pending: Pending) -> None:
        """Update the tables with these gradients alone; called when a dense optimizer steps outside a loop."""
        if pending is not self._pending or self.is_training:
            return
        self._require_no_keys()
        self.forget()
        self._settings.learning_rates()
        tables = [table for group in self._groups for table in group.tables]
        take_step(self._pipeline, pending, {table.name for table in tables if self._settings.is_frozen(table)})

    def step(self) -> bool:
        """Apply the kept gradients outside a loop; return whether there were any."""
        pending = self._pending
        if pending is None or self.is_training or not pending.is_kept():
            return False
        self.apply(pending)
        return True
