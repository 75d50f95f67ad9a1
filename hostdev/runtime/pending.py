"""Gradients of rows that wait for a step because a loop ended between `backward` and the optimizer's step.

The dense parameters keep such gradients in `.grad`, and the next step uses them, unless `zero_grad` is called first.
That step must also use the gradients of the rows. So the next loop adds these rows to its first batch, which is alone
in the pipeline. When that batch gets its first gradients, the loop checks whether the dense parameters still have the
earlier gradients; if so, it adds the earlier gradients of the rows, too.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from hostdev.device.rows import GroupUses
from hostdev.pipeline.batch_ids import Request
from hostdev.pipeline.results import Gradients, StepBatch
from hostdev.runtime import scaling
from hostdev.runtime.finite import Flags, NonFiniteError
from hostdev.runtime.row_parameter import RowParameter
from hostdev.runtime.waiting import first_parameter

Ids = npt.NDArray[Any]


class GroupGradients(NamedTuple):
    """Gradients of some rows of a group's tables."""

    ids: Ids  # int32 or int64 [P], unique
    grads: list[Tensor | None]  # for each table, float32 [P, D] on the device, or None without a gradient


class _Held(NamedTuple):
    """A dense parameter's gradient from the same batches as the waiting gradients of rows."""

    optimizer: Optimizer
    parameter: Tensor
    grad: Tensor
    version: int  # torch's count of writes to `grad`; -1: `grad` was all 0

    def is_gone(self) -> bool:
        """Return whether `zero_grad` has removed the gradient or, with `set_to_none=False`, set it to 0."""
        return self.parameter.grad is not self.grad or (
            self.version not in (-1, self.grad._version) and not self.grad.any()
        )


class Pending:
    """Gradients of rows from batches that had no step.

    Args:
        groups: The gradients by group of tables, in the runtime's order.
        optimizers: The dense optimizers that have gradients from the same batches; may be empty.
        apply: Called with this object to take a step with these gradients alone.
        scaler: The scaler that has multiplied the losses; it divides these gradients together with the dense ones.
    """

    def __init__(
        self,
        groups: Sequence[GroupGradients],
        optimizers: Iterable[Optimizer],
        apply: Callable[["Pending"], None],
        scaler: GradScaler | None = None,
    ) -> None:
        self.groups = groups
        self._held = [
            _Held(optimizer, found, found.grad, found.grad._version if found.grad.any() else -1)
            for optimizer in optimizers
            if (found := first_parameter(optimizer)) is not None and found.grad is not None
        ]
        self._apply, self._scaler = apply, scaler
        self._dropped = False
        self.thread = threading.get_ident()

    def is_kept(self) -> bool:
        """Return whether the gradients still apply: they were not dropped, and the dense gradients still exist."""
        if any(one.is_gone() for one in self._held):
            self._dropped = True
        return not self._dropped

    def drop(self) -> None:
        """Exclude these gradients from the next step."""
        self._dropped = True

    def added_to(self, request: Request) -> Request:
        """Return the request, extended with the ids of these rows."""
        return request._replace(
            ids=[join_ids(own, rows.ids) for own, rows in zip(request.ids, self.groups, strict=True)]
        )

    def add_to(self, leaves: Sequence[Sequence[RowParameter]], places: Sequence[Tensor]) -> None:
        """Add the waiting gradients to a later batch's gradients. The batch's request must come from `added_to`.

        Args:
            leaves: The batch's row parameters, by group and by table.
            places: For each group, int32 [P]: where the waiting gradients' rows are among the batch's rows.
        """
        for rows, group, at in zip(self.groups, leaves, places, strict=True):
            for grad, leaf in zip(rows.grads, group, strict=True):
                if grad is not None and leaf.trained:
                    leaf.add_grad(torch.zeros_like(leaf.rows, requires_grad=False).index_copy_(0, at.long(), grad))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The dense optimizers that have gradients from the same batches."""
        return [one.optimizer for one in self._held]

    def stepped(self, optimizer: Optimizer) -> None:
        """Apply the gradients; called when one of the dense optimizers steps after the loop."""
        if threading.get_ident() == self.thread and self.is_kept():
            self._apply(self)

    def is_scaled(self) -> bool:
        """Return whether the gradients come from scaled losses; see `scaling.Scaled`."""
        return self._scaler is not None

    def unscale(self, scaler: GradScaler) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scaler's current scale, once; see `scaling.Scaled`."""
        if scaler is not self._scaler or not self.is_kept():
            return {}
        self._scaler = None
        found: dict[torch.device, Tensor] = {}
        for grad in [grad for rows in self.groups for grad in rows.grads if grad is not None]:
            wrong = found.setdefault(grad.device, torch.zeros((), device=grad.device))
            factor = torch.full_like(wrong, scaling.inverse(scaler.get_scale()))
            torch._amp_foreach_non_finite_check_and_unscale_([grad], wrong, factor)
        return found


def join_ids(own: Sequence[Ids], pending: Ids) -> list[Ids]:
    """Return a group's ids in a batch, then the pending ids, all in one dtype that holds both."""
    if not own:
        return [pending]
    dtype = own[0].dtype
    if pending.max(initial=0) > np.iinfo(dtype).max:
        dtype = pending.dtype
    return [ids.astype(dtype, copy=False) for ids in (*own, pending)]


def gradients_left(
    flight: StepBatch,
    leaves: Sequence[Sequence[RowParameter]],
    uses: Sequence[Sequence[GroupUses]],
    more: Sequence[Tensor] | None,
) -> list[GroupGradients]:
    """Remove and return the rows' gradients of a batch that the loop left without a step.

    Args:
        flight: The batch.
        leaves: The batch's row parameters, by group and by table.
        uses: For each batch that the loop yielded, the occurrences of rows by group. Other rows are not returned.
        more: For each group, positions of further rows with gradients; None if there are none.
    """
    left = []
    for number, (part, group) in enumerate(zip(flight.groups, leaves, strict=True)):
        used = np.zeros(part.own_size, bool)
        places = [feature.inverse for one in uses for feature in one[number].features]
        for at in [*places, *([] if more is None else [more[number]])]:
            used[at.cpu().numpy()] = True
        order = np.arange(part.own_size) if part.own_places is None else part.own_places
        chosen = np.flatnonzero(used[order])
        at = torch.from_numpy(order[chosen]).long()
        grads = [leaf.take_grad() for leaf in group]
        found = [None if grad is None else grad.index_select(0, at.to(grad.device)) for grad in grads]
        left.append(GroupGradients(part.ids[chosen], found))
    return left


class FirstBatch:
    """The first batch of a loop that opens while gradients of rows wait for a step; it also looks up these rows.

    The values of pending rows that the batch does not use itself are kept until it is known whether the pending
    gradients apply. If they do not, the values are restored after the step, because an optimizer changes even a row
    whose gradient is 0.

    Args:
        pending: The gradients that wait.
        tables: The tables by group.
        pipeline: The runtime's pipeline.
        done: Called with `pending` when the gradients have been added or dropped.
    """

    def __init__(
        self, pending: Pending, tables: Sequence[Sequence[Any]], pipeline: Any, done: Callable[[Pending], None]
    ) -> None:
        self.pending, self._tables, self._pipeline, self._done = pending, tables, pipeline, done
        self.counts: bool | None = None  # whether the pending gradients apply; None: unknown
        self._before: list[tuple[Any, Ids, Any, Any]] = []

    def request(self, request: Request) -> Request:
        """Extend the request with the pending rows' ids; keep the values of rows that the batch does not use itself."""
        for group, own, rows in zip(self._tables, request.ids, self.pending.groups, strict=True):
            ids = rows.ids[~np.isin(rows.ids, np.concatenate(own))] if own else rows.ids
            self._before += [(table, ids, *_read(table, ids)) for table in group if len(ids)]
        return self.pending.added_to(request)

    def came(self, leaves: Sequence[Sequence[RowParameter]], inverses: Sequence[Tensor]) -> None:
        """When the batch gets its first gradients, decide whether the pending gradients apply; if so, add them."""
        if self.counts is None:
            self.counts = self.pending.is_kept()
            if self.counts:
                self.pending.add_to(leaves, self.places(inverses))

    def places(self, inverses: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each group, the positions of the pending rows, whose ids come last in the batch's request."""
        groups = self.pending.groups
        return [at[len(at) - len(rows.ids) :] for at, rows in zip(inverses, groups, strict=True)]

    def wrote(self, table: Any, ids: Ids | None) -> None:
        """Make `end` restore the values that the program has just written to a table, not earlier ones.

        Args:
            table: The table.
            ids: The written rows, int32 or int64 [N]; None for all rows.
        """
        for number, (one, own, _, _) in enumerate(self._before):
            if one is table and (ids is None or np.isin(own, ids).any()):
                self._before[number] = (table, own, *_read(table, own))

    def end(self) -> None:
        """Restore the rows that this object has added to the batch, if their pending gradients were not applied.

        Call this after the batch's update, which has changed these rows.
        """
        if self.counts is None:
            return
        before, self._before = self._before, []
        if not self.counts and before:
            self._pipeline.write_back()
            for table, ids, block, row_slots in before:
                _write(table, ids, block, row_slots)
                if table.primitive_target == "CPU":
                    self._pipeline.reload(table, ids)
        self._done(self.pending)


def _read(table: Any, ids: Ids) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return rows' weights and optimizer state, [N, 1 + S, D], and per-row state, [N, R].

    All steps must have been applied to the table.
    """
    if table.primitive_target == "DEVICE":
        at = torch.from_numpy(ids).to(table.device)
        block, row_slots = (one.index_select(0, at).cpu().numpy() for one in table.memory)
        return block, row_slots
    slots = len(table.optimizer.slots), len(table.optimizer.row_slots)
    block = np.empty((len(ids), 1 + slots[0], table.dim), np.float32)
    row_slots = np.empty((len(ids), slots[1]), np.float32)
    table.read_now(ids, block, row_slots)
    return block, row_slots


def _write(table: Any, ids: Ids, block: npt.NDArray[np.float32], row_slots: npt.NDArray[np.float32]) -> None:
    """Overwrite rows with the result of `_read`."""
    if table.primitive_target == "CPU":
        table.write_now(ids, block, row_slots)
        return
    at = torch.from_numpy(ids).to(table.device)
    for memory, values in zip(table.memory, (block, row_slots), strict=True):
        memory.index_copy_(0, at, torch.from_numpy(values).to(table.device))


def take_step(pipeline: Any, pending: Pending, frozen: set[str]) -> None:
    """Update the tables with pending gradients alone."""
    request = pending.added_to(Request(None, 0, [[]] * len(pending.groups)))
    with pipeline.train([request]) as one:
        flight = one.take()
        leaves = []
        for group, part in zip(pipeline.groups, flight.groups, strict=True):
            pairs = zip(group.embeddings, part.values, strict=True)
            leaves.append(
                [RowParameter(one.table, values, None, trained=one.name not in frozen) for one, values in pairs]
            )
        pending.add_to(leaves, [part.inverse for part in flight.groups])
        grads = [[leaf.take_grad() for leaf in group] for group in leaves]
        flat = zip(chain(*grads), chain(*leaves), strict=True)
        found = [(grad, leaf.table) for grad, leaf in flat if grad is not None]
        flags = Flags(pipeline.staging.device)
        flags.check(*zip(*found, strict=True))
        if flags.stop.item():
            raise NonFiniteError(
                "the gradients of rows that an earlier loop left for this step are not finite, or too large for the "
                "table's optimizer; no row was updated. Look at the loss before backward(), or use a smaller learning "
                "rate"
            )
        one.finish(flight, Gradients(grads))
        del flight
        assert one.take() is None
