"""Forwarding: rows shared with the previous batch reach a batch's step on the device, not through the host.

The device updates these rows with the earlier step's gradients, as the host updates its table, with bit-identical
results. So a step does not wait until the gradients are copied to the host, the table is updated there, and the rows
are copied back.

For this, the device needs the rows with their optimizer state as they were before the earlier step. A row that was
forwarded to the earlier step is already on the device. The other rows are read from the host's table, before the table
is updated with the earlier step's gradients.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.memory import row_bytes
from hostdev.device.forwarding import ForwardedPlaces, RowState, StepGradients
from hostdev.device.staging import PinnedBuffer, Staging
from hostdev.kernels.arrays import AnyIds, Positions
from hostdev.kernels.claims import join
from hostdev.kernels.pool import Task, run_tasks
from hostdev.pipeline.batch_ids import ConcatenatedIds, Group, RowOffsets, RowSubset

_POSITION_BYTES = 24  # bytes of a forwarded row's positions and id


class Forwarded(NamedTuple):
    """The rows that the previous batch forwards to a batch: F rows of all groups, in the previous batch's order."""

    source: Positions  # [F], positions among the rows that the previous batch writes; ascending
    target: Positions  # [F], positions among the rows that this batch reads
    held: Positions  # [F], positions among the rows that were forwarded to the previous batch; -1 if not among them
    starts: list[int]  # [G + 1], where each group's rows begin among the F rows
    source_starts: list[int]  # [G + 1], where each group's rows begin among the rows that the previous batch writes
    held_starts: list[int]  # [G + 1], where each group's rows begin among the rows forwarded to the previous batch


def find_forwarded(written: ConcatenatedIds, conflicting: RowSubset, earlier: Forwarded | None) -> Forwarded:
    """Return the rows that the previous batch forwards to a batch.

    Args:
        written: The rows that the previous batch writes.
        conflicting: The rows to forward, all among `written`, as a subset of the rows that the batch reads.
        earlier: The rows that are forwarded to the previous batch, or None if there are none.
    """
    source, chosen = join(written.ids, conflicting.ids)
    assert conflicting.positions is not None
    place = np.full(len(written.ids), -1, np.int32)
    starts = np.searchsorted(source, written.starts).tolist()
    held_starts = [0] * len(starts)
    if earlier is not None:
        place[earlier.target] = np.arange(len(earlier.target), dtype=np.int32)
        held_starts = earlier.starts
    return Forwarded(source, conflicting.positions[chosen], place[source], starts, written.starts, held_starts)


class ForwardedRows:
    """F rows of a group that are forwarded to a batch; A of them are new, and are read from the host's tables.

    Args:
        group: The group's tables, on the host.
        ids: The rows, int32 or int64 [F].
        source: The rows' positions among the previous batch's rows, int32 [F].
        target: The rows' positions among this batch's rows, int32 [F].
        held: The rows' positions among the rows forwarded to the previous batch, int32 [F]; -1 for new rows.
        held_rows: The number of rows that were forwarded to the previous batch.
        staging: Copies to the device.
        memory: The batch's host memory.
    """

    def __init__(
        self,
        group: Group,
        ids: AnyIds,
        source: Positions,
        target: Positions,
        held: Positions,
        held_rows: int,
        staging: Staging,
        memory: PinnedBuffer,
    ) -> None:
        self.ids, self._group, self._staging, self._memory = ids, group, staging, memory
        new = held < 0
        self._new_ids = ids[new]
        held = np.where(new, np.int32(held_rows - 1) + np.cumsum(new, dtype=np.int32), held)
        arrays = [source, target, held, *([group.row_ids(ids)] if group.rounds else [])]
        self._places = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        self._host: list[Tensor] = []  # by table: block [A, 1 + S, D] and row_slots [A, R]
        self._sent: list[Tensor] = []  # on the device: copies of `_places`, then of `_host`
        self._marks: list[Any] = []

    @property
    def new(self) -> int:
        """A, the number of rows that are read from the tables."""
        return len(self._new_ids)

    def has(self, table: Any) -> bool:
        """Return whether the rows belong to a table."""
        return any(embedding.table is table for embedding in self._group.embeddings)

    def read_tasks(self) -> list[Task]:
        """Return tasks that read the new rows from the tables, which must not change meanwhile; `send` must follow."""
        self._host = []
        tasks: list[Task] = []
        for embedding in self._group.embeddings:
            optimizer = embedding.table.optimizer
            block = self._memory.buffer(self.new, 1 + len(optimizer.slots), embedding.table.dim)
            row_slots = self._memory.buffer(self.new, len(optimizer.row_slots))
            self._host += [block, row_slots]
            tasks += embedding.forward_read.tasks(embedding.table, self._new_ids, block.numpy(), row_slots.numpy())
        return tasks

    def send(self) -> None:
        """Send the rows that were read, and the positions, to the device."""
        self._sent, mark = self._staging.send([*self._places, *self._host], self._memory)
        self._marks.append(mark)

    def reload(self, ids: AnyIds | None) -> None:
        """Read the new rows again after a write to the tables, and send them again if they were sent before.

        Args:
            ids: The rows that were written, int32 or int64 [N]; None for all rows.
        """
        if self._host and (ids is None or np.isin(self._new_ids, ids).any()):
            run_tasks(self.read_tasks())
            if self._sent:
                self.send()

    def arrived(self) -> tuple[ForwardedPlaces, list[RowState]]:
        """Return the positions and each table's new rows on the device; its current stream waits for the copies."""
        self._staging.await_sent(self._marks, self._sent)
        sent, self._sent, self._host = self._sent, [], []
        count = len(self._places)
        states = [RowState(*pair) for pair in zip(sent[count::2], sent[count + 1 :: 2], strict=True)]
        return ForwardedPlaces(*sent[:count]), states


def make_forwarded(
    groups: Sequence[Group],
    offsets: RowOffsets,
    reads: ConcatenatedIds,
    forwarded: Forwarded,
    staging: Staging,
    memory: PinnedBuffer,
) -> list[ForwardedRows | None]:
    """Return the forwarded rows of each group, or None for a group without any.

    Args:
        groups: The tables.
        offsets: Numbers the rows of all groups.
        reads: The rows that the batch reads.
        forwarded: The rows that are forwarded to the batch.
        staging: Copies to the device.
        memory: The batch's host memory.
    """
    found: list[ForwardedRows | None] = []
    rows = RowSubset(reads.ids[forwarded.target], forwarded.source)
    sources = offsets.split(rows, forwarded.source_starts)
    for number, (group, source) in enumerate(zip(groups, sources, strict=True)):
        start, stop = forwarded.starts[number : number + 2]
        if start == stop:
            found.append(None)
            continue
        target = forwarded.target[start:stop] - np.int32(reads.starts[number])
        held, (first, last) = forwarded.held[start:stop], forwarded.held_starts[number : number + 2]
        held = np.where(held < 0, held, held - np.int32(first))
        assert source.positions is not None
        found.append(ForwardedRows(group, source.ids, source.positions, target, held, last - first, staging, memory))
    return found


def count_forwarded_bytes(groups: Sequence[Group], forwarded: Forwarded) -> int:
    """Estimate the bytes of host memory for the copies of forwarded rows."""
    total = _POSITION_BYTES * len(forwarded.source)
    for number, group in enumerate(groups):
        if group.on_host:
            start, stop = forwarded.starts[number : number + 2]
            _, whole = row_bytes((one.table.dim, one.table.optimizer) for one in group.embeddings)
            total += whole * int(np.count_nonzero(forwarded.held[start:stop] < 0))
    return total


class Forwarding:
    """Forwards rows from each step of a pass to the next step; used in the caller's thread only."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self.clear()

    def clear(self) -> None:
        """Drop the last step's state, at the end of a pass."""
        # By group and table. `_taken`: the gradients of the last step, once it has ended. `_states`: the rows that were
        # forwarded to the last step, as they were before it.
        self._taken: dict[tuple[int, int], StepGradients] = {}
        self._states: dict[tuple[int, int], RowState] = {}
        self._ids: dict[int, AnyIds] = {}  # by group, the ids of the rows in `_states`
        self._written: set[int] = set()  # groups whose tables the caller wrote after the last step had ended

    def begin(self, forwarded: Sequence[ForwardedRows | None], values: Sequence[Sequence[Tensor]]) -> None:
        """At the beginning of a batch's step, write the forwarded rows into the batch's rows.

        Args:
            forwarded: The forwarded rows by group; empty if no rows are forwarded.
            values: By group and table, the batch's rows, float32 [U, D]; the forwarded rows are written here.
        """
        states: dict[tuple[int, int], RowState] = {}
        found = {number: rows for number, rows in enumerate(forwarded) if rows is not None}
        for number, rows in found.items():
            places, new = rows.arrived()
            for table, embedding in enumerate(self._groups[number].embeddings):
                at = number, table
                held, taken, state = self._states.get(at), self._taken.get(at), new[table]
                if number in self._written:  # the host's table has all updates, because a write waits for them
                    state = _read(embedding.table, rows.ids, state)
                    held, taken = None, None
                states[at] = embedding.forward_update(held, state, places, taken, values[number][table])
        self._states, self._ids = states, {number: rows.ids for number, rows in found.items()}
        self._taken, self._written = {}, set()

    def end(self, group: int, table: int, taken: StepGradients) -> None:
        """Keep a table's gradients at the end of a step, until the next step begins."""
        self._taken[group, table] = taken

    def reload(self, table: Any, ids: npt.NDArray[Any] | None) -> None:
        """Use the new values of a table that the loop's body has written, before or after the last step's end.

        Args:
            table: The table.
            ids: The rows that were written, int32 or int64 [N]; None for all rows.
        """
        for number, group in enumerate(self._groups):
            for place, embedding in enumerate(group.embeddings):
                if embedding.table is not table:
                    continue
                if any(of == number for of, _ in self._taken):
                    self._written.add(number)
                elif (number, place) in self._states:
                    self._read_again(table, self._ids[number], ids, self._states[number, place])

    @staticmethod
    def _read_again(table: Any, rows: AnyIds, written: npt.NDArray[Any] | None, state: RowState) -> None:
        at = np.arange(len(rows)) if written is None else np.flatnonzero(np.isin(rows, written))
        if len(at):
            places = torch.from_numpy(at).to(state.block.device)
            for held, value in zip(state, _read(table, rows[at], state), strict=True):
                held.index_copy_(0, places, value)


def _read(table: Any, ids: AnyIds, like: RowState) -> RowState:
    """Read rows from a host table; return them on the device of `like`, in its layout."""
    values = [torch.empty((len(ids), *held.shape[1:])) for held in like]
    run_tasks(table.read_rows_tasks(ids, *(value.numpy() for value in values)))
    return RowState(*(value.to(like.block.device) for value in values))
