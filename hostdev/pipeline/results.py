"""The results of the stages, in the stages' order; the results of the first stages are in `batch_ids`.

A stage creates its result once and does not change earlier results, except that `stages.update.release` empties the
lists of rows. The state of a batch that threads share is `scheduling.in_flight.InFlight`.

`Outcome` holds results of a step, such as a loss, which are copied to the host in the background.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
from torch import Tensor

from hostdev.core.timeline import Span
from hostdev.device.staging import PinnedBuffer, Staging
from hostdev.distributed.exchange import Incoming
from hostdev.distributed.gradients import Parts, SelectedRows
from hostdev.kernels.arrays import Positions, Rows
from hostdev.pipeline.batch_ids import ConcatenatedIds, PlannedGroup, Request
from hostdev.pipeline.rows import BatchRows, FetchedRows
from hostdev.pipeline.scheduling.in_flight import Conflicts, InFlight, SharedRows


class Outcome:
    """Small results of a step, and a value that is computed from them on the host.

    Args:
        tensors: Small tensors on the device.
        read: Called with the copies in host memory; returns the value that `get` returns, or raises an error.
        staging: Copies the tensors to the host.
        memory: The batch's host memory, to which the tensors are copied.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        read: Callable[[list[npt.NDArray[Any]]], Any],
        staging: Staging,
        memory: PinnedBuffer,
    ) -> None:
        self._tensors, self._mark = staging.receive_results([tensor.detach() for tensor in tensors], memory)
        self._read, self._staging = read, staging
        self._results: list[npt.NDArray[Any]] | None = None
        self._value: Any = None
        self._done = False
        self.has_raised = False  # whether `read` has raised an error in `get`
        self._reading = threading.Lock()

    def arrive(self) -> None:
        """Wait until the results are on the host, and copy them out of the batch's memory."""
        with self._reading:
            if self._results is None:
                self._staging.await_event(self._mark)
                self._results = [tensor.numpy().copy() for tensor in self._tensors]
                self._tensors, self._mark = [], None

    def get(self) -> Any:
        """Wait for the step, and return the value or raise the error of `read`. Any thread may call this repeatedly."""
        self.arrive()
        with self._reading:
            if not self._done:
                assert self._results is not None
                self.has_raised = True
                self._value = self._read(self._results)  # an error is not stored: it would keep its frames alive
                self.has_raised = False
                self._done, self._results = True, []
        return self._value


class Gradients(NamedTuple):
    """A step's gradients."""

    grads: Sequence[Sequence[Tensor | None]]  # by group and table: float32 [U, D]; None if the table takes no step
    skip: Tensor | None = None  # float32 [] on the device: 0 if rows may change, otherwise no row may change
    check: Any = None  # an `Outcome` whose `get` raises an error if the host rows must not change
    parts: Sequence[Sequence[Sequence[Tensor] | None]] = ()  # with other ranks, instead of `grads`: a sum per tree node
    micro_batches: int = 1  # the step's number of micro-batches on this rank
    in_two: bool = False  # whether the gradients of the rows for which the next batch waits are sent first


class PlannedBatch(NamedTuple):
    """A planned batch: which rows come from the cache and which from the host, and which an unfinished batch writes."""

    number: int
    position: int
    request: Request
    groups: list[PlannedGroup]
    inverses: list[Positions]  # by group, for each id, the position of its row on the device, int32 [N]
    reads: ConcatenatedIds  # rows that are read on the host
    writes: ConcatenatedIds  # rows that the update writes on the host
    conflicts: Conflicts | None


class EarlyRows(NamedTuple):
    """Rows of other ranks that no unfinished batch will write."""

    incoming: Incoming
    sent: list[Tensor]  # the rows on the device, if they are copied


class LookedUpBatch(NamedTuple):
    """A looked-up batch: all its rows that need not wait for an update are in host memory."""

    planned: PlannedBatch
    rows: FetchedRows
    memory: PinnedBuffer  # host memory for the batch's copies
    early: EarlyRows | None = None


class SentBatch(NamedTuple):
    """A batch whose rows, inverses and tensors are being copied to the device."""

    planned: PlannedBatch
    rows: FetchedRows
    memory: PinnedBuffer
    early: EarlyRows | None
    inverses: list[Tensor]  # by group, int32 [N] on the device
    device_ids: list[Tensor | None]  # by group: the ids for tables on the device, else None
    tensors: list[Tensor]  # the request's tensors, on the device
    sent: list[Tensor]  # all tensors in `inverses`, `device_ids` and `tensors`
    mark: Any  # the event after which these tensors are on the device


class StepGroup(NamedTuple):
    """A group's rows on the device, in a step."""

    planned: PlannedGroup
    rows: list[BatchRows]
    inverse: Tensor  # int32 [N]
    device_ids: Tensor | None
    values: list[Tensor]  # each table's rows, float32 [U, D]; the consumer empties the list

    @property
    def own_size(self) -> int:
        """Number of rows that this rank's step gets, including rows from other ranks."""
        asked = self.planned.asked
        return len(self.planned.ids) if asked is None else asked.size

    @property
    def own_places(self) -> Positions | None:
        """For each unique id, the position of its row among the step's rows, int32; None for the order of the ids."""
        asked = self.planned.asked
        return self.planned.places if asked is None else asked.places


class StepBatch(NamedTuple):
    """A batch in its step, as the caller gets it."""

    number: int
    position: int
    request: Request
    groups: list[StepGroup]
    tensors: list[Tensor]
    writes: ConcatenatedIds
    memory: PinnedBuffer
    outcomes: list[Any]  # `Outcome`s that are copied to the batch's memory; the step appends to the list
    in_flight: InFlight
    begun: Any  # the device's clock when the step begins
    span: Span  # open until the step ends

    @property
    def first(self) -> list[SelectedRows] | None:
        """The rows for which the next batch waits, by group, as known to all ranks; None if they are not known yet."""
        return self.in_flight.first


class Outgoing(NamedTuple):
    """A batch's gradients in host memory, which are sent to the ranks that have the rows."""

    grads: Parts
    micro_batches: int
    chosen: list[SelectedRows] | None  # by group, rows whose gradients are sent first; None to send all together
    sums: list[list[Rows | None]]  # by group and table, the sums for this rank's rows, float32 [any, D]


class SteppedBatch(NamedTuple):
    """A batch after its step: rows on the device are updated, and gradients of other rows are copied to the host."""

    number: int
    groups: list[StepGroup]
    stepped: list[list[bool]]  # by group, whether each table takes a step
    writes: ConcatenatedIds
    memory: PinnedBuffer
    outcomes: list[Any]
    check: Any  # an `Outcome` whose `get` raises an error if the update must not happen
    received: Any  # the event after which everything that the host receives has arrived
    received_first: tuple[SharedRows | None, Any]  # rows whose gradients the host receives first, and their event
    outgoing: Outgoing | None
    clocks: tuple[Any, Any]  # the device's clock at the beginning and at the end of the step
    in_flight: InFlight
