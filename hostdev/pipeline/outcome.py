"""Results of a step, such as a loss, which are copied to the host in the background."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
from torch import Tensor

from hostdev.device.staging import PinnedBuffer, Staging


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
