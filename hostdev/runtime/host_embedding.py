"""`HostEmbedding`: rows of a host table as a torch module, for a user's own model and loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from hostdev.cache.cache import EmbeddingCache, flat_ids
from hostdev.cache.planner import Plan
from hostdev.core.errors import UserError
from hostdev.device.pinned import Slab
from hostdev.device.rows import Uses, gather_rows
from hostdev.device.staging import Staging
from hostdev.host.table import HostTable
from hostdev.kernels.unique import unique
from hostdev.pipeline.rows import BatchRows, Embedding, Part, receive_rows, rows_of
from hostdev.runtime import scaling

MOST_PASSES = 64  # of which the gradients wait for one step


@dataclass
class _Pass:
    """A forward pass whose update is to come."""

    rows: BatchRows
    leaf: Tensor  # float32 [U, D] on the device
    writes: npt.NDArray[Any]  # ids that the host updates, and then those that are evicted
    plan: Plan | None
    memory: Slab
    order: Tensor | None = None  # int32 [U] on the device: the rows as the cache has them
    node: Any = None  # a weak reference to the pass in autograd's graph
    finite: bool = False  # the gradients have been looked at

    @property
    def has_gradient(self) -> bool:
        """Tell whether a backward pass has come here."""
        return self.leaf.grad is not None

    @property
    def is_over(self) -> bool:
        """Tell whether nobody holds the graph any more, so that no gradient can come."""
        return self.node is not None and self.node() is None

    def grad(self) -> Tensor:
        """Return the gradients, float32 [U, D]."""
        assert self.leaf.grad is not None
        return self.leaf.grad

    def ordered_grad(self) -> Tensor:
        """Return the gradients in the order of the cache's rows."""
        return self.grad() if self.order is None else self.grad().index_select(0, self.order)


class HostEmbedding(nn.Module):
    """Looks up rows of a host table, and updates them with the gradients that `backward` brings.

    ::

        embedding = HostEmbedding(hostdev.HostTable(rows, dim, hostdev.LazyAdam(), name="items"), device="cuda")
        loss = loss_of(model(embedding(ids)), label)
        loss.backward()
        optimizer.step()  # the dense part
        embedding.step()  # the table: sums duplicates, one step of its own optimizer

    With an `EmbeddingCache` over the table, hot rows stay on the device; give the batches through `cache.ahead`, so
    that it knows those to come. The bits are the same. The table owns the weights: nothing of the module is in its
    `state_dict`, and its one parameter, `trainable`, has no elements and gets no gradient. That is there for
    `requires_grad_(False)`, on the module or on one around it, after which passes only look rows up and `step` does
    nothing, and for `to(device)`.

    source  a HostTable, or an EmbeddingCache of one or several
    table   which of the cache's tables, by name; may be left out if there is one
    device  where the rows go; the cache's device if there is one

    One thread at a time. Passes in evaluation or under `torch.no_grad` only look. Without a cache there may be several
    passes in training before a step, which adds their gradients up; passes whose outputs are gone without a backward
    pass are forgotten. With one there is one pass between two steps, and all of the cache's tables take their steps
    before the next batch.

    A `torch.amp.GradScaler` goes to `step`. To clip gradients by their norm over the whole model, name the rows, too::

        scaler.unscale_(optimizer)
        embedding.unscale_(scaler)
        clip_grad_norm_([*model.parameters(), *embedding.rows()], 1.0)
        scaler.step(optimizer)
        embedding.step(scaler)
        scaler.update()

    Clipping that is given `model.parameters()` alone leaves the rows' gradients as they are, without a word: it reads
    `.grad` of what it is given, as every optimizer does, so nothing here can tell that it was called.
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
            self._cache.modules.add(self)
        self._staging = Staging(self.device)
        self._pending: list[_Pass] = []
        self._unscaled = False  # the pending gradients have been divided by the scaler's scale
        self._losses_before = 0  # that were scaled before the first pending pass
        self.trainable = nn.Parameter(torch.empty(0, device=self.device))
        scaling.watch()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids.

        ids      int32 or int64 of any shape, on any device, each in [0, V); duplicates allowed
        returns  float32 of that shape and one more dimension, D, on the module's device

        Raises UserError for an id outside the table; ValueError where gradients of earlier passes have to be stepped
        first, and where the ids are not those of the batch that `cache.ahead` gave.
        """
        if not (self.training and torch.is_grad_enabled() and self.trainable.requires_grad):
            return self._look(ids)
        if self._cache is None:
            self._require_room()
            found, inverse = unique(flat_ids(ids))
            pending = self._fetch(found, None)
        else:
            self._require_no_gradients(self._cache)
            plan, inverse = self._cache.planned(ids, self._index)
            if any(earlier.plan is plan for earlier in self._pending):
                raise ValueError(f"table {self.table.name!r}: call step() before the next forward pass in training")
            self._forget()  # of a batch that was skipped
            pending = self._fetch(plan.ids, plan)
        if not self._pending:
            self._losses_before = scaling.losses_scaled()
        [at] = self._send(torch.from_numpy(inverse), memory=pending.memory)
        rows = gather_rows(pending.leaf, Uses(at, len(pending.leaf)))
        pending.node = ref(rows.grad_fn)
        self._pending.append(pending)
        return rows.view(*ids.shape, self.table.dim)

    def step(self, scaler: GradScaler | None = None) -> None:
        """Take one optimizer step of the table with the gradients of the passes since the last one.

        scaler  the GradScaler that has scaled the loss, if one has; where another model's has, and not this loss, a
                GradScaler(enabled=False). The gradients are divided by the scale of the time of `scaler.scale`. Where
                they are not finite then, the step is skipped and the scaler's next `update` lowers the scale, as with
                the parameters of an optimizer

        Raises ValueError where there was no pass, no gradient has come back for one, or a GradScaler was left out;
        UserError where gradients are not finite: nothing is updated then, and the passes are forgotten. A frozen
        module has nothing to step.
        """
        self._forget_lost()
        if not self._pending and not self.trainable.requires_grad:
            return
        if not self._pending or not all(one.has_gradient for one in self._pending):
            raise ValueError(f"table {self.table.name!r}: step() needs a forward pass in training and its backward()")
        plan = self._pending[0].plan
        if self._cache is not None and plan is not None and not self._cache.is_planned(plan, self._index):
            self._forget()
            raise ValueError(f"table {self.table.name!r}: the batch of this pass is over; step() comes before the next")
        self._unscale_if_needed(scaler)
        skipped = False
        if scaler is None or not scaler.is_enabled():
            self._require_finite(plan)
        else:
            skipped = not self._is_finite()
            scaling.report(scaler, self, self._pending[0].leaf.device, not_finite=skipped)
        passes = self._pending
        self._forget()
        if plan is None and not skipped:
            self._update(passes)
        elif plan is not None:
            self._update_cached(passes[0], plan, skipped=skipped)

    def unscale_(self, scaler: GradScaler) -> None:
        """Divide the gradients by the scaler's scale now, as `scaler.unscale_(optimizer)`, for clipping; then `step`.

        Raises ValueError where the scaler has not scaled the loss of these passes, or where it was done before.
        """
        if not scaler.is_enabled():
            return
        if self._unscaled:
            raise ValueError(f"table {self.table.name!r}: unscale_() has been called since the last step()")
        self._forget_lost()
        if not self._pending:
            return
        scale = scaling.scale_since(scaler, self._losses_before)
        for one in self._pending:
            if one.has_gradient:
                scaling.unscale(one.grad(), scale)
        self._unscaled = True

    def rows(self) -> list[Tensor]:
        """Return the pending passes' rows: leaf tensors float32 [U, D], a row per id, whose `.grad` a clip may change.

        Without a cache, and with several passes, an id that two of them use has a row, and so a part of the norm, in
        each.
        """
        self._forget_lost()
        return [one.leaf for one in self._pending]

    def discard(self) -> None:
        """Forget the passes since the last step, where a batch is skipped after its backward pass."""
        plan = self._pending[0].plan if self._pending else None
        self._forget()
        if self._cache is not None and plan is not None:
            self._cache.skip(plan)

    def awaits_step(self, plan: Plan) -> bool:
        """Tell whether gradients of this plan's batch are here and not stepped; for the cache."""
        return any(one.plan is plan and one.has_gradient for one in self._pending)

    def _forget(self) -> None:
        self._pending = []
        self._unscaled = False

    def _forget_lost(self) -> None:
        """Forget passes whose outputs were thrown away before a backward pass."""
        self._pending = [one for one in self._pending if one.has_gradient or not one.is_over]

    def _require_room(self) -> None:
        """ValueError where too many gradients wait, or where what waits is half done."""
        self._forget_lost()
        if self._unscaled:
            raise ValueError(f"table {self.table.name!r}: call step() after unscale_(), before the next forward pass")
        if sum(one.has_gradient for one in self._pending) >= MOST_PASSES:
            raise ValueError(
                f"table {self.table.name!r}: the gradients of {MOST_PASSES} passes wait for a step; call step(), or "
                "discard()"
            )

    def _require_no_gradients(self, cache: EmbeddingCache) -> None:
        """ValueError where a batch's gradients would be lost, or where tables of one cache could not step together."""
        if any(one.has_gradient for one in self._pending):
            raise ValueError(
                f"table {self.table.name!r}: call step() before the next forward pass in training, or discard() to "
                "skip the batch; with a cache the gradients of several do not add up"
            )
        for number, table in enumerate(cache.tables):
            of_table = [module for module in cache.modules if module.table is table and number != self._index]
            if of_table and not any(module.trainable.requires_grad for module in of_table):
                raise ValueError(
                    f"table {self.table.name!r} is to be trained, and table {table.name!r}, which shares its cache, is "
                    "frozen; the tables of a cache step together: give the frozen one no cache, or one of its own"
                )

    def _unscale_if_needed(self, scaler: GradScaler | None) -> None:
        if scaler is not None:
            if not self._unscaled:
                self.unscale_(scaler)
        elif self._unscaled or scaling.in_use(self._losses_before):
            raise ValueError(
                f"table {self.table.name!r}: a GradScaler has scaled a loss since the forward pass; call step(scaler), "
                "or step(GradScaler(enabled=False)) if it was not this one's"
            )

    def _is_finite(self) -> bool:
        for one in self._pending:
            if not one.finite:
                one.finite = math.isfinite(float(one.grad().sum())) or bool(one.grad().isfinite().all())
        return all(one.finite for one in self._pending)

    def _require_finite(self, plan: Plan | None) -> None:
        """UserError where a gradient of this table, or of those that step with it, is not finite."""
        together = [self]
        if self._cache is not None and plan is not None:
            together += [module for module in self._cache.modules if module is not self and module.awaits_step(plan)]
        wrong = [module.table.name for module in together if not module._is_finite()]
        if not wrong:
            return
        if self._cache is not None and plan is not None:
            if self._cache.others_stepped(plan):  # their rows have taken their slots, and this table's are to follow
                self._update_cached(self._pending[0], plan, skipped=True)
            self._cache.skip(plan)
        for other in together:
            other._forget()
        raise UserError(
            f"table {wrong[0]!r}: the gradients are not finite; no row was updated. Look at the loss before "
            "backward(), or use a smaller learning rate"
        )

    def _update(self, passes: list[_Pass]) -> None:
        """Take a step on the host; duplicates between passes are summed in order."""
        if len(passes) == 1:
            [one] = passes
            one.rows.update_cached(one.grad(), None)
            self._take_back(one, one.rows.leave(one.grad()))
            return
        grads = torch.cat([one.grad() for one in passes]).cpu().numpy()
        self.table.apply(np.concatenate([one.writes for one in passes]), grads)
        for one in passes:
            one.memory.release()

    def _update_cached(self, one: _Pass, plan: Plan, *, skipped: bool) -> None:
        """Take a step on the device and the host; where it is skipped, rows only enter and leave the cache."""
        assert self._cache is not None
        grad = one.ordered_grad()
        if not skipped:
            one.rows.update_cached(grad, None)
        leaving = one.rows.leave(grad)
        self._cache.stepped(plan, self._index, partial(one.rows.bring_back, plan.evicted))
        if skipped:
            one.rows.bring_back(plan.evicted)
        else:
            self._take_back(one, leaving)
        self._cache.left(plan, self._index)

    def _take_back(self, one: _Pass, leaving: list[Tensor]) -> None:
        _, mark = receive_rows([one.rows], [leaving], None, self._staging, one.memory)
        self._staging.await_mark(mark)
        one.rows.update(Part.of(one.writes, None))
        one.rows.updated()
        one.memory.release()

    def _fetch(self, ids: npt.NDArray[Any], plan: Plan | None) -> _Pass:
        reads, writes = (ids, ids) if plan is None else (plan.reads, plan.writes)
        memory = self._staging.slabs.take()
        [rows] = rows_of([self._embedding], len(ids), plan, self._staging, memory)
        rows.fetch(Part.of(reads, None))
        rows.send()
        values, order = rows.arrived(), None
        if plan is not None:  # in the order of the ids, as without a cache: a clip's norm is a sum over the rows
            places, order = self._send(*(torch.from_numpy(at) for at in (plan.places, plan.order)), memory=memory)
            values = values.index_select(0, places)
        return _Pass(rows, values.requires_grad_(), writes, plan, memory, order)

    def _look(self, ids: Tensor) -> Tensor:
        if self._cache is not None:
            self._cache.write_back_rows()
        found, inverse = unique(flat_ids(ids))
        memory = self._staging.slabs.loose()
        rows = memory.buffer(len(found), self.table.dim)
        self.table.lookup(found, out=rows.numpy())
        rows, at = self._send(rows, torch.from_numpy(inverse), memory=memory)
        return rows.index_select(0, at).view(*ids.shape, self.table.dim)

    def _send(self, *tensors: Tensor, memory: Slab) -> list[Tensor]:
        """Copy tensors to the device, whose stream waits for them; this thread does not."""
        sent, mark = self._staging.send(tensors, memory)
        self._staging.await_sent([mark], sent)
        return sent

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HostEmbedding":
        """Follow `to`, `cuda` and `cpu`: rows go to another device from now on. Their dtype stays float32."""
        before = self.trainable.device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        now = self.trainable.device
        if now in (before, torch.device("meta")):
            return self
        if self._cache is not None or self._pending:
            self.trainable.data = self.trainable.data.to(before)
            why = f"its cache is on {before}" if self._cache is not None else "gradients or passes wait for step()"
            raise ValueError(f"table {self.table.name!r}: the rows cannot go to {now}: {why}")
        self.device = now
        self._staging = Staging(now)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}trainable", None)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        if f"{prefix}trainable" in missing_keys:
            missing_keys.remove(f"{prefix}trainable")

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
