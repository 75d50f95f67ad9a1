"""A training step and an evaluation of Wide & Deep: the model, its tables, and the ops between them.

`Pipeline` takes a batch through them: unique -> lookup, to the device -> forward, backward -> to the host, update.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev import metrics
from hostdev.batch import Batch
from hostdev.cache.cache import EmbeddingCache
from hostdev.device.backend import free_bytes
from hostdev.device.rows import gather_rows, gather_scaled_rows
from hostdev.device.staging import Staging
from hostdev.device.table import DeviceTable
from hostdev.digest import state_sha256
from hostdev.embedding import Embedding
from hostdev.errors import UserError
from hostdev.host.server import ParameterServer
from hostdev.host.table import HostTable
from hostdev.kernels.unique import count_uses, unique
from hostdev.manifest import FIELDS
from hostdev.memory import available_bytes, require_table
from hostdev.models.wide_deep import L2_COEFFICIENT, WideDeep, deep_l2, wide_loss
from hostdev.optimizers import FTRL, LazyAdam, SparseOptimizer
from hostdev.pipeline import Pipeline, Result
from hostdev.primitive import OpLog, Primitive

DENSE_LR = 3.5e-4
DENSE_EPS = 1e-8


class Losses(NamedTuple):
    """A step's losses."""

    wide: float
    deep: float


class NonFiniteLossError(UserError):
    """A loss is not a number or infinite; the message says which, and that no row was updated."""


class Evaluation(NamedTuple):
    """How good the model is on a split."""

    auc: float
    logloss: float
    rows: int


@dataclass(frozen=True)
class _Prepared:
    """A batch with its ids deduplicated; the tensors are on the device."""

    ids: Tensor | None  # unique ids [U], where the tables are on the device
    inverse: Tensor  # int32 [B * F]
    uses: Tensor | None  # float32 [U], for --l2 batch only
    label: Tensor  # [B]
    weights: Tensor  # [B, F]
    tensors: list[Tensor]  # all of them that were sent
    sent: Any  # what `Staging.await_sent` takes


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
    cache            capacity_rows, policy, ... of `EmbeddingCache`; None for no cache
    overlap          how the stages of neighbouring batches overlap: depth, staleness, ... of `Pipeline`
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
        cache: dict[str, Any] | None = None,
        **overlap: Any,
    ) -> None:
        self._target = "CPU" if host_device_mix else "DEVICE"
        self._device = device
        self._l2 = l2
        self.reads_whole_tables = l2 == "table" and host_device_mix
        self._precision = precision
        self.server = ParameterServer()
        optimizers = tables_of(dim)
        _require_tables(rows, optimizers, host_device_mix, device)
        self.wide, self.deep = embeddings = [
            Embedding(
                self.server.add(HostTable(rows, columns, optimizer, name=name, seed=seed))
                if host_device_mix
                else DeviceTable(rows, columns, optimizer, device, name=name, seed=seed),
                log,
            )
            for name, (columns, optimizer) in optimizers.items()
        ]
        self.network = WideDeep(FIELDS, dim, seed=seed).to(device)
        self.adam = torch.optim.Adam(self.network.parameters(), lr=DENSE_LR, eps=DENSE_EPS, fused=True)
        self._unique = Primitive("Unique", unique, log=log).add_prim_attr("primitive_target", "CPU")
        self._count_uses = Primitive("CountUses", count_uses, log=log).add_prim_attr("primitive_target", "CPU")
        self._table_l2 = Primitive("TableL2", self.deep.table.sum_of_squares, scope="deep", log=log)
        self._table_l2.add_prim_attr("primitive_target", self._target)
        self._forward = Primitive("DenseForward", self._run_forward, scope="network", log=log)
        self._backward = Primitive("DenseBackward", lambda objective: objective.backward(), scope="network", log=log)
        self._adam_step = Primitive("Adam", self.adam.step, scope="network", log=log)
        self._staging = Staging(device, log)
        overlap.setdefault("depth", 0)
        self.cache: EmbeddingCache | None = None
        if cache is not None:
            tables = [part.table for part in embeddings if isinstance(part.table, HostTable)]
            self.cache = EmbeddingCache(tables, device=device, log=log, **cache)
            for part, slots in zip(embeddings, self.cache.slots, strict=True):
                part.use_cache(slots, log)
        self.pipeline = Pipeline(self, embeddings, self._staging, cache=self.cache, **overlap)

    def train(self, batches: Iterable[Batch]) -> Generator[Result, None, None]:
        """Take a step per batch, and yield each one's losses from before its update; see `Pipeline.train`.

        Raises UserError where a loss is not finite; that step and later ones update nothing then.
        """
        return self.pipeline.train(batches)

    def evaluate(self, batches: Iterable[Batch], progress: Callable[[], object] = lambda: None) -> Evaluation | None:
        """Return AUC and log loss over batches, None if there are none; the model does not change.

        progress  called after each batch
        """
        logits, labels = [], []
        for batch, scores in self.pipeline.predict(batches, self._predict):
            logits.append(scores)
            labels.append(batch.label)
            progress()
        if not labels:
            return None
        scores, truth = np.concatenate(logits), np.concatenate(labels)
        wrong = len(scores) - np.count_nonzero(np.isfinite(scores))
        if wrong:
            raise UserError(f"the predictions of {wrong} of {len(scores)} rows are not finite; the model has diverged")
        return Evaluation(metrics.auc(scores, truth), metrics.log_loss(scores, truth), len(scores))

    def state_sha256(self) -> str:
        """Return the digest of the tables and of the dense side."""
        self.pipeline.write_back()
        return state_sha256([self.deep.table, self.wide.table], self.network, self.adam)

    def unique(self, batch: Batch) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Deduplicate a batch's ids."""
        ids, inverse = self._unique(batch.ids.ravel())
        return ids, inverse

    def prepare(self, batch: Batch, ids: npt.NDArray[Any], inverse: npt.NDArray[np.int32]) -> _Prepared:
        """Send a batch to the device."""
        arrays = [inverse, batch.label, batch.weights]
        if self._target == "DEVICE":
            arrays.append(ids)
        if self._l2 == "batch":
            arrays.append(self._count_uses(inverse, len(ids)).astype(np.float32))
        tensors, sent = self._staging.send([torch.from_numpy(array) for array in arrays])
        there, label, weights, *rest = tensors
        on_device = rest.pop(0) if self._target == "DEVICE" else None
        return _Prepared(on_device, there, rest[0] if rest else None, label, weights, tensors, sent)

    def await_prepared(self, prepared: _Prepared) -> None:
        """Let the device wait for what `prepare` has sent."""
        self._staging.await_sent(prepared.sent, prepared.tensors)

    def step(self, prepared: _Prepared, rows: list[Tensor]) -> tuple[Losses, list[Tensor]]:
        """Return the losses and the gradient of the wide and the deep rows, and update the dense side.

        Raises UserError where a loss is not finite, before anything is updated.
        """
        wide_rows, deep_rows = (part.requires_grad_() for part in rows)
        wide, objective = self._forward(prepared, wide_rows, deep_rows)
        values = self._staging.receive([wide.detach(), objective.detach()])
        self.adam.zero_grad()
        self._backward(objective)  # an accelerator works on it while the losses are looked at
        losses = self._losses(*values)
        self._adam_step()
        assert deep_rows.grad is not None
        assert wide_rows.grad is not None
        return losses, [wide_rows.grad, deep_rows.grad]

    def _predict(self, prepared: _Prepared, rows: list[Tensor]) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            return self._logits(prepared, *rows).cpu().numpy()

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

    def _losses(self, values: list[Tensor], received: Any) -> Losses:
        self._staging.await_mark(received)
        wide_value, deep_value = (float(value) for value in values)
        if self._l2 == "table":
            deep_value = wide_value + L2_COEFFICIENT / 2 * self._table_l2()
        if not (np.isfinite(wide_value) and np.isfinite(deep_value)):
            raise NonFiniteLossError(
                f"the loss is not finite (wide_loss {wide_value}, deep_loss {deep_value}); no row was updated"
            )
        return Losses(wide_value, deep_value)


def tables_of(dim: int) -> dict[str, tuple[int, SparseOptimizer]]:
    """Return the columns and the optimizer of each table, by name."""
    return {"wide": (1, FTRL()), "deep": (dim, LazyAdam())}


def _require_tables(
    rows: int, tables: dict[str, tuple[int, SparseOptimizer]], host_device_mix: bool, device: torch.device
) -> None:
    """Raise UserError unless all tables together fit, before the first is allocated."""
    where = "host" if host_device_mix else "device"
    free = available_bytes() if host_device_mix else free_bytes(device)
    if free is None:
        return
    for name, (dim, optimizer) in sorted(tables.items()):
        free -= require_table(name, rows, dim, optimizer, free, where)
