"""Gradients of rows that wait for a step, after a loop was left between `backward` and the optimizer's step.

The dense side keeps such gradients in its parameters' `.grad`: they count in its next step, unless `zero_grad` is
called before. Those of the rows count in the same one. The next loop gives its first batch their rows, too, alone in
the pipeline, and when that batch's first gradients come, it is seen whether the dense side still has those of before.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from hostdev.device.rows import GroupUses
from hostdev.kernels.pool import run_tasks
from hostdev.pipeline.flight import Flight, Gradients, Request
from hostdev.runtime import scaling
from hostdev.runtime.finite import Flags, NonFiniteError
from hostdev.runtime.row_parameter import RowParameter
from hostdev.runtime.waiting import first_parameter

Ids = npt.NDArray[Any]


class GroupGradients(NamedTuple):
    """Gradients of some rows of a group's tables."""

    ids: Ids  # int32 or int64 [P], unique
    grads: list[Tensor | None]  # of each table, float32 [P, D] on the device


class _Held(NamedTuple):
    """A gradient of the dense side, of the same batches."""

    optimizer: Optimizer
    parameter: Tensor
    grad: Tensor
    version: int  # torch's count of the writes to it; -1: it is 0 as it is

    def is_gone(self) -> bool:
        """Tell whether `zero_grad` has taken it away, or, with `set_to_none=False`, has made it 0."""
        return self.parameter.grad is not self.grad or (
            self.version not in (-1, self.grad._version) and not self.grad.any()
        )


class Pending:
    """Gradients that have come to rows in batches that no step was taken with.

    groups      of tables, as the runtime has them
    optimizers  of the dense side, which wait with the same batches' gradients; none: the loop has none
    apply       takes the step for these gradients alone
    scaler      has multiplied the losses; it divides these gradients when it divides those of the dense side
    """

    def __init__(
        self, groups: Sequence[GroupGradients], optimizers: Iterable[Optimizer], apply: Callable[["Pending"], None],
        scaler: Any = None,
    ) -> None:  # fmt: skip
        self.groups = groups
        self._held = [
            _Held(optimizer, found, found.grad, found.grad._version if found.grad.any() else -1)
            for optimizer in optimizers
            if (found := first_parameter(optimizer)) is not None and found.grad is not None
        ]  # fmt: skip
        self._apply, self._scaler = apply, scaler
        self._dropped = False
        self.thread = threading.get_ident()

    def is_kept(self) -> bool:
        """Tell whether the dense side still has its gradients of the same batches."""
        if any(one.is_gone() for one in self._held):
            self._dropped = True
        return not self._dropped

    def drop(self) -> None:
        """Forget them."""
        self._dropped = True

    def added_to(self, request: Request) -> Request:
        """Return a request for these rows, too."""
        ids = [
            [*own, rows.ids.astype(own[0].dtype if own else rows.ids.dtype, copy=False)]
            for own, rows in zip(request.ids, self.groups, strict=True)
        ]
        return request._replace(ids=ids)

    def add_to(self, leaves: Sequence[Sequence[RowParameter]], places: Sequence[Tensor]) -> None:
        """Add the gradients to those of rows which have been requested with them.

        places  of each group, int32 [P]: where its rows are among the leaves'
        """
        for rows, group, at in zip(self.groups, leaves, places, strict=True):
            for grad, leaf in zip(rows.grads, group, strict=True):
                if grad is not None and leaf.trained:
                    leaf.add_grad(torch.zeros_like(leaf.rows, requires_grad=False).index_copy_(0, at.long(), grad))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The dense optimizers that have gradients of the same batches."""
        return [one.optimizer for one in self._held]

    def stepped(self, optimizer: Optimizer) -> None:
        """Apply the gradients with the step that a dense optimizer takes after the loop; see `scaling.Waiting`."""
        if threading.get_ident() == self.thread and self.is_kept():
            self._apply(self)

    def is_scaled(self) -> bool:
        """Tell whether the gradients are of scaled losses; see `scaling.Waiting`."""
        return self._scaler is not None

    def unscale(self, scaler: Any) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scale that the scaler has now, as it does those of the dense side."""
        if scaler is not self._scaler or not self.is_kept():
            return {}
        self._scaler = None
        found: dict[torch.device, Tensor] = {}
        for grad in [grad for rows in self.groups for grad in rows.grads if grad is not None]:
            wrong = found.setdefault(grad.device, torch.zeros((), device=grad.device))
            factor = torch.full_like(wrong, scaling.inverse(scaler.get_scale()))
            torch._amp_foreach_non_finite_check_and_unscale_([grad], wrong, factor)
        return found


def gradients_left(
    flight: Flight,
    leaves: Sequence[Sequence[RowParameter]],
    uses: Sequence[Sequence[GroupUses]],
    more: Sequence[Tensor] | None,
) -> list[GroupGradients]:
    """Take the gradients of a batch that is given up.

    uses  of each of its batches that was given out, of each group; rows that no such batch uses are left out
    more  of each group, further places of rows that have gradients
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
        left.append(GroupGradients(
            part.ids[chosen], [None if grad is None else grad.index_select(0, at.to(grad.device)) for grad in grads]
        ))  # fmt: skip
    return left


class FirstBatch:
    """The first batch after a loop was left, which has the rows of what is pending, too.

    What the rows are is kept until it is known whether the pending gradients count: if not, the batch must not have
    changed them, but an optimizer changes a row whose gradient is 0.
    """

    def __init__(
        self, pending: Pending, tables: Sequence[Sequence[Any]], pipeline: Any, done: Callable[[Pending], None]
    ) -> None:
        self.pending, self._tables, self._pipeline, self._done = pending, tables, pipeline, done
        self.counts: bool | None = None  # None: no gradient has come
        self._before: list[tuple[Any, Ids, Any, Any]] = []

    def request(self, request: Request) -> Request:
        """Return a request for the pending rows, too, after their values have been kept."""
        for group, own, rows in zip(self._tables, request.ids, self.pending.groups, strict=True):
            ids = rows.ids[~np.isin(rows.ids, np.concatenate(own))] if own else rows.ids
            self._before += [(table, ids, *_read(table, ids)) for table in group if len(ids)]
        return self.pending.added_to(request)

    def came(self, leaves: Sequence[Sequence[RowParameter]], inverses: Sequence[Tensor]) -> None:
        """Decide, when the batch's first gradients have come, and add the pending ones to them if they count."""
        if self.counts is None:
            self.counts = self.pending.is_kept()
            if self.counts:
                self.pending.add_to(leaves, self.places(inverses))

    def places(self, inverses: Sequence[Tensor]) -> list[Tensor]:
        """Return where the pending rows are among the batch's: at the end of each group's places of ids."""
        groups = self.pending.groups
        return [at[len(at) - len(rows.ids) :] for at, rows in zip(inverses, groups, strict=True)]

    def wrote(self, table: Any, ids: Ids | None) -> None:
        """Keep what somebody has written to rows as what they are to be; None for all of the table's.

        ids  int32 or int64 [N]
        """
        for number, (one, own, _, _) in enumerate(self._before):
            if one is table and (ids is None or np.isin(own, ids).any()):
                self._before[number] = (table, own, *_read(table, own))

    def end(self) -> None:
        """Let rows that were not to change have their values again; after the batch's update."""
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
    """Return rows with their slots, [N, 1 + S, D] and [N, R]; for the table's loop, which has brought it up to date."""
    if table.primitive_target == "DEVICE":
        at = torch.from_numpy(ids).to(table.device)
        block, row_slots = (one.index_select(0, at).cpu().numpy() for one in table.memory)
        return block, row_slots
    slots = len(table.optimizer.slots), len(table.optimizer.row_slots)
    block = np.empty((len(ids), 1 + slots[0], table.dim), np.float32)
    row_slots = np.empty((len(ids), slots[1]), np.float32)
    run_tasks(table.read_rows_tasks(ids, block, row_slots))
    return block, row_slots


def _write(table: Any, ids: Ids, block: npt.NDArray[np.float32], row_slots: npt.NDArray[np.float32]) -> None:
    """Overwrite rows with what `_read` returned of them."""
    if table.primitive_target == "CPU":
        run_tasks(table.write_rows_tasks(ids, block, row_slots))
        return
    at = torch.from_numpy(ids).to(table.device)
    for memory, values in zip(table.memory, (block, row_slots), strict=True):
        memory.index_copy_(0, at, torch.from_numpy(values).to(table.device))


def take_step(pipeline: Any, pending: Pending, frozen: set[str]) -> None:
    """Update the tables with pending gradients alone."""
    request = pending.added_to(Request(None, 0, [[]] * len(pending.groups)))
    with pipeline.train([request]) as one:
        flight = one.take()
        leaves = [
            [RowParameter(embedding.table, values, None, trained=embedding.name not in frozen)
             for embedding, values in zip(group.embeddings, part.values, strict=True)]
            for group, part in zip(pipeline.groups, flight.groups, strict=True)
        ]  # fmt: skip
        pending.add_to(leaves, [part.inverse for part in flight.groups])
        grads = [[leaf.take_grad() for leaf in group] for group in leaves]
        come = [(grad, leaf.table) for taken, group in zip(grads, leaves, strict=True)
                for grad, leaf in zip(taken, group, strict=True) if grad is not None]  # fmt: skip
        flags = Flags(pipeline.staging.device)
        flags.check(*zip(*come, strict=True))
        if flags.stop.item():
            raise NonFiniteError("gradients of the rows that a loop was left with are not finite; no row was updated")
        one.finish(flight, Gradients(grads))
        del flight
        assert one.take() is None
