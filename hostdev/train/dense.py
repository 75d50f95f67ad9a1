"""The device's part of a step of Wide & Deep: forward, backward, Adam, and whether all of it was finite."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.errors import UserError
from hostdev.core.primitive import OpLog, Primitive
from hostdev.data.batch import FIELDS
from hostdev.data.batch import WideBatch as Batch
from hostdev.device.pinned import Slab
from hostdev.device.rows import Uses, gather_rows
from hostdev.device.staging import Staging
from hostdev.kernels.norm import total
from hostdev.kernels.unique import count_uses, unique
from hostdev.models.wide_deep import L2_COEFFICIENT, WideDeep, deep_l2, wide_loss
from hostdev.pipeline.model import Step
from hostdev.pipeline.rows import Embedding

DENSE_LR = 3.5e-4
DENSE_EPS = 1e-8


class Losses(NamedTuple):
    """A step's losses."""

    wide: float
    deep: float


class NonFiniteLossError(UserError):
    """A loss or a gradient is not a number or infinite; the message says which, and that no row was updated.

    step  of the run over batches, from 1
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class _Prepared:
    """A batch with its ids deduplicated; the tensors are on the device."""

    ids: Tensor | None  # unique ids [U], where the tables are on the device
    uses: Uses
    counts: Tensor | None  # float32 [U], for --l2 batch only
    places: Tensor | None  # int32 [U], where the rows lie that are to be added in the order of the ids; None: in it
    label: Tensor  # [B]
    weights: Tensor  # [B, F]
    tensors: list[Tensor]  # all of them that were sent
    sent: Any  # what `Staging.await_sent` takes


class DenseSide:
    """Wide & Deep's network, its optimizer and its losses: what `Pipeline` asks of a model.

    dim        columns of the deep table
    wide, deep the tables, of which --l2 table reads the deep one
    staging    the way to the device
    l2         "none", "batch" or "table"
    precision  "fp32", or "bf16" for the dense layers' arithmetic over float32 weights
    seed       of the initial values
    log        where every op's durations go
    """

    def __init__(
        self, dim: int, deep: Embedding, staging: Staging, *, l2: str, precision: str, seed: int, log: OpLog
    ) -> None:
        self._deep, self._staging = deep, staging
        self._device = staging.device
        self._l2, self._precision = l2, precision
        self._tables_on_device = deep.target == "DEVICE"
        self.reads_whole_tables = l2 == "table" and not self._tables_on_device
        self.network = WideDeep(FIELDS, dim, seed=seed).to(self._device)
        self.adam = torch.optim.Adam(self.network.parameters(), lr=DENSE_LR, eps=DENSE_EPS, fused=True)
        self._skip = torch.zeros((), device=self._device)  # not 0 from the first step on that was not finite
        self._one = torch.ones((), device=self._device)
        self._start_adam()
        self._unique = Primitive("Unique", unique, log=log).add_prim_attr("primitive_target", "CPU")
        self._count_uses = Primitive("CountUses", count_uses, log=log).add_prim_attr("primitive_target", "CPU")
        self._table_l2 = Primitive("TableL2", deep.table.partial_squares, scope="deep", log=log)
        self._table_l2.add_prim_attr("primitive_target", deep.target)
        self._forward = Primitive("DenseForward", _forward, scope="network", log=log)
        self._backward = Primitive("DenseBackward", Tensor.backward, scope="network", log=log)
        self._adam_step = Primitive("Adam", self.adam.step, scope="network", log=log)

    def _start_adam(self) -> None:
        """Make the optimizer's state, by a step that is skipped: a first step that is not finite changes nothing."""
        for parameter in self.network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.adam.found_inf = self._one  # type: ignore[attr-defined]  # where GradScaler puts it, too
        self.adam.step()
        self.adam.zero_grad()
        self.adam.found_inf = self._skip  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Forget a step that was not finite; before a run over batches."""
        self._skip.zero_()

    def unique(self, batch: Batch) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Deduplicate a batch's ids."""
        ids, inverse = self._unique(batch.ids.ravel())
        return ids, inverse

    def prepare(
        self,
        batch: Batch,
        ids: npt.NDArray[Any],
        inverse: npt.NDArray[np.int32],
        memory: Slab,
        places: npt.NDArray[np.int32] | None,
    ) -> _Prepared:
        """Send a batch to the device."""
        arrays = [inverse, batch.label, batch.weights]
        if self._tables_on_device:
            arrays.append(ids)
        if self._l2 == "batch":
            arrays.append(self._count_uses(inverse, len(ids)).astype(np.float32))
            if places is not None:
                arrays.append(places)
        tensors, sent = self._staging.send([torch.from_numpy(array) for array in arrays], memory)
        there, label, weights, *rest = tensors
        on_device = rest.pop(0) if self._tables_on_device else None
        uses = Uses(there, len(ids), in_order=places is None)
        counts, order = (*rest, None, None)[:2]
        return _Prepared(on_device, uses, counts, order, label, weights, tensors, sent)

    def await_prepared(self, prepared: _Prepared) -> None:
        """Let the device wait for what `prepare` has sent."""
        self._staging.await_sent([prepared.sent], prepared.tensors)

    def step(self, prepared: _Prepared, rows: list[Tensor]) -> Step:
        """Queue a step: losses, gradients of the wide and the deep rows, Adam on the dense side.

        Where the loss or a gradient is not finite, this step and all later ones update nothing on the device, and
        reading the losses raises NonFiniteLossError.
        """
        wide_rows, deep_rows = (part.requires_grad_() for part in rows)
        wide, objective = self._forward(self, prepared, wide_rows, deep_rows)
        deep = objective.detach()
        if prepared.places is not None:  # the gradient does not depend on the order of the rows, their sum does
            deep = wide.detach() + deep_l2(deep_rows.detach(), prepared.counts, prepared.places)
        squares = self._table_l2() if self._l2 == "table" else None
        self.adam.zero_grad()
        self._backward(objective)
        assert deep_rows.grad is not None
        assert wide_rows.grad is not None
        grads = [wide_rows.grad, deep_rows.grad]
        losses = torch.stack([wide.detach(), deep])
        dense = [parameter.grad for parameter in self.network.parameters() if parameter.grad is not None]
        looked_at = [losses, *grads, *dense]
        if isinstance(squares, Tensor):
            looked_at.append(squares.sum().float())
        elif squares is not None:
            looked_at.append(torch.full((), total(squares), device=self._device))
        # As GradScaler does, with a scale of 1: one pass, nobody waits.
        torch._amp_foreach_non_finite_check_and_unscale_(looked_at, self._skip, self._one)
        self._adam_step()
        results = [torch.cat([losses, self._skip.view(1)])]
        if isinstance(squares, Tensor):  # on the device, so not here yet
            results.append(squares)
        return Step(results, partial(_read_losses, squares), grads, self._skip)

    def predict(self, prepared: _Prepared, rows: list[Tensor]) -> Step:
        """Queue the scores float32 [B] of a batch; nothing changes."""
        with torch.no_grad():
            return Step([self._logits(prepared, *rows)], lambda results, number: results[0])

    def _logits(self, prepared: _Prepared, wide_rows: Tensor, deep_rows: Tensor) -> Tensor:
        shape = prepared.weights.shape
        wide = gather_rows(wide_rows, prepared.uses).view(shape)
        dtype = torch.bfloat16 if self._precision == "bf16" else torch.float32
        deep = gather_rows(deep_rows, prepared.uses, prepared.weights.view(-1), dtype).view(shape[0], -1)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            logits: Tensor = self.network((wide * prepared.weights).sum(1), deep)
        return logits

    def losses(self, prepared: _Prepared, wide_rows: Tensor, deep_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the wide loss, and what to differentiate: the deep loss, whose gradient is both losses'."""
        wide = wide_loss(self._logits(prepared, wide_rows, deep_rows), prepared.label)
        return wide, wide if self._l2 == "none" else wide + deep_l2(deep_rows, prepared.counts)


def _forward(side: DenseSide, *arguments: Any) -> tuple[Tensor, Tensor]:
    return side.losses(*arguments)


def _read_losses(squares: Any, results: list[npt.NDArray[Any]], number: int) -> Losses:
    """Make losses of a step's results; `squares` are the table's, where its L2 is added."""
    wide, deep, skipped = results[0].tolist()
    if squares is not None:
        deep = wide + L2_COEFFICIENT / 2 * total(results[1] if len(results) > 1 else squares)
    if skipped or not np.isfinite([wide, deep]).all():
        what = f"wide_loss {wide}, deep_loss {deep}"
        which = "the loss" if not np.isfinite([wide, deep]).all() else "a gradient"
        raise NonFiniteLossError(f"{which} is not finite ({what}); no row was updated", number)
    return Losses(wide, deep)
