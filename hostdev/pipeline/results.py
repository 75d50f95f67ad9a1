"""The result of each stage, in the order of the stages.

A stage makes its result once and changes no earlier one, except that `release` empties the lists of rows. The threads'
shared state of a batch is `scheduling.in_flight.InFlight`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hostdev.cache.planner import Plan
from hostdev.core.timeline import Span
from hostdev.device.pinned import PinnedBuffer
from hostdev.distributed.exchange import Asked, Incoming
from hostdev.distributed.gradients import Parts, Rows, SelectedRows
from hostdev.pipeline.row_ids import ConcatenatedIds, Ids, Positions
from hostdev.pipeline.rows import BatchRows, FetchedRows
from hostdev.pipeline.scheduling.in_flight import Conflicts, InFlight, SharedRows

Inverse = npt.NDArray[np.int32]


class Request(NamedTuple):
    """What the caller wants for a batch."""

    batch: Any  # the caller's
    rows: int  # samples in it, for the trace
    ids: Sequence[Sequence[Ids]]  # by group, by feature: int32 or int64 [N], C-contiguous, all in the table
    tensors: Sequence[Tensor] = ()  # others that the step needs on the device
    note: Any = None  # the caller's own data
    check: Callable[[], None] | None = None  # raises for ids that are not in the table; called first


class Gradients(NamedTuple):
    """A step's gradients."""

    grads: Sequence[Sequence[Tensor | None]]  # by group, by table: float32 [U, D], the rows'; None: it takes no step
    skip: Tensor | None = None  # float32 [] on the device: no row may change if it is not 0
    check: Any = None  # an `Outcome` that is read before the host's rows change; raises if they must not
    parts: Sequence[Sequence[Sequence[Tensor] | None]] = ()  # in place of grads, for other ranks: their tree nodes'
    micro_batches: int = 1  # of the step, here
    in_two: bool = False  # those for other ranks: on all ranks it is known which rows the next batch waits for


class ReadBatch(NamedTuple):
    """Read: a batch's request."""

    number: int
    request: Request


class UniqueGroup(NamedTuple):
    """A group's unique ids; with other ranks, the rows of this rank that any rank asks for."""

    ids: Ids  # unique [U]
    inverse: Inverse  # [N], of the batch's own ids
    asked: Asked | None = None  # what this rank asks of others, and they of it


class UniqueBatch(NamedTuple):
    """Deduplicated."""

    number: int
    position: int  # in its loop over batches, from 1
    request: Request
    groups: list[UniqueGroup]


class PlannedGroup(NamedTuple):
    """A group's ids with the cache's plan."""

    ids: Ids  # unique [U]
    asked: Asked | None
    plan: Plan | None  # None: no cache, or nothing is updated
    places: Positions | None  # of the ids' rows on the device, int32 [U]; None: in the order of the ids

    @property
    def reads(self) -> Ids:
        """Rows that are read on the host: those that bypass the cache, then those that are admitted."""
        return self.ids if self.plan is None else self.plan.reads

    @property
    def writes(self) -> Ids:
        """Rows that the update writes on the host: those that bypass the cache, then those that are evicted."""
        return self.ids if self.plan is None else self.plan.writes


class PlannedBatch(NamedTuple):
    """Planned: it is known which rows come from the cache, which from the host, and which of these conflict."""

    number: int
    position: int
    request: Request
    groups: list[PlannedGroup]
    inverses: list[Inverse]  # by group, int32 [N]; renumbered to the plan's order
    reads: ConcatenatedIds  # of all groups on the host
    writes: ConcatenatedIds
    conflicts: Conflicts | None


class EarlyRows(NamedTuple):
    """Rows of other ranks that no unfinished batch is going to write."""

    incoming: Incoming
    sent: list[Tensor]  # the rows on the device, where they are copied
    mark: Any  # of the copy


class LookedUpBatch(NamedTuple):
    """Looked up: the rows that need not wait are in host memory."""

    number: int
    position: int
    request: Request
    groups: list[PlannedGroup]
    inverses: list[Inverse]
    writes: ConcatenatedIds
    rows: FetchedRows
    memory: PinnedBuffer  # of the host, for its copies
    early: EarlyRows | None = None


class SentBatch(NamedTuple):
    """Sent: rows, inverses and the caller's tensors are on their way to the device."""

    number: int
    position: int
    request: Request
    groups: list[PlannedGroup]
    writes: ConcatenatedIds
    rows: FetchedRows
    memory: PinnedBuffer
    early: EarlyRows | None
    inverses: list[Tensor]  # by group, int32 [N] on the device
    device_ids: list[Tensor | None]  # by group, for tables on the device
    tensors: list[Tensor]  # the request's, on the device
    sent: list[Tensor]  # all of these three
    mark: Any  # of the copy


class StepGroup(NamedTuple):
    """A group's rows on the device."""

    planned: PlannedGroup
    rows: list[BatchRows]
    inverse: Tensor  # int32 [N]
    device_ids: Tensor | None
    values: list[Tensor]  # the rows of each table, float32 [U, D]; who takes them empties the list

    @property
    def ids(self) -> Ids:
        """Unique ids [U]."""
        return self.planned.ids

    @property
    def size(self) -> int:
        """U, the number of unique ids."""
        return len(self.planned.ids)

    @property
    def own_size(self) -> int:
        """How many rows the step gets."""
        asked = self.planned.asked
        return len(self.planned.ids) if asked is None else asked.size

    @property
    def own_places(self) -> Positions | None:
        """Where the batch's rows are among those that the step gets, int32; None: in the order of the batch's ids."""
        asked = self.planned.asked
        return self.planned.places if asked is None else asked.places


class StepBatch(NamedTuple):
    """In the step: the batch that the caller gets."""

    number: int
    position: int
    request: Request
    groups: list[StepGroup]
    tensors: list[Tensor]
    writes: ConcatenatedIds
    memory: PinnedBuffer
    outcomes: list[Any]  # `Outcome`s that are copied to the batch's memory; the step adds to them
    in_flight: InFlight
    begun: Any  # the device's clock at the step's begin
    span: Span  # open until the step ends

    @property
    def first(self) -> list[SelectedRows] | None:
        """Which rows the next batch waits for, where other ranks know of them; None: not yet known."""
        return self.in_flight.first


class Outgoing(NamedTuple):
    """A batch's gradients for the owners of the rows, in host memory."""

    grads: Parts
    micro_batches: int
    chosen: list[SelectedRows] | None  # rows whose gradients go first; None: all at once
    sums: list[list[Rows | None]]  # by group and table, the sums for the rows here, float32 [any, D]


class SteppedBatch(NamedTuple):
    """Stepped: rows on the device are updated, gradients of the others are on their way to the host."""

    number: int
    groups: list[StepGroup]
    stepped: list[list[bool]]  # by group, which tables take a step
    writes: ConcatenatedIds
    memory: PinnedBuffer
    outcomes: list[Any]
    check: Any  # an `Outcome` that decides whether the update happens
    received: Any  # a mark: all that the host receives is there
    received_first: tuple[SharedRows | None, Any]  # what of it came before the rest, and its mark
    outgoing: Outgoing | None
    clocks: tuple[Any, Any]  # the device's, at the step's begin and end
    in_flight: InFlight
