"""Observes the body of a loop over `train` through torch: losses, gradients, clipping and optimizers' steps."""

import threading
from collections.abc import Sequence
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from hostdev.distributed.world import World
from hostdev.runtime.body_batch import BodyBatch
from hostdev.runtime.dense_layers import DenseLayers
from hostdev.runtime.features import Table
from hostdev.runtime.loss_scaling import LossScaling
from hostdev.runtime.reduction import Flags
from hostdev.runtime.table_optimizer import TableOptimizer, TableSettings


class TrainWatcher:
    """A record of the calls of torch's tools in one loop's body (`torch_tools`); it does not keep the loop alive.

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
        adds_rows_to_clips: Whether torch's clipping functions clip the batch's rows with the parameters.
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
        self.adds_rows_to_clips = self._has_added_rows = self._has_missed_clip = False
        self._grouped: list[tuple[Tensor, int]] = []
        self._backward = -1  # torch's number of the last backward pass that gave gradients

    def begin_batch(self) -> None:
        """Watch the batch that the loop has just taken."""
        self.steps.begin_batch()
        self.rates, self._grouped = None, []
        self._has_added_rows = self._has_missed_clip = False
        self._settings.learning_rates()  # raises for wrong rates before the step
        if not self.steps.any:
            for leaf in self._batch.all_leaves:
                if leaf.trained:
                    leaf.rows.register_post_accumulate_grad_hook(partial(_note_gradients, ref(self)))  # type: ignore[no-untyped-call]
        self.losses = LossScaling(self._batch, self._device, self._world)

    def forget_gradients(self) -> None:
        """Drop the gradients of the batch's rows, unless an optimizer has stepped with them."""
        if self.steps.stepped:  # as in torch, `zero_grad` after a step does not undo the step
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
        """Return the batch's rows of a table, float32 [U, D], as `Rows.parameters` does; None if there are none."""
        batch = self._batch
        if batch.step_batch is None or not batch.rows:
            return None
        if batch.reduction is not None and not batch.reduction.has_sums(reduced=batch.is_reduced()):
            return None
        leaf = next((leaf for leaf in batch.all_leaves if leaf.table is table), None)
        return None if leaf is None or not leaf.trained else leaf.parameter()

    def note_gradients(self) -> None:
        """Record the learning rates when rows get gradients: rates set later apply to the next batch's step."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward or self.steps.stepped:
            return
        self._backward = backward
        try:
            self.rates = self._settings.learning_rates()
        except ValueError:  # raised again at the batch's end; here it would seem to come from `backward`
            self.rates = None

    @property
    def table_optimizer(self) -> TableOptimizer | None:
        """The torch optimizer of the loop's tables, if the program uses it."""
        return self._settings.optimizer

    def gradients_version(self) -> int | None:
        """Return a number that changes with the rows' gradients: 0 without gradients, None if no batch is open."""
        if self._batch.step_batch is None:
            return None
        return sum([1 + grad._version + id(grad) for grad in self._batch.gradients])

    def backward(self, losses: Sequence[Tensor], version: int | None) -> None:
        """Record that `backward` on scalar losses has ended; `version` is the `gradients_version` before it."""
        batch = self._batch
        if version is None or version == self.gradients_version():
            return
        if not version and batch.reduction is None:  # earlier gradients were dropped, not summed
            batch.losses.clear()
        if not self.losses.has_scaled:  # otherwise the scaler handles overflows
            batch.losses += [(loss - loss).float().to(self._device) for loss in losses]

    def before_step(self) -> None:
        """Record the learning rates before an optimizer's step; raise ValueError if they are wrong."""
        if self._batch.step_batch is not None and not self.steps.stepped:
            self.rates = self._settings.learning_rates()

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has taken a step."""
        if self._batch.step_batch is not None:
            self.steps.note(optimizer, early=bool(self._batch.micros))
            if not isinstance(optimizer, TableOptimizer):
                self._dense.note_optimizer(optimizer)
        if getattr(optimizer, "found_inf", None) is self._flags.stop:
            del optimizer.found_inf  # type: ignore[attr-defined]  # set for this step by `Rows.guard`

    def clips_rows(self, gradients: Sequence[Tensor]) -> bool | None:
        """Return whether gradients of the batch's rows are among these; None if the rows have no gradients."""
        given, own = {id(gradient) for gradient in gradients}, self._batch.gradients
        return any(id(gradient) in given for gradient in own) if own else None

    def take_clipped(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows to clip together with these parameters, once per step."""
        gradients = [parameter.grad for parameter in given if parameter.grad is not None]
        if self._has_added_rows or not self._batch.rows or self.clips_rows(gradients) is not False:
            return []
        self._has_added_rows = True
        return self._batch.rows[-1].parameters()

    def expect_clip(self, gradients: Sequence[Tensor]) -> None:
        """Watch gradients, none of them those of the rows, that torch's clipping functions may change in place."""
        self._grouped = [(gradient, gradient._version) for gradient in gradients]

    def note_clip(self) -> None:
        """Record whether the gradients of `expect_clip` have changed in place."""
        self._has_missed_clip |= any(gradient._version != version for gradient, version in self._grouped)
        self._grouped = []

    def take_missed_clip(self) -> bool:
        """Return whether gradients were clipped without those of the rows since the last call."""
        self.note_clip()
        missed, self._has_missed_clip = self._has_missed_clip, False
        return missed


def _note_gradients(watcher: ReferenceType[TrainWatcher], rows: Tensor) -> None:
    # torch calls the hooks of all tables of a graph node, even of tables without a gradient in this backward pass
    if rows.grad is not None and (held := watcher()) is not None:
        held.note_gradients()


class DenseSteps:
    """The record of a loop's optimizer steps, in total and for the current batch.

    Attributes:
        any: Whether an optimizer has stepped with an earlier batch of the loop.
        without: Number of the loop's batches that had gradients but no optimizer step.
        stepped: The `id` of each optimizer that stepped with the current batch after the last micro-batch was yielded.
    """

    def __init__(self) -> None:
        self.any, self.without = False, 0
        self.begin_batch()

    def begin_batch(self) -> None:
        """Forget the steps of the previous batch."""
        self.stepped: set[int] = set()
        self._by_dense = False
        self._early: set[int] = set()  # as `stepped`, but before the last micro-batch was yielded

    def note(self, optimizer: Optimizer, *, early: bool) -> None:
        """Record an optimizer's step with the batch; `early`: whether the last micro-batch was not yet yielded."""
        (self._early if early else self.stepped).add(id(optimizer))
        self._by_dense |= not isinstance(optimizer, TableOptimizer)

    def require_on_time(self) -> None:
        """Raise ValueError if all optimizers of the step also stepped before the last micro-batch was yielded."""
        if self.stepped and self.stepped <= self._early:
            raise ValueError(
                "an optimizer stepped too early, before the last of the batches whose gradients are summed for a step; "
                "call optimizer.step() and zero_grad() only if rows.is_due"
            )

    def count_step(self, *, is_last: bool) -> None:
        """Count the batch; raise ValueError if only some batches of the loop have an optimizer step.

        Args:
            is_last: Whether the loop is left after this batch. It may then have a step of `Runtime.optimizer` alone,
                although earlier batches had no optimizer step.
        """
        if is_last and self.stepped and not self._by_dense:
            return
        missing = self.without if self.stepped else int(self.any)
        if missing:
            batches = "1 batch" if missing == 1 else f"{missing} batches"
            raise ValueError(
                f"{batches} with gradients had no optimizer step, but other batches had one. To "
                "sum the gradients of N batches before a step, use runtime.train(..., accumulate=N), which also sums "
                "the rows' gradients; to skip a batch, do not call backward(), or call "
                "runtime.optimizer.zero_grad()"
            )
        if self.stepped:
            self.any = True
        else:
            self.without += 1
