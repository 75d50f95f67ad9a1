"""One batch's rows of a host table on their way: looked up, sent to the device, updated, brought back."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.cache.planner import Plan
from hostdev.cache.slots import DeviceSlots, Places
from hostdev.core.memory import copied_bytes, row_bytes
from hostdev.core.table_dtypes import TableStep
from hostdev.device.pinned import Slab
from hostdev.device.staging import Staging
from hostdev.host.table import HostTable
from hostdev.kernels.pool import Task, run_tasks
from hostdev.pipeline.groups import Embedding, Group, Part


class Late(NamedTuple):
    """Rows that are looked up late: what there is to do on the host, and then the way to the device."""

    tasks: list[Task]
    send: Callable[[], None]


class BatchRows:
    """One batch's unique rows of a host table: fetched in parts, sent to the device, updated in parts.

    Those that pass the cache by, all of them without one, are looked up and updated on the host. Those that it admits
    come with their slots; those that it evicts go back with theirs. What there is to do on the host is returned as
    tasks, so that it can be done for all tables at once.

    unique  U, the number of unique ids
    memory  of the batch, from which and to which copies go
    plan    the cache's, if there is one
    places  its slots on the device
    mark    of their sending
    """

    def __init__(
        self,
        embedding: Embedding,
        unique: int,
        staging: Staging,
        memory: Slab,
        plan: Plan | None = None,
        places: Places | None = None,
        mark: Any = None,
    ) -> None:
        assert isinstance(embedding.table, HostTable)
        self.embedding = embedding
        self._table = table = embedding.table
        self._staging, self._memory = staging, memory
        self._places = places
        self.passed = unique if plan is None else len(plan.passed)  # rows that pass by
        self._leaving = 0 if plan is None else len(plan.evicted)
        self._lookup, self._update = embedding.lookup.in_parts(), embedding.update.in_parts()
        if plan is not None:
            self._admit, self._evict = embedding.cache_admit.in_parts(), embedding.cache_evict.in_parts()
        optimizer = table.optimizer
        self._host = [memory.buffer(self.passed, table.dim)]  # weights, then the admitted rows' block and row slots
        if plan is not None:
            self._host.append(memory.buffer(len(plan.admitted), 1 + len(optimizer.slots), table.dim))
            self._host.append(memory.buffer(len(plan.admitted), len(optimizer.row_slots)))
        self._sent = self._host  # the same on the device
        self._marks: list[Any] = [mark] if mark is not None else []  # in the staging's stream
        self._step: TableStep | None = None  # None: the table takes no step with this batch
        self._received: list[Tensor | None] = []  # gradients of what passed, then the evicted rows' block and row slots
        self._first: Tensor | None = None  # gradients of the part that is updated first, where they came before
        self._evicted: tuple[list[Tensor], Any] = ([], None)  # the latter two, where they are, and a mark to wait for

    def fetch(self, part: Part) -> list[Task]:
        """Return what looks rows up, for `send`.

        part  of the ids that pass by and then those that are admitted, in one row
        """
        passed, admitted = part.split(self.passed)
        return self._look_up(passed, self._host[0]) + self._read(admitted, *self._host[1:])

    def send(self) -> None:
        """Send the rows; others, and those that may have changed since, are to follow by `fetch_late`."""
        self._sent, mark = self._staging.send(self._host, self._memory)
        self._marks.append(mark)

    def fetch_late(self, part: Part) -> Late:
        """Return what looks up and sends rows that had to wait; after `send`."""
        if not self._staging.copies or self._sent is self._host:
            return Late(self.fetch(part), lambda: None)
        late, whole = part.split(self.passed)
        sizes = [len(late), len(whole), len(whole)]
        values = [self._memory.buffer(n, *host.shape[1:]) for n, host in zip(sizes, self._host, strict=False)]
        tasks = self._look_up(Part(late.ids, None), values[0]) + self._read(Part(whole.ids, None), *values[1:])

        def send() -> None:
            for positions, rows, new in zip((late, whole, whole), self._sent, values, strict=False):
                assert positions.positions is not None
                if new.numel():
                    self._marks.append(self._staging.patch(rows, positions.positions, new, self._memory))

        return Late(tasks, send)

    def reload(self, part: Part) -> None:
        """Look rows up again that have been looked up, as somebody has written them since; before `arrived`."""
        late = self.fetch_late(part)
        run_tasks(late.tasks)
        late.send()

    def reload_in_step(self, part: Part) -> None:
        """Read the rows again that the cache admits with this batch, after `arrived` and before `leave`.

        Those that bypass it are updated on the host, where they have been written.
        """
        if self._places is None:
            return
        _, admitted = part.split(self.passed)
        if len(admitted):
            values = [rows.new_empty((len(admitted), *rows.shape[1:]), device="cpu") for rows in self._sent[1:]]
            block, row_slots = (value.numpy() for value in values)
            run_tasks(self._table.read_rows_tasks(admitted.ids, block, row_slots))
            assert admitted.positions is not None
            at = torch.from_numpy(admitted.positions)
            for rows, value in zip(self._sent[1:], values, strict=True):
                rows.index_copy_(0, at.to(rows.device, torch.int64), value.to(rows.device))

    def _look_up(self, part: Part, out: Tensor) -> list[Task]:
        return self._lookup.tasks(self._table, part.ids, out.numpy(), part.positions)

    def _read(self, part: Part, *out: Tensor) -> list[Task]:
        if not len(part):
            return []
        block, row_slots = out
        return self._admit.tasks(self._table, part.ids, block.numpy(), row_slots.numpy(), part.positions)

    def arrived(self) -> Tensor:
        """Return the rows, float32 [U, D] on the device, whose current stream waits for them; nothing is to follow.

        They lie in the order of the ids, or with a cache in that of its plan.
        """
        self._lookup.end()
        if self._places is not None:
            self._admit.end()
        places = self._places.tensors if self._places is not None else []
        self._staging.await_sent(self._marks, [*self._sent, *places])
        self._host = []
        if self._places is None:
            return self._sent[0]
        rows: Tensor = self.embedding.cache_lookup(self._places, *self._sent[:2])
        self._sent = [rows.new_empty(0), *self._sent[1:]]  # what was sent of the others is in `rows` now
        return rows

    @property
    def host(self) -> npt.NDArray[Any]:
        """The rows that pass by, in host memory, float32 [U, D]; late ones are missing until they come."""
        found: npt.NDArray[Any] = self._host[0].numpy()
        return found

    def begin_step(self) -> None:
        """Count the step."""
        self._step = self._table.begin_step()
        self.embedding.begun += 1

    def update_cached(self, grads: Tensor, skip: Tensor | None) -> None:
        """Count the step, and update the rows that are on the device; grads float32 [U, D], skip as in `Ops.update`."""
        self.begin_step()
        if self._places is not None:
            self.embedding.cache_update(self._places, grads, *self._sent[1:], self._step, skip)

    @property
    def admitted(self) -> Tensor:
        """The rows that the cache admits, with their slots, float32 [A, 1 + S, D], until `leave`."""
        return self._sent[1]

    def leave(self, grads: Tensor | None) -> list[Tensor | None]:
        """Exchange rows on the device; return what the host is to receive, for `update`."""
        if self._places is None:
            return [grads]
        passed = None if grads is None else self.embedding.cache_passed(self._places, grads)
        exchange = self.embedding.cache_exchange  # last: from here on it has happened
        self._evicted = list(exchange(self._places, self._leaving, *self._sent[1:])), None
        self._sent = []
        return [passed, *self._evicted[0]]

    def receive(self, tensors: Sequence[Tensor | None], mark: Any, first: Tensor | None = None) -> None:
        """Take in what `leave` returned, in host memory when the device has passed a mark.

        mark   of the evicted rows
        first  gradients of the part that is updated first, those that passed by
        """
        self._received, self._first = list(tensors), first
        self._evicted = [tensor for tensor in tensors[1:] if tensor is not None], mark
        self._sent = []

    def bring_back(self, evicted: npt.NDArray[Any]) -> None:
        """Write the rows that left the cache to the host, where an error keeps the update from coming to it.

        evicted  [E], their ids
        """
        values, mark = self._evicted
        self._staging.await_mark(mark)
        block, row_slots = (tensor.cpu().numpy() for tensor in values)
        self.embedding.cache_evict(self._table, evicted, block, row_slots)

    def update(self, part: Part, *, first: bool = False) -> list[Task]:
        """Return what updates rows with their gradients, and writes evicted ones back; all parts are one step.

        part   of the ids that passed by and then those that are evicted, in one row
        first  it is the one whose gradients came before
        """
        passed, evicted = part.split(self.passed)
        tasks: list[Task] = []
        if self._step is not None:
            grads, positions = self._received[0], passed.positions
            if first and self._first is not None:
                grads, positions = self._first, None
            assert grads is not None
            tasks += self._update.tasks(self._table, passed.ids, grads.numpy(), self._step, positions)
        if len(evicted):
            block, row_slots = self._evicted[0]
            values = block.numpy(), row_slots.numpy()
            tasks += self._evict.tasks(self._table, evicted.ids, *values, evicted.positions)
        return tasks

    def updated(self) -> None:
        """Report the update's time, and that of the rows written back."""
        if self._step is not None:
            self._update.end()
        if self._places is not None:
            self._evict.end()


def rows_of(group: Group, unique: int, plan: Plan | None, staging: Staging, memory: Slab) -> list[BatchRows]:
    """Return a batch's rows in each table of a group: of so many unique ids, by the plan of its cache if it has one."""
    if plan is None:
        return [BatchRows(embedding, unique, staging, memory) for embedding in group.embeddings]
    places, mark = staging.send(Places.of(plan, group.row_ids(plan)).tensors, memory)
    return [BatchRows(part, unique, staging, memory, plan, Places(*places), mark) for part in group.embeddings]


def fetch_late(rows: Sequence[tuple[BatchRows, Part]]) -> None:
    """Look up and send rows of several tables that had to wait."""
    late = [table.fetch_late(part) for table, part in rows if len(part)]
    run_tasks([task for one in late for task in one.tasks])
    for one in late:
        one.send()


def receive_rows(
    rows: Sequence[tuple[BatchRows, list[Tensor | None], Part | None]], staging: Staging, memory: Slab
) -> tuple[Any, Any]:
    """Let what leaves the device come to the host.

    rows     of each table, what `BatchRows.leave` returned, and of its ids those that are updated first, as another
             batch waits for them: they come before the rest
    returns  a mark for those, and one for all, in the same stream
    """
    grads = [leaving[0] for _, leaving, _ in rows]
    others = [tensor for _, leaving, _ in rows for tensor in leaving[1:] if tensor is not None]
    wanted: list[tuple[Tensor, npt.NDArray[Any]]] = []
    picking: list[int] = []
    positions: dict[int, Any] = {}  # a group's tables share them
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


def bytes_of(group: Group, unique: int, plan: Plan | None, uses: int) -> int:
    """Return what the copies of a batch need of the host's memory; a little more or less does not matter."""
    passing, whole = row_bytes((part.table.dim, part.table.optimizer) for part in group.embeddings)
    if not group.on_host:
        return copied_bytes(0, 0, uses, passing, whole)
    if plan is None:
        return copied_bytes(unique, 0, uses, passing, whole)
    return copied_bytes(len(plan.passed), len(plan.admitted) + len(plan.evicted), uses, passing, whole)


def on_device(
    plan: Plan, slots: Sequence[DeviceSlots], rows: Sequence[BatchRows]
) -> Iterator[tuple[npt.NDArray[Any], list[tuple[Tensor, Tensor]]]]:
    """Yield ids whose rows are on the device until `leave`, and of each table where: memory [any, 1 + S, D], places."""
    at = torch.from_numpy(plan.hit_slots)
    yield plan.ids[plan.hits], [(held.block, at) for held in slots]
    new = torch.arange(len(plan.admitted))
    yield plan.ids[plan.admitted], [(part.admitted, new) for part in rows]
