"""Small results of a step on their way to the host."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
from torch import Tensor

from hostdev.device.pinned import Slab
from hostdev.device.staging import Staging


class Outcome:
    """A step's results on their way to the host; the value is there when it is asked for.

    tensors  small ones on the device
    read     makes a value of them in host memory, or raises
    memory   of the batch, into which they are copied
    """

    def __init__(
        self, tensors: Sequence[Tensor], read: Callable[[list[npt.NDArray[Any]]], Any], staging: Staging, memory: Slab
    ) -> None:
        self._tensors, self._mark = staging.receive_results([tensor.detach() for tensor in tensors], memory)
        self._read, self._staging = read, staging
        self._results: list[npt.NDArray[Any]] | None = None
        self._value: Any = None
        self._done = False
        self.has_raised = False  # somebody has been told that it came to nothing
        self._reading = threading.Lock()

    def arrive(self) -> None:
        """Wait until the results are on the host; the memory is the batch's, so they are copied."""
        with self._reading:
            if self._results is None:
                self._staging.await_mark(self._mark)
                self._results = [tensor.numpy().copy() for tensor in self._tensors]
                self._tensors, self._mark = [], None

    def get(self) -> Any:
        """Wait for the step, and return its value or raise what `read` makes of it; any thread, again and again."""
        self.arrive()
        with self._reading:
            if not self._done:
                assert self._results is not None
                self.has_raised = True
                self._value = self._read(self._results)  # an error is made anew: one that is kept would hold its frames
                self.has_raised = False
                self._done, self._results = True, []
        return self._value
