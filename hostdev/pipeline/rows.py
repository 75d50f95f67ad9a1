"""A batch's rows of a host table, which are looked up, sent to the device, updated and written back.

S: number of optimizer state columns of D values per row.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.cache.plan import Plan
from hostdev.cache.slots import DeviceSlots, Places
from hostdev.core.memory import copied_bytes, row_bytes
from hostdev.core.primitive import PartialCall
from hostdev.core.table_dtypes import TableStep
from hostdev.device.staging import PinnedBuffer, Staging
from hostdev.host.table import HostTable
from hostdev.kernels.pool import Task, run_tasks
from hostdev.pipeline.batch_ids import ConcatenatedIds, Embedding, Group, RowSubset
from hostdev.pipeline.forwarding import ForwardedRows

_NONE = RowSubset(np.empty(0, np.int32), None)


class LateLookup(NamedTuple):
    """A lookup of rows that had to wait for an update: first `tasks` run on the host, then `send` copies the rows."""

    tasks: list[Task]
    send: Callable[[], None]


class BatchRows:
    """A batch's unique rows of a host table: fetched in parts, sent to the device, updated in parts.

    Rows that bypass the cache (without a cache, all rows) are looked up and updated on the host. Admitted rows are
    read, and evicted rows are written, with their optimizer state. Methods return the work on the host as tasks, so
    that the tasks of all tables run at once.

    Args:
        embedding: The table and its ops.
        unique: U, the number of unique ids.
        staging: Copies between host and device.
        memory: The batch's host memory, for its copies.
        plan: The cache's plan, if there is a cache.
        places: The cache's slots for the plan's rows, on the device.
        mark: The event of the copy of `places` to the device.

    Attributes:
        step: The table's step, set by `begin_step`; None if the table takes no step with this batch.
    """

    def __init__(
        self,
        embedding: Embedding,
        unique: int,
        staging: Staging,
        memory: PinnedBuffer,
        plan: Plan | None = None,
        places: Places | None = None,
        mark: Any = None,
    ) -> None:
        assert isinstance(embedding.table, HostTable)
        self.embedding = embedding
        self._table = table = embedding.table
        self._staging, self._memory = staging, memory
        self._places = places
        self.passed = unique if plan is None else len(plan.passed)  # number of rows that bypass the cache
        self._leaving = 0 if plan is None else len(plan.evicted)
        self._lookup, self._update = PartialCall(embedding.lookup), PartialCall(embedding.update)
        if plan is not None:
            self._admit, self._evict = PartialCall(embedding.cache_admit), PartialCall(embedding.cache_evict)
        optimizer = table.optimizer
        self._host = [
            memory.buffer(self.passed, table.fetched_width)
        ]  # bypassing rows, then the admitted rows' block and per-row state
        if plan is not None:
            self._host.append(memory.buffer(len(plan.admitted), 1 + len(optimizer.slots), table.dim))
            self._host.append(memory.buffer(len(plan.admitted), len(optimizer.row_slots)))
        self._sent = self._host  # the tensors of `_host`, on the device once they are sent
        self._marks: list[Any] = [mark] if mark is not None else []  # events in the staging's stream
        self.step: TableStep | None = None
        self._received: list[Tensor | None] = []  # bypassing rows' gradients, evicted rows' block and per-row state
        self._first: Tensor | None = None  # gradients of the rows to update first, if received first
        self._evicted: tuple[list[Tensor], Any] = ([], None)  # the evicted rows and their event

    def _split(self, subset: RowSubset) -> tuple[RowSubset, RowSubset]:
        """Split rows into the rows that bypass the cache and the rows that the cache admits or evicts."""
        return (subset, _NONE) if self._places is None else subset.split(self.passed)

    def fetch(self, subset: RowSubset, out: Sequence[Tensor] | None = None) -> list[Task]:
        """Return tasks that look up rows into the memory that `send` copies, or into `out` in the subset's order.

        `subset` selects from the bypassing ids followed by the admitted ids.
        """
        passed, admitted = self._split(subset)
        to, at = (self._host, (passed.positions, admitted.positions)) if out is None else (out, (None, None))
        tasks = self._lookup.tasks(self._table, passed.ids, to[0].numpy(), at[0])
        if len(admitted.ids):
            tasks = tasks + self._admit.tasks(self._table, admitted.ids, to[1].numpy(), to[2].numpy(), at[1])
        return tasks

    def send(self) -> None:
        """Send the rows to the device. `fetch_late` later replaces rows that are missing or have changed."""
        if not self._staging.copies:
            return
        self._sent, mark = self._staging.send(self._host, self._memory)
        self._marks.append(mark)

    def fetch_late(self, subset: RowSubset) -> LateLookup:
        """Return a lookup of rows that had to wait; its `send` copies them if this object's `send` has already run."""
        if not self._staging.copies or self._sent is self._host:
            return LateLookup(self.fetch(subset), lambda: None)
        passed, whole = self._split(subset)
        sizes = [len(passed), len(whole), len(whole)]
        values = [self._memory.buffer(n, *host.shape[1:]) for n, host in zip(sizes, self._host, strict=False)]
        tasks = self.fetch(subset, values)

        def send() -> None:
            for positions, rows, new in zip((passed, whole, whole), self._sent, values, strict=False):
                assert positions.positions is not None
                if new.numel():
                    self._marks.append(self._staging.patch(rows, positions.positions, new, self._memory))

        return LateLookup(tasks, send)

    def reload(self, subset: RowSubset) -> None:
        """Look rows up again after they were written; this is possible until `arrived`."""
        late = self.fetch_late(subset)
        run_tasks(late.tasks)
        late.send()

    def reload_in_step(self, subset: RowSubset) -> None:
        """Read admitted rows again, after `arrived` and before `leave`.

        Bypassing rows are updated on the host, which already has the written values.
        """
        if self._places is None:
            return
        _, admitted = self._split(subset)
        if len(admitted):
            values = [rows.new_empty((len(admitted), *rows.shape[1:]), device="cpu") for rows in self._sent[1:]]
            block, row_slots = (value.numpy() for value in values)
            run_tasks(self._table.read_rows_tasks(admitted.ids, block, row_slots))
            assert admitted.positions is not None
            at = torch.from_numpy(admitted.positions)
            for rows, value in zip(self._sent[1:], values, strict=True):
                rows.index_copy_(0, at.to(rows.device, torch.int64), value.to(rows.device))

    def arrived(self) -> Tensor:
        """Return all rows on the device, whose current stream waits for the copies; all rows must have been sent.

        The rows are weights, float32 [U, D], or packed rows for `Embedding.current`, in the order of the ids or, with a
        cache, in the order of its plan.
        """
        self._lookup.end()
        if self._places is not None:
            self._admit.end()
        if self._staging.copies:
            places = self._places.tensors if self._places is not None else []
            self._staging.await_sent(self._marks, [*self._sent, *places])
        self._host = []
        if self._places is None:
            return self._sent[0]
        rows: Tensor = self.embedding.cache_lookup(self._places, *self._sent)
        self._sent = [rows.new_empty(0), *self._sent[1:]]  # `rows` now has the bypassing rows
        return rows

    @property
    def host(self) -> npt.NDArray[Any]:
        """The M rows that bypass the cache, on the host, float32 [M, D] or packed. Conflicting rows may be missing."""
        found: npt.NDArray[Any] = self._host[0].numpy()
        return found

    def begin_step(self) -> None:
        """Begin and count a step of the table, to which the next `update` belongs."""
        self.step = self._table.begin_step()
        self.embedding.begun += 1

    def update_cached(self, grads: Tensor, skip: Tensor | None) -> None:
        """Begin a step, and update the rows in the cache, if there is one.

        Args:
            grads: Gradients of the rows, float32 [U, D].
            skip: float32 [] on the device; 0 if rows may change, otherwise no row may change. None means 0.
        """
        self.begin_step()
        if self._places is not None:
            self.embedding.cache_update(self._places, grads, *self._sent[1:], self.step, skip)

    @property
    def admitted(self) -> Tensor:
        """The rows that the cache admits, with their optimizer state, float32 [A, 1 + S, D], until `leave`."""
        return self._sent[1]

    def leave(self, grads: Tensor | None) -> list[Tensor | None]:
        """Replace evicted rows by admitted rows in the cache; return the tensors that the host needs for `update`."""
        if self._places is None:
            return [grads]
        passed = None if grads is None else self.embedding.cache_passed(self._places, grads)
        exchange = self.embedding.cache_exchange  # called last, so that an earlier error leaves the cache unchanged
        self._evicted = list(exchange(self._places, self._leaving, *self._sent[1:])), None
        self._sent = []
        return [passed, *self._evicted[0]]

    def receive(self, tensors: Sequence[Tensor | None], mark: Any, first: Tensor | None = None) -> None:
        """Store the host's copies of the tensors that `leave` returned.

        Args:
            tensors: The copies, in the order of `leave`.
            mark: The event after which the evicted rows are on the host; None if they already are.
            first: Gradients of the bypassing rows that are updated first.
        """
        self._received, self._first = list(tensors), first
        self._evicted = [tensor for tensor in tensors[1:] if tensor is not None], mark
        self._sent = []

    def bring_back(self, evicted: npt.NDArray[Any]) -> None:
        """Write the evicted rows to the host table. Called with their ids [E] if an error prevents the update."""
        values, mark = self._evicted
        self._staging.await_event(mark)
        block, row_slots = (tensor.cpu().numpy() for tensor in values)
        self.embedding.cache_evict(self._table, evicted, block, row_slots)

    def update(self, subset: RowSubset, *, first: bool = False) -> list[Task]:
        """Return tasks that update rows with their gradients and write evicted rows back. All calls belong to one step.

        Args:
            subset: Selects from the bypassing ids followed by the evicted ids.
            first: Whether this is the subset whose gradients were received first.
        """
        passed, evicted = self._split(subset)
        tasks: list[Task] = []
        if self.step is not None:
            grads, positions = self._received[0], passed.positions
            if first and self._first is not None:
                grads, positions = self._first, None
            assert grads is not None
            tasks += self._update.tasks(self._table, passed.ids, grads.numpy(), self.step, positions)
        if len(evicted.ids):
            block, row_slots = self._evicted[0]
            values = block.numpy(), row_slots.numpy()
            tasks += self._evict.tasks(self._table, evicted.ids, *values, evicted.positions)
        return tasks

    def updated(self) -> None:
        """Report the durations of the update and of the write-back, whose tasks have all run."""
        if self.step is not None:
            self._update.end()
        if self._places is not None:
            self._evict.end()


class FetchedRows(NamedTuple):
    """A batch's rows of all tables on the host."""

    ids: ConcatenatedIds  # the rows that are read
    groups: list[list[BatchRows]]  # by group, by table; `stages.update.release` empties the lists
    forwarded: list[ForwardedRows | None]  # by group, the rows that the previous step forwards; empty if there are none


def make_rows(group: Group, unique: int, plan: Plan | None, staging: Staging, memory: PinnedBuffer) -> list[BatchRows]:
    """Return a batch's rows in each table of a group.

    Args:
        group: The tables, on the host.
        unique: U, the number of unique ids.
        plan: The plan, if the group has a cache.
        staging: Copies between host and device.
        memory: The batch's host memory.
    """
    if plan is None:
        return [BatchRows(embedding, unique, staging, memory) for embedding in group.embeddings]
    row_ids = group.row_ids(plan.cached) if group.rounds else None
    places, mark = staging.send(Places.of(plan, row_ids).tensors, memory)
    return [BatchRows(one, unique, staging, memory, plan, Places(*places), mark) for one in group.embeddings]


def fetch_late(rows: Sequence[tuple[BatchRows, RowSubset]]) -> None:
    """Look up rows of several tables that had to wait for an update, and send them to the device."""
    late = [table.fetch_late(subset) for table, subset in rows if len(subset)]
    run_tasks([task for one in late for task in one.tasks])
    for one in late:
        one.send()


def receive_rows(
    rows: Sequence[tuple[BatchRows, list[Tensor | None], RowSubset | None]], staging: Staging, memory: PinnedBuffer
) -> tuple[Any, Any]:
    """Copy tensors from the device to the host.

    Args:
        rows: For each table: its rows, the tensors that `leave` returned, and the ids for which another batch waits.
            The gradients of these ids are copied before the rest.
        staging: Copies to the host.
        memory: The batch's host memory.

    Returns:
        The event after which the tensors copied first have arrived, and the event after which all have.
    """
    grads = [leaving[0] for _, leaving, _ in rows]
    others = [tensor for _, leaving, _ in rows for tensor in leaving[1:] if tensor is not None]
    wanted: list[tuple[Tensor, npt.NDArray[Any]]] = []
    picking: list[int] = []
    positions: dict[int, Any] = {}  # shared by a group's tables
    for number, ((table, _, first), grad) in enumerate(zip(rows, grads, strict=True)):
        if first is None or grad is None or not staging.copies:
            continue
        at = positions.setdefault(id(first), first.split(table.passed)[0].positions)
        if at is not None and len(at):
            wanted.append((grad, at))
            picking.append(number)
    picked = staging.pick(wanted, memory) if wanted else []
    early, mark = staging.receive([*picked, *others], memory) if picked or others else ([], None)
    received, last = staging.receive([grad for grad in grads if grad is not None], memory)
    mark = mark or last
    firsts = dict(zip(picking, early, strict=False))
    evicted, received = early[len(picked) :], list(received)
    for number, (table, leaving, _) in enumerate(rows):
        mine: list[Tensor | None] = [None if leaving[0] is None else received.pop(0)]
        mine += [evicted.pop(0) for _ in leaving[1:]]
        table.receive(mine, mark, firsts.get(number))
    return mark, last


def count_bytes(group: Group, unique: int, plan: Plan | None, uses: int) -> int:
    """Estimate the bytes of host memory that the copies of a batch's rows in a group need."""
    passing, whole = row_bytes((part.table.dim, part.table.optimizer) for part in group.embeddings)
    if group.late:
        passing = whole
    if not group.on_host:
        return copied_bytes(0, 0, uses, passing, whole)
    if plan is None:
        return copied_bytes(unique, 0, uses, passing, whole)
    return copied_bytes(len(plan.passed), len(plan.admitted) + len(plan.evicted), uses, passing, whole)


def find_on_device(
    plan: Plan, slots: Sequence[DeviceSlots], rows: Sequence[BatchRows]
) -> Iterator[tuple[npt.NDArray[Any], list[tuple[Tensor, Tensor]]]]:
    """Yield ids of rows that are on the device before `leave`, and for each table, their memory and positions in it."""
    at = torch.from_numpy(plan.hit_slots)
    yield plan.ids[plan.hits], [(held.block, at) for held in slots]
    new = torch.arange(len(plan.admitted))
    yield plan.ids[plan.admitted], [(one.admitted, new) for one in rows]
