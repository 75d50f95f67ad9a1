"""`HostEmbedding`: rows of a host table as a torch module, for a user's own model and loop."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hostdev.cache.cache import EmbeddingCache, flat_ids
from hostdev.cache.planner import Plan
from hostdev.device.pinned import Slab
from hostdev.device.rows import Uses, gather_rows
from hostdev.device.staging import Staging
from hostdev.embedding import BatchRows, Embedding, Part, rows_of
from hostdev.host.table import HostTable
from hostdev.kernels.unique import unique


class _Step(NamedTuple):
    """A forward pass whose update is to come."""

    rows: BatchRows
    leaf: Tensor  # float32 [U, D] on the device
    writes: npt.NDArray[Any]  # ids that the host updates, and then those that are evicted
    plan: Plan | None
    memory: Slab


class HostEmbedding(nn.Module):
    """Looks up rows of a host table, and updates them with the gradients that `backward` brings.

    ::

        embedding = HostEmbedding(hostdev.HostTable(rows, dim, hostdev.LazyAdam(), name="items"), device="cuda")
        loss = loss_of(model(embedding(ids)), label)
        loss.backward()
        optimizer.step()  # the dense part
        embedding.step()  # the table: sums duplicates, one step of its own optimizer

    With an `EmbeddingCache` over the table, hot rows stay on the device; give the batches through `cache.ahead`, so
    that it knows those to come. The bits are the same. The table owns the weights: the module has no parameters and
    nothing in its `state_dict`.

    source  a HostTable, or an EmbeddingCache of one or several
    table   which of the cache's tables, by name; may be left out if there is one
    device  where the rows go; the cache's device if there is one

    One thread at a time. Between two steps there is one forward pass in training (any number without a cache), all
    of a cache's tables take their steps before the next, and passes in evaluation or under `torch.no_grad` only look.
    """

    def __init__(
        self, source: HostTable | EmbeddingCache, table: str | None = None, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self._cache = source if isinstance(source, EmbeddingCache) else None
        if self._cache is None:
            assert isinstance(source, HostTable)
            self.table = source
            self.device = torch.device(device or "cpu")
        else:
            self._index = _index(self._cache, table)
            held = self._cache.tables[self._index]
            assert isinstance(held, HostTable)
            self.table = held
            self.device = self._cache.device
            if device is not None and torch.empty(0, device=device).device != torch.empty(0, device=self.device).device:
                raise ValueError(f"the cache is on {self.device}, so the rows cannot go to {device}")
        self._embedding = Embedding(self.table)
        if self._cache is not None:
            self._embedding.use_cache(self._cache.slots[self._index])
        self._staging = Staging(self.device)
        self._pending: list[_Step] = []

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids.

        ids      int32 or int64 of any shape, on any device, each in [0, V); duplicates allowed
        returns  float32 of that shape and one more dimension, D, on the module's device

        Raises UserError for an id outside the table; ValueError with a cache for a second pass before `step`, and
        where the ids are not those of the batch that `cache.ahead` gave.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self._look(ids)
        if self._cache is None:
            found, inverse = unique(flat_ids(ids))
            step = self._fetch(found, None)
        else:
            plan, inverse = self._cache.planned(ids, self._index)
            inverse = plan.renumber(inverse)
            if any(step.plan is plan for step in self._pending):
                raise ValueError(f"table {self.table.name!r}: call step() before the next forward pass in training")
            self._pending.clear()  # of a batch that was skipped
            step = self._fetch(plan.ids, plan)
        self._pending.append(step)
        at = torch.from_numpy(inverse).to(self.device)
        uses = Uses(at, len(step.leaf), in_order=step.plan is None)
        return gather_rows(step.leaf, uses).view(*ids.shape, self.table.dim)

    def step(self) -> None:
        """Take one optimizer step of the table with the gradients of the passes since the last one.

        Raises ValueError where there was no pass, or no gradient has come back for one.
        """
        if not self._pending or any(step.leaf.grad is None for step in self._pending):
            raise ValueError(f"table {self.table.name!r}: step() needs a forward pass in training and its backward()")
        steps, self._pending = self._pending, []
        if len(steps) > 1:  # no cache: duplicates between the passes are summed, in order
            grads = torch.cat([step.leaf.grad for step in steps if step.leaf.grad is not None]).cpu().numpy()
            self.table.apply(np.concatenate([step.writes for step in steps]), grads)
            return
        rows, leaf, writes, plan, memory = steps[0]
        assert leaf.grad is not None
        if self._cache is not None and plan is not None and not self._cache.is_planned(plan, self._index):
            raise ValueError(f"table {self.table.name!r}: the batch of this pass is over; step() comes before the next")
        rows.update_cached(leaf.grad, None)
        leaving = rows.leave(leaf.grad)
        if plan is not None and self._cache is not None:
            self._cache.stepped(plan, self._index, partial(rows.bring_back, plan.evicted))
        received, mark = self._staging.receive(leaving, memory)
        rows.receive(received, mark)
        self._staging.await_mark(mark)
        rows.update(Part.of(writes, None))
        rows.updated()
        memory.release()
        if plan is not None and self._cache is not None:
            self._cache.left(plan, self._index)

    def discard(self) -> None:
        """Forget the passes since the last step, where a batch is skipped."""
        self._pending.clear()

    def _fetch(self, ids: npt.NDArray[Any], plan: Plan | None) -> _Step:
        reads, writes = (ids, ids) if plan is None else (plan.reads, plan.writes)
        memory = self._staging.slabs.take()
        [rows] = rows_of([self._embedding], len(ids), plan, self._staging, memory)
        rows.fetch(Part.of(reads, None))
        rows.send()
        return _Step(rows, rows.arrived().requires_grad_(), writes, plan, memory)

    def _look(self, ids: Tensor) -> Tensor:
        if self._cache is not None:
            self._cache.write_back_rows()
        found, inverse = unique(flat_ids(ids))
        rows = torch.from_numpy(self.table.lookup(found)).to(self.device)
        return rows.index_select(0, torch.from_numpy(inverse).to(self.device)).view(*ids.shape, self.table.dim)

    def extra_repr(self) -> str:
        """The table's shape and optimizer, for `print`."""
        cache = f", cache of {self._cache.capacity:,} rows" if self._cache is not None else ""
        return f"{self.table.name!r}, {self.table.rows:,} x {self.table.dim}, {self.table.optimizer}{cache}"


def _index(cache: EmbeddingCache, name: str | None) -> int:
    names = [table.name for table in cache.tables]
    if name is None and len(names) == 1:
        return 0
    if name not in names:
        raise ValueError(f"the cache has the tables {names}; say which, not {name!r}")
    return names.index(name)
