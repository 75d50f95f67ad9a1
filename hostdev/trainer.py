"""A training step and an evaluation of Wide & Deep: the model, its tables, and the ops between them.

A batch's way: unique -> pull (lookup, to the device) -> forward, backward -> push (to the host, update).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hostdev import metrics
from hostdev.batch import Batch
from hostdev.device.backend import free_bytes, is_accelerator
from hostdev.device.rows import gather_rows, gather_scaled_rows
from hostdev.digest import state_sha256
from hostdev.embedding import Embedding
from hostdev.errors import UserError
from hostdev.host.server import ParameterServer
from hostdev.kernels.unique import unique
from hostdev.manifest import FIELDS
from hostdev.memory import available_bytes, require_table
from hostdev.models.wide_deep import L2_COEFFICIENT, WideDeep, deep_l2, wide_loss
from hostdev.optimizers import FTRL, LazyAdam, SparseOptimizer
from hostdev.primitive import OpLog, Primitive

DENSE_LR = 3.5e-4
DENSE_EPS = 1e-8


class Losses(NamedTuple):
    """A step's losses."""

    wide: float
    deep: float


class Evaluation(NamedTuple):
    """How good the model is on a split."""

    auc: float
    logloss: float
    rows: int


@dataclass(frozen=True)
class _Prepared:
    """A batch with its ids deduplicated; the tensors are on the device."""

    ids: Any  # unique ids [U], where the tables are: numpy on the host, a tensor on the device
    inverse: Tensor  # int32 [B * F]
    uses: Tensor | None  # float32 [U], for --l2 batch only
    label: Tensor  # [B]
    weights: Tensor  # [B, F]


class Trainer:
    """Wide & Deep with its tables.

    rows             of both tables: the vocabulary's size
    dim              columns of the deep table
    host_device_mix  place the tables, and the ops on them, on the host
    device           of the dense layers
    l2               "none", "batch" or "table"
    precision        "fp32", or "bf16" for the dense layers' arithmetic over float32 weights
    seed             of all initial values
    log              where every op's durations go
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        host_device_mix: bool,
        device: torch.device,
        l2: str,
        precision: str = "fp32",
        seed: int,
        log: OpLog,
    ) -> None:
        self._target = "CPU" if host_device_mix else "DEVICE"
        self._device = device
        self._l2 = l2
        self._precision = precision
        self.server = ParameterServer()
        placement: dict[str, Any] = {
            "target": self._target,
            "device": device,
            "seed": seed,
            "log": log,
            "server": self.server,
        }
        _require_tables({"deep": (rows, dim, LazyAdam()), "wide": (rows, 1, FTRL())}, host_device_mix, device)
        self.deep = Embedding("deep", rows, dim, LazyAdam(), **placement)
        self.wide = Embedding("wide", rows, 1, FTRL(), **placement)
        self.network = WideDeep(FIELDS, dim, seed=seed).to(device)
        self.adam = torch.optim.Adam(self.network.parameters(), lr=DENSE_LR, eps=DENSE_EPS, fused=True)
        self._unique = Primitive("Unique", unique, log=log).add_prim_attr("primitive_target", "CPU")
        self._count_uses = Primitive("CountUses", np.bincount, log=log).add_prim_attr("primitive_target", "CPU")
        self._to_device = Primitive(
            "HostToDevice", lambda tensors: [tensor.to(device) for tensor in tensors], scope="batch", log=log
        )
        self._table_l2 = Primitive("TableL2", self.deep.table.sum_of_squares, scope="deep", log=log)
        self._table_l2.add_prim_attr("primitive_target", self._target)
        self._forward = Primitive("DenseForward", self._run_forward, scope="network", log=log)
        self._backward = Primitive("DenseBackward", lambda objective: objective.backward(), scope="network", log=log)
        self._adam_step = Primitive("Adam", self.adam.step, scope="network", log=log)

    def step(self, batch: Batch) -> Losses:
        """Take one training step on a batch and return its losses from before the update.

        Raises UserError where a loss is not finite; nothing is updated then.
        """
        prepared = self._prepare(batch)
        deep_rows = self.deep.pull(prepared.ids).requires_grad_()
        wide_rows = self.wide.pull(prepared.ids).requires_grad_()
        wide, objective = self._forward(prepared, wide_rows, deep_rows)
        losses = self._losses(wide, objective)

        self.adam.zero_grad()
        self._backward(objective)
        self._adam_step()
        assert deep_rows.grad is not None
        assert wide_rows.grad is not None
        self.wide.push(prepared.ids, wide_rows.grad)
        self.deep.push(prepared.ids, deep_rows.grad)
        return losses

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation | None:
        """Return AUC and log loss over batches, None if there are none; the model does not change."""
        logits, labels = [], []
        with torch.no_grad():
            for batch in batches:
                prepared = self._prepare(batch)
                deep_rows, wide_rows = self.deep.pull(prepared.ids), self.wide.pull(prepared.ids)
                logits.append(self._logits(prepared, wide_rows, deep_rows).cpu().numpy())
                labels.append(batch.label)
        if not labels:
            return None
        scores, truth = np.concatenate(logits), np.concatenate(labels)
        wrong = len(scores) - np.count_nonzero(np.isfinite(scores))
        if wrong:
            raise UserError(f"the predictions of {wrong} of {len(scores)} rows are not finite; the model has diverged")
        return Evaluation(metrics.auc(scores, truth), metrics.log_loss(scores, truth), len(scores))

    def state_sha256(self) -> str:
        """Return the digest of the tables and of the dense side."""
        return state_sha256([self.deep.table, self.wide.table], self.network, self.adam)

    def _prepare(self, batch: Batch) -> _Prepared:
        ids, inverse = self._unique(batch.ids.ravel())
        arrays = [inverse, batch.label, batch.weights]
        if self._target == "DEVICE":
            arrays.append(ids)
        if self._l2 == "batch":
            arrays.append(self._count_uses(inverse, minlength=len(ids)).astype(np.float32))
        tensors = [torch.from_numpy(array) for array in arrays]
        if is_accelerator(self._device):
            tensors = self._to_device(tensors)
        inverse, label, weights, *rest = tensors
        if self._target == "DEVICE":
            ids = rest.pop(0)
        return _Prepared(ids, inverse, rest[0] if rest else None, label, weights)

    def _logits(self, prepared: _Prepared, wide_rows: Tensor, deep_rows: Tensor) -> Tensor:
        shape = prepared.weights.shape
        wide = gather_rows(wide_rows, prepared.inverse).view(shape)
        dtype = torch.bfloat16 if self._precision == "bf16" else torch.float32
        deep = gather_scaled_rows(deep_rows, prepared.inverse, prepared.weights.view(-1), dtype).view(shape[0], -1)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            logits: Tensor = self.network((wide * prepared.weights).sum(1), deep)
        return logits

    def _run_forward(self, prepared: _Prepared, wide_rows: Tensor, deep_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the wide loss, and what to differentiate: the deep loss, whose gradient is both losses'."""
        wide = wide_loss(self._logits(prepared, wide_rows, deep_rows), prepared.label)
        return wide, wide if self._l2 == "none" else wide + deep_l2(deep_rows, prepared.uses)

    def _losses(self, wide: Tensor, objective: Tensor) -> Losses:
        wide_value, deep_value = float(wide.detach()), float(objective.detach())
        if self._l2 == "table":
            deep_value = wide_value + L2_COEFFICIENT / 2 * self._table_l2()
        if not (np.isfinite(wide_value) and np.isfinite(deep_value)):
            raise UserError(
                f"the loss is not finite (wide_loss {wide_value}, deep_loss {deep_value}); no row was updated"
            )
        return Losses(wide_value, deep_value)


def _require_tables(
    tables: dict[str, tuple[int, int, SparseOptimizer]], host_device_mix: bool, device: torch.device
) -> None:
    """Raise UserError unless all tables together fit, before the first is allocated."""
    where = "host" if host_device_mix else "device"
    free = available_bytes() if host_device_mix else free_bytes(device)
    if free is None:
        return
    for name, (rows, dim, optimizer) in tables.items():
        free -= require_table(name, rows, dim, optimizer, free, where)
