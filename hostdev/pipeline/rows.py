"""A table and the ops that work on it, wherever it is placed, and one batch's rows on their way through them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.cache.planner import Plan
from hostdev.cache.slots import DeviceSlots, Places
from hostdev.core.memory import copied_bytes, row_bytes
from hostdev.core.primitive import UPDATES, EmbeddingLookup, OpLog, Primitive
from hostdev.device.pinned import Slab
from hostdev.device.staging import Staging
from hostdev.device.table import DeviceTable
from hostdev.host.table import HostTable

Positions = npt.NDArray[np.int32]


class Embedding:
    """A table with its lookup and its update, which run where it lies: on the host, or all on the device."""

    def __init__(self, table: HostTable | DeviceTable, log: OpLog | None = None) -> None:
        self.table = table
        self.name = table.name
        self.target = table.primitive_target
        update = UPDATES[table.optimizer.primitive]
        self.lookup = EmbeddingLookup(scope=self.name, log=log).add_prim_attr("primitive_target", self.target)
        self.update = update(scope=self.name, log=log).add_prim_attr("primitive_target", self.target)

    def use_cache(self, slots: DeviceSlots, log: OpLog | None = None) -> None:
        """Take hot rows from the device, where these slots hold them."""
        self.cache_lookup = Primitive("CacheLookup", slots.rows, scope=self.name, log=log)
        self.cache_update = Primitive("CacheUpdate", slots.update, scope=self.name, log=log)
        self.cache_passed = Primitive("CachePassed", slots.passed, scope=self.name, log=log)
        self.cache_exchange = Primitive("CacheExchange", slots.exchange, scope=self.name, log=log)


class Part(NamedTuple):
    """Some of a batch's ids."""

    ids: npt.NDArray[Any]  # int32 or int64 [any], unique
    positions: Positions | None  # [any], of the ids among all of the batch's, ascending; None: all of these

    @classmethod
    def of(cls, ids: npt.NDArray[Any], positions: Positions | None) -> "Part":
        """Some of all these ids."""
        return cls(ids if positions is None else ids[positions], positions)

    def split(self, at: int) -> tuple["Part", "Part"]:
        """Return those whose positions are below `at`, and the others with positions from there on."""
        if self.positions is None:
            return Part(self.ids[:at], None), Part(self.ids[at:], None)
        edge = int(np.searchsorted(self.positions, at))
        low, high = self.positions[:edge], self.positions[edge:] - np.int32(at)
        return Part(self.ids[:edge], low), Part(self.ids[edge:], high)

    def __len__(self) -> int:
        return len(self.ids)


class BatchRows:
    """One batch's unique rows of a host table: fetched in parts, sent to the device, updated in parts.

    Those that pass the cache by, all of them without one, are looked up and updated on the host. Those that it admits
    come with their slots; those that it evicts go back with theirs.

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
        self._embedding = embedding
        self._table = table = embedding.table
        self._staging, self._memory = staging, memory
        self._places = places
        self._passed = unique if plan is None else len(plan.passed)
        self._leaving = 0 if plan is None else len(plan.evicted)
        self._lookup, self._update = embedding.lookup.in_parts(), embedding.update.in_parts()
        optimizer = table.optimizer
        self._host = [memory.buffer(self._passed, table.dim)]  # weights, then the admitted rows' block and row slots
        if plan is not None:
            self._host.append(memory.buffer(len(plan.admitted), 1 + len(optimizer.slots), table.dim))
            self._host.append(memory.buffer(len(plan.admitted), len(optimizer.row_slots)))
        self._sent = self._host  # the same on the device
        self._marks: list[Any] = [mark] if mark is not None else []  # in the staging's stream
        self._scalars: tuple[Any, ...] = ()
        self._received: list[Tensor] = []  # gradients of what passed, then the evicted rows' block and row slots
        self._first: Tensor | None = None  # gradients of the part that is updated first, where they came before
        self._evicted: tuple[list[Tensor], Any] = ([], None)  # the latter two, where they are, and a mark to wait for

    def fetch(self, part: Part) -> None:
        """Look rows up, for `send`.

        part  of the ids that pass by and then those that are admitted, in one row
        """
        self._look_up(part, self._host)

    def send(self) -> None:
        """Send the rows; others, and those that may have changed since, are to follow by `fetch_late`."""
        self._sent, mark = self._staging.send(self._host, self._memory)
        self._marks.append(mark)

    def fetch_late(self, part: Part) -> None:
        """Look up and send rows that had to wait; after `send`."""
        if not self._staging.copies:
            self._look_up(part, self._host)
            return
        late, whole = part.split(self._passed)
        sizes = [len(late), len(whole), len(whole)]
        values = [self._memory.buffer(n, *host.shape[1:]) for n, host in zip(sizes, self._host, strict=False)]
        self._look_up(Part(late.ids, None), values)
        if len(whole):
            self._table.read_rows(whole.ids, values[1].numpy(), values[2].numpy())
        for positions, rows, new in zip((late, whole, whole), self._sent, values, strict=False):
            assert positions.positions is not None
            if new.numel():
                self._marks.append(self._staging.patch(rows, positions.positions, new, self._memory))

    def _look_up(self, part: Part, out: list[Tensor]) -> None:
        passed, admitted = part.split(self._passed)
        self._lookup(self._table, passed.ids, out[0].numpy(), passed.positions)
        if len(admitted):
            self._table.read_rows(admitted.ids, out[1].numpy(), out[2].numpy(), admitted.positions)

    def arrived(self) -> Tensor:
        """Return the rows, float32 [U, D] on the device, whose current stream waits for them; nothing is to follow.

        They lie in the order of the ids, or with a cache in that of its plan.
        """
        self._lookup.end()
        self._staging.await_sent(self._marks, [*self._sent, *(self._places or ())])
        self._host = []
        if self._places is None:
            return self._sent[0]
        rows: Tensor = self._embedding.cache_lookup(self._places, *self._sent[:2])
        self._sent = [rows.new_empty(0), *self._sent[1:]]  # what was sent of the others is in `rows` now
        return rows

    def update_cached(self, grads: Tensor, skip: Tensor | None) -> None:
        """Count the step, and update the rows that are on the device; grads float32 [U, D], skip as in `Ops.update`."""
        self._scalars = self._table.begin_step()
        if self._places is not None:
            self._embedding.cache_update(self._places, grads, *self._sent[1:], self._scalars, skip)

    @property
    def admitted(self) -> Tensor:
        """The rows that the cache admits, with their slots, float32 [A, 1 + S, D], until `leave`."""
        return self._sent[1]

    def leave(self, grads: Tensor) -> list[Tensor]:
        """Exchange rows on the device; return what the host is to receive, for `update`."""
        if self._places is None:
            return [grads]
        passed = self._embedding.cache_passed(self._places, grads)
        exchange = self._embedding.cache_exchange  # last: from here on it has happened
        self._evicted = list(exchange(self._places, self._leaving, *self._sent[1:])), None
        self._sent = []
        return [passed, *self._evicted[0]]

    def receive(self, tensors: list[Tensor], mark: Any, first: Tensor | None = None) -> None:
        """Take in what `leave` returned, in host memory when the device has passed a mark.

        mark   of the evicted rows
        first  gradients of the part that is updated first, those that passed by
        """
        self._received, self._first = tensors, first
        self._evicted = tensors[1:], mark
        self._sent = []

    def bring_back(self, evicted: npt.NDArray[Any]) -> None:
        """Write the rows that left the cache to the host, where an error keeps the update from coming to it.

        evicted  [E], their ids
        """
        values, mark = self._evicted
        self._staging.await_mark(mark)
        block, row_slots = (tensor.cpu().numpy() for tensor in values)
        self._table.write_rows(evicted, block, row_slots)

    def update(self, part: Part, *, first: bool = False) -> None:
        """Update rows with their gradients, or write evicted ones back; all parts are one step.

        part   of the ids that passed by and then those that are evicted, in one row
        first  it is the one whose gradients came before
        """
        passed, evicted = part.split(self._passed)
        grads, positions = self._received[0], passed.positions
        if first and self._first is not None:
            grads, positions = self._first, None
        self._update(self._table, passed.ids, grads.numpy(), self._scalars, positions)
        if len(evicted):
            block, row_slots = self._received[1:]
            self._table.write_rows(evicted.ids, block.numpy(), row_slots.numpy(), evicted.positions)

    def updated(self) -> None:
        """Report the update's time."""
        self._update.end()


def rows_of(
    embeddings: Sequence[Embedding], unique: int, plan: Plan | None, staging: Staging, memory: Slab
) -> list[BatchRows]:
    """Return a batch's rows in each table: of so many unique ids, by the plan of the tables' cache if there is one."""
    if plan is None:
        return [BatchRows(embedding, unique, staging, memory) for embedding in embeddings]
    places, mark = staging.send(Places.of(plan), memory)
    return [BatchRows(embedding, unique, staging, memory, plan, Places(*places), mark) for embedding in embeddings]


def receive_rows(
    rows: Sequence[BatchRows], leaving: Sequence[list[Tensor]], first: Part | None, staging: Staging, memory: Slab
) -> tuple[Any, Any]:
    """Let what leaves the device come to the host, of each table what `BatchRows.leave` returned.

    first    the part that is updated first, as another batch waits for it: it comes before the rest
    returns  a mark for that part, and one for all, in the same stream
    """
    grads, others = [part[0] for part in leaving], [tensor for part in leaving for tensor in part[1:]]
    picked: list[Tensor] = []
    if first is not None and staging.copies:
        passed, _ = first.split(len(grads[0]))
        assert passed.positions is not None
        picked = staging.pick(grads, passed.positions, memory)
    early, mark = staging.receive([*picked, *others], memory) if picked or others else ([], None)
    received, last = staging.receive(grads, memory)
    mark = mark or last
    firsts, evicted = early[: len(picked)], early[len(picked) :]
    for number, (table, part) in enumerate(zip(rows, leaving, strict=False)):
        mine = [received[number], *(evicted.pop(0) for _ in part[1:])]
        table.receive(mine, mark, firsts[number] if picked else None)
    return mark, last


def bytes_of(embeddings: Sequence[Embedding], unique: int, plan: Plan | None, uses: int) -> int:
    """Return what the copies of a batch need of the host's memory; a little more or less does not matter."""
    passing, whole = row_bytes((part.table.dim, part.table.optimizer) for part in embeddings)
    if embeddings[0].target == "DEVICE":
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
