"""Observes the body of a loop over `train` through torch: losses, gradients, clipping and optimizers' steps."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from hostdev.distributed.world import World
from hostdev.runtime.body_batch import BodyBatch
from hostdev.runtime.dense_layers import DenseLayers
from hostdev.runtime.dense_steps import DenseSteps
from hostdev.runtime.features import Table
from hostdev.runtime.finite import Flags
from hostdev.runtime.loss_scaling import LossScaling
from hostdev.runtime.pending import FirstBatch
from hostdev.runtime.table_optimizer import TableOptimizer
from hostdev.runtime.table_settings import TableSettings


class TrainWatcher:
    """Implements `scaling.Watcher` for one loop, without keeping the loop alive.

    Args:
        batch: The batch in the body.
        settings: The tables' settings.
        flags: The flags that stop a step whose gradients or loss are not finite.
        world: The ranks of this run.
        dense: The record of the dense layers that the tables' loops train.

    Attributes:
        steps: The steps of dense optimizers.
        losses: The record of how the batch's losses were scaled.
        rates: The tables' learning rates for the batch; None to use the rates at the batch's end.
        first: The loop's first batch, if gradients of an earlier loop wait for a step; else None.
    """

    def __init__(
        self, batch: BodyBatch, settings: TableSettings, flags: Flags, world: World, dense: DenseLayers
    ) -> None:
        self.thread = threading.get_ident()
        self._batch, self._settings, self._flags, self._dense = batch, settings, flags, dense
        self._world, self._device = world, flags.stop.device
        self.steps = DenseSteps()
        self.losses = LossScaling(batch, self._device, world)
        self.rates: list[float] | None = None
        self.first: FirstBatch | None = None
        self._backward = -1  # torch's number of the last backward pass that gave gradients

    def begin_batch(self) -> None:
        """Watch the batch that the loop has just taken."""
        self.steps.begin_batch()
        self.rates = None
        self._settings.learning_rates()  # raises for wrong rates before the step
        if self.first is not None:
            self._batch.shares_rows = True
        if self.first is not None or not self.steps.any:
            for leaf in self._batch.all_leaves:
                if leaf.trained:
                    leaf.rows.register_post_accumulate_grad_hook(partial(_note_gradients, ref(self)))  # type: ignore[no-untyped-call]
        self.losses = LossScaling(self._batch, self._device, self._world)

    def forget_gradients(self) -> None:
        """Drop the gradients of the batch's rows, unless an optimizer has stepped with them."""
        if self.steps.stepped:  # `zero_grad` at the end of a body does not undo a dense step, either
            return
        for leaf in self._batch.all_leaves:
            leaf.drop_grad()
        self.losses.forget_gradients()
        self._batch.losses.clear()

    def require_thread(self) -> None:
        """Raise ValueError if the caller is not in the loop's thread."""
        if threading.get_ident() != self.thread:
            raise ValueError(
                "a loop over `train` belongs to one thread: use the loop and its tables in the thread that opened it"
            )

    def row_parameter(self, table: Table) -> Tensor | None:
        """See `table_optimizer.OpenLoop`."""
        batch = self._batch
        if batch.flight is None or not batch.rows:
            return None
        if batch.reduction is not None and not batch.reduction.has_sums(reduced=batch.is_reduced()):
            return None
        leaf = next((leaf for leaf in batch.all_leaves if leaf.table is table), None)
        return None if leaf is None or not leaf.trained else leaf.parameter()

    def expect_backward(self, roots: Sequence[Any]) -> None:
        """See `scaling.Watcher`."""
        if self.first is not None:
            self.first.pending.is_kept()  # checked now, to notice a `zero_grad` before this backward
        if self._batch.flight is not None and not self.steps.any and not self.steps.without:
            self.steps.expect_backward(roots, {id(leaf.rows) for leaf in self._batch.all_leaves})

    def note_gradients(self) -> None:
        """Record the learning rates when rows get gradients: rates set later apply to the next batch's step."""
        if self.first is not None:
            self.first.came(self._batch.leaves, self._batch.inverses)
        backward = torch._C._current_graph_task_id()
        if backward == self._backward or self.steps.stepped:
            return
        self._backward = backward
        self.steps.forget_awaited()
        try:
            self.rates = self._settings.learning_rates()
        except ValueError:  # raised again at the batch's end; here it would seem to come from `backward`
            self.rates = None

    def gradients_version(self) -> int | None:
        """See `scaling.Watcher`."""
        if self._batch.flight is None:
            return None
        return sum(1 + grad._version + id(grad) for grad in self._batch.gradients)

    def backward(self, losses: Sequence[Tensor], version: int | None) -> None:
        """See `scaling.Watcher`."""
        batch = self._batch
        if version is None or version == self.gradients_version():
            return
        if not version and batch.reduction is None:  # earlier gradients were dropped, not summed
            batch.losses.clear()
        if not self.losses.has_scaled:  # otherwise the scaler handles overflows
            batch.losses += [(loss - loss).float().to(self._device) for loss in losses]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `scaling.Watcher`; raise ValueError for wrong learning rates, before the dense optimizer steps."""
        batch, first = self._batch, self.first
        if batch.flight is not None and not self.steps.stepped:
            self.rates = self._settings.learning_rates()
            if first is not None and not batch.micros and any(optimizer is one for one in first.pending.optimizers):
                first.came(batch.leaves, batch.inverses)  # the optimizer steps although the batch has no gradients yet

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """See `scaling.Watcher`."""
        if self._batch.flight is not None:
            self.steps.note(optimizer, early=bool(self._batch.micros))
            if not isinstance(optimizer, TableOptimizer):
                self._dense.note_optimizer(optimizer)
        if getattr(optimizer, "found_inf", None) is self._flags.stop:
            del optimizer.found_inf  # type: ignore[attr-defined]  # set for this step by `Rows.guard`

    def clips_rows(self, gradients: Sequence[Tensor]) -> bool | None:
        """See `scaling.Watcher`."""
        given, own = {id(gradient) for gradient in gradients}, self._batch.gradients
        return any(id(gradient) in given for gradient in own) if own else None


def _note_gradients(watcher: ReferenceType[TrainWatcher], rows: Tensor) -> None:
    # torch calls the hooks of all tables of a graph node, even of tables without a gradient in this backward pass
    if rows.grad is not None and (held := watcher()) is not None:
        held.note_gradients()
