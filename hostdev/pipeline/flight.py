"""What the threads of a pipeline share: the batches in flight, and who waits for which of their rows."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hostdev.cache.planner import Plan
from hostdev.distributed.exchange import Asked
from hostdev.distributed.gradients import Parts, Rows, RowSubset
from hostdev.pipeline.groups import Ids, Joint, Part
from hostdev.pipeline.rows import BatchRows

_NONE = np.empty(0, np.int32)


class Request(NamedTuple):
    """What is wanted of a batch."""

    batch: Any  # the caller's
    rows: int  # samples in it, for the trace
    ids: Sequence[Sequence[Ids]]  # by group, by feature: int32 or int64 [N], C-contiguous, all in the table
    tensors: Sequence[Tensor] = ()  # others that are to be on the device for the step
    note: Any = None  # whatever the caller needs to know of it
    check: Callable[[], None] | None = None  # raises for ids that are not in the table; before anything else is done


class Gradients(NamedTuple):
    """What a batch's step has come to."""

    grads: Sequence[Sequence[Tensor | None]]  # by group, by table: float32 [U, D], the rows'; None: it takes no step
    skip: Tensor | None = None  # float32 [], not 0 where no row may change, which the device alone knows so far
    check: Any = None  # an `Outcome`, waited for before the host's rows change; raises if they must not
    parts: Sequence[Sequence[Sequence[Tensor] | None]] = ()  # in place of grads, for other ranks: those of its nodes
    micro_batches: int = 1  # of the step, here
    in_two: bool = False  # those for other ranks: on all ranks it is known which rows the next batch waits for


class GroupBatch:
    """A batch's part of a group.

    With other ranks `ids` are the rows here that are asked for, and the batch's own are those that it asks for.
    """

    def __init__(self, ids: Ids, inverse: npt.NDArray[np.int32], asked: Asked | None = None) -> None:
        self.ids = ids  # unique [U]
        self.inverse: Any = inverse  # int32 [N], of the batch's uses; on the device when it has been sent
        self.asked = asked  # of others, and by them
        self.plan: Plan | None = None  # the cache's
        self.places: Any = None  # of the ids' rows on the device, int32 [U]; None: in the order of the ids
        self.announced = False
        self.rows: list[BatchRows] = []  # of each table on the host
        self.there: Tensor | None = None  # the ids on the device, where the tables are there
        self.values: list[Tensor] = []  # rows of each table on the device, float32 [U, D]
        self.stepped: list[bool] = []  # which tables take a step with it
        self.size = len(ids)  # U

    @property
    def own_size(self) -> int:
        """How many rows the step gets."""
        return self.size if self.asked is None else self.asked.size

    @property
    def own_places(self) -> Any:
        """Where those are in what it gets, int32; None: in the order of the batch's ids."""
        return self.places if self.asked is None else self.asked.places

    @property
    def reads(self) -> Ids:
        """Rows that it takes from the host: those that pass the cache by, then those that are admitted."""
        return self.ids if self.plan is None else self.plan.reads

    @property
    def writes(self) -> Ids:
        """Rows of the host that its update writes: those that pass by, then those that are evicted."""
        return self.ids if self.plan is None else self.plan.writes


class Flight:
    """A batch in flight."""

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.position = 0  # in its run over batches, from 1
        self.request = request
        self.groups: list[GroupBatch] = []
        self.reads = self.writes = Joint(_NONE, [0, 0])  # of all groups on the host
        self.tensors: list[Tensor] = []  # the request's, on the device
        self.sent: list[tuple[list[Tensor], Any]] = []  # what the step needs beside rows, and marks to wait for
        self.missing = 0  # parts of the rows that have not been fetched, late ones and the others
        self.late: list[Part] = []  # those that may be fetched now
        self.shared: Shared | None = None  # what the next one waits for
        self.after: list[tuple[Flight, Part]] = []  # what later ones wait for
        self.closed = False  # its update has begun: too late to ask for rows to be updated first
        self.held = True  # by the caller, who steps it, or by the updater
        self.memory: Any = None  # a `Slab` of the host's, for its copies
        self.check: Any = None  # an `Outcome` that decides whether its update happens
        self.outcomes: list[Any] = []  # others on their way to the host, in its memory
        self.received: Any = None  # a mark: all that the host takes is there
        self.received_first: tuple[Shared | None, Any] = None, None  # what of it came before the rest, and its mark
        self.incoming: Any = None  # rows on their way from other ranks; arriving: those on the device
        self.arriving: list[Tensor] = []
        self.outgoing: Outgoing | None = None  # gradients for other ranks
        self.first: list[RowSubset] | None = None  # rows that the next batch waits for, where other ranks know of them
        self.clocks: tuple[Any, Any] = (None, None)
        self.span: Any = None  # of its step

    @property
    def rows(self) -> list[BatchRows]:
        """Its rows of every table on the host."""
        return [rows for part in self.groups for rows in part.rows]

    def release(self) -> None:
        """Give up the host's memory; the device is done with it."""
        for part in self.groups:
            part.rows = []
        self.shared, self.outcomes, self.check = None, [], None
        self.memory.release()
        self.memory = None


class Outgoing(NamedTuple):
    """A batch's gradients for the owners of the rows, in host memory."""

    grads: Parts
    micro_batches: int
    chosen: list[RowSubset] | None  # rows whose gradients go first; None: all at once
    sums: list[list[Rows | None]]  # of each group and table, what the rows here come to, float32 [any, D]


class Shared(NamedTuple):
    """The rows of a batch that the next one has too."""

    first: Part
    rest: Part  # the others
    next: Flight
    late: Part  # where the next one has them


class End(NamedTuple):
    """Goes where the next batch would go."""

    error: BaseException | None


class Stopped(Exception):  # noqa: N818  (not an error: a thread is asked to end)
    """Raised in a thread that waits, when the run is over."""


Queue = deque[Flight | End]
