"""Wide & Deep with its tables: what trains it, evaluates it and digests it.

`Pipeline` takes a batch through them: unique -> lookup, to the device -> forward, backward -> to the host, update.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from hostdev.cache.cache import EmbeddingCache
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, copied_bytes, gib, pinned_size, require_table, row_bytes
from hostdev.core.optimizers import FTRL, LazyAdam, SparseOptimizer
from hostdev.core.primitive import OpLog
from hostdev.data.batch import WideBatch as Batch
from hostdev.device.backend import free_bytes, is_accelerator
from hostdev.device.staging import Staging
from hostdev.device.table import DeviceTable
from hostdev.host.server import ParameterServer
from hostdev.host.table import HostTable
from hostdev.pipeline.model import Result
from hostdev.pipeline.pipeline import Pipeline
from hostdev.pipeline.rows import Embedding
from hostdev.runtime.digest import state_sha256
from hostdev.train import metrics
from hostdev.train.dense import DenseSide, Losses, NonFiniteLossError

__all__ = ["Evaluation", "Losses", "NonFiniteLossError", "Trainer", "tables_of"]


class Evaluation(NamedTuple):
    """How good the model is on a split."""

    auc: float
    logloss: float
    rows: int


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
    most_uses        ids in a batch, at most: so that the memory of the copies is found to be too large before it is
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
        most_uses: int = 0,
        cache: dict[str, Any] | None = None,
        **overlap: Any,
    ) -> None:
        if cache is not None and l2 == "table":
            raise UserError("--l2 table reads the whole table in every step, which a cache of its rows would have to "
                            "write back each time; use --l2 batch, or no --cache-rows")  # fmt: skip
        self.server = ParameterServer()
        optimizers = tables_of(dim)
        free = _require_tables(rows, optimizers, host_device_mix, device)
        overlap.setdefault("depth", 0)
        if host_device_mix and is_accelerator(device):
            _require_staging(rows, dim, most_uses, overlap["depth"] + 2, free, cached=cache is not None)
        self.wide, self.deep = embeddings = [
            Embedding(
                self.server.add(HostTable(rows, columns, optimizer, name=name, seed=seed))
                if host_device_mix
                else DeviceTable(rows, columns, optimizer, device, name=name, seed=seed),
                log,
            )
            for name, (columns, optimizer) in optimizers.items()
        ]
        staging = Staging(device, log, batches=overlap["depth"] + 2)
        self._dense = DenseSide(dim, self.deep, staging, l2=l2, precision=precision, seed=seed, log=log)
        self.network, self.adam = self._dense.network, self._dense.adam
        self.cache: EmbeddingCache | None = None
        if cache is not None:
            tables = [part.table for part in embeddings if isinstance(part.table, HostTable)]
            self.cache = EmbeddingCache(tables, device=device, log=log, **cache)
            for part, slots in zip(embeddings, self.cache.slots, strict=True):
                part.use_cache(slots, log)
        self.pipeline = Pipeline(self._dense, embeddings, staging, cache=self.cache, **overlap)

    def train(self, batches: Iterable[Batch]) -> Generator[Result, None, None]:
        """Take a step per batch, and yield each one's losses from before its update; see `Pipeline.train`.

        Raises NonFiniteLossError where a loss or a gradient is not finite; that step and later ones update nothing.
        """
        self._dense.begin()
        return self.pipeline.train(batches)

    def evaluate(self, batches: Iterable[Batch], progress: Callable[[], object] = lambda: None) -> Evaluation | None:
        """Return AUC and log loss over batches, None if there are none; the model does not change.

        progress  called after each batch
        """
        logits, labels = [], []
        for result in self.pipeline.predict(batches, self._dense.predict):
            logits.append(result.value)
            labels.append(result.batch.label)
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


def tables_of(dim: int) -> dict[str, tuple[int, SparseOptimizer]]:
    """Return the columns and the optimizer of each table, by name."""
    return {"wide": (1, FTRL()), "deep": (dim, LazyAdam())}


def _require_tables(
    rows: int, tables: dict[str, tuple[int, SparseOptimizer]], host_device_mix: bool, device: torch.device
) -> int:
    """Raise UserError unless all tables together fit, before the first is allocated; return what is free beside."""
    where = "host" if host_device_mix else "device"
    free = available_bytes() if host_device_mix else free_bytes(device)
    if free is None:
        return 0
    for name, (dim, optimizer) in sorted(tables.items()):
        free -= require_table(name, rows, dim, optimizer, free, where)
    return free


def _require_staging(rows: int, dim: int, uses: int, batches: int, free: int, *, cached: bool) -> None:
    """Raise UserError unless the pinned memory of the copies fits beside the tables, where no id comes twice."""
    row, whole = row_bytes(tables_of(dim).values())
    most = min(rows, uses)
    each = copied_bytes(most, 2 * most if cached else 0, uses, row, whole)
    needed = batches * pinned_size(each)
    if needed > free:
        raise UserError(
            f"the copies of {batches} batches need up to {gib(needed)} of pinned host memory, but beside the tables "
            f"{gib(free)} are free; use a smaller --batch-size or --pipeline-depth"
        )
