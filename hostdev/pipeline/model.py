"""What a pipeline runs, and what a step comes to."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
from torch import Tensor

from hostdev.data.batch import WideBatch as Batch
from hostdev.device.pinned import Slab
from hostdev.device.staging import Staging
from hostdev.pipeline.rows import Positions

Ids = npt.NDArray[Any]


class Step(NamedTuple):
    """What the device is going to have when it has done a step."""

    results: Sequence[Tensor]  # small ones, for the host
    read: Callable[[list[npt.NDArray[Any]], int], Any]  # makes a value of them, given the number of the step, or raises
    grads: Sequence[Tensor] = ()  # of each table's rows, float32 [U, D]
    skip: Tensor | None = None  # float32 [], not 0 from the first step on whose update must not happen


class Model(Protocol):
    """The dense part, and what it needs on the device."""

    reads_whole_tables: bool  # in `step`, which must wait until every earlier batch has been updated

    def unique(self, batch: Batch) -> tuple[Ids, Positions]:
        """Deduplicate the ids: return unique ids [U] and the inverse, as `hostdev.unique`; in the fetcher's thread."""

    def prepare(self, batch: Batch, ids: Ids, inverse: Positions, memory: Slab, places: Positions | None) -> Any:
        """Send what the step needs to the device; in the fetcher's thread, not long before the step.

        ids      unique [U]; the result's `ids` are these on the device, if the tables are there
        inverse  int32 [N], which row of those given to `step` each use has
        memory   of the batch, for the copies
        places   int32 [U], where the row of each id lies among those; None: in the order of the ids
        """

    def await_prepared(self, prepared: Any) -> None:
        """Let the device wait for what `prepare` has sent."""

    def step(self, prepared: Any, rows: list[Tensor]) -> Step:
        """Take a step with a batch's rows of each table, float32 [U, D]; nobody waits for the device."""


class Outcome:
    """A step's results on their way to the host; the value is there when it is asked for."""

    def __init__(self, step: Step, number: int, staging: Staging, memory: Slab) -> None:
        self._tensors, self._mark = staging.receive_results(step.results, memory)
        self._read, self._number, self._staging = step.read, number, staging
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = False
        self._reading = threading.Lock()

    def get(self) -> Any:
        """Wait for the step, and return its value or raise what the model makes of it; any thread, again and again."""
        with self._reading:
            if not self._done:
                self._staging.await_mark(self._mark)
                try:
                    results = [tensor.detach().numpy().copy() for tensor in self._tensors]  # the memory is the batch's
                    self._value = self._read(results, self._number)
                except Exception as error:
                    self._error = error
                self._done = True
                self._tensors, self._mark = [], None
        if self._error is not None:
            raise self._error
        return self._value


class Result:
    """A batch's step, whose value may be on its way from the device still."""

    def __init__(self, batch: Batch, outcome: Outcome) -> None:
        self.batch = batch
        self._outcome = outcome

    @property
    def value(self) -> Any:
        """The step's value, waited for; raises what the model makes of it, such as NonFiniteLossError."""
        return self._outcome.get()
