"""Simulated devices: a step waits, and may also take as much of the host's time as a real device's step."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from hostdev.cache.slots import DeviceSlots, Places
from hostdev.device.forwarding import ForwardedPlaces, RowState, StepGradients
from hostdev.pipeline.results import Gradients, StepBatch

# A step of Wide & Deep launches about 100 kernels of the dense layers, their gradients and Adam, and up to 20 for rows
# (the benchmark `launches`). PyTorch takes 4 to 10 us of the host for each.
LAUNCHES = 120
LAUNCH_US = 5


class Load:
    """The host's work for a real device in a step: launches, and copies of the batch's rows.

    A launch is Python code that holds the GIL; an operation on one element releases the GIL for a moment, as every
    launch does. A copy runs in one thread without the GIL, and reads and writes host memory. A real copy takes less: it
    reads or writes host memory once, and needs no core.
    """

    def __init__(self, values: int) -> None:
        self.sent: list[torch.Tensor] = []  # tensors sent to the device for this step
        self.forwarded: list[torch.Tensor] = []  # rows with their optimizer state, sent to be forwarded
        self.seconds = 0.0  # total of all steps
        self._there, self._back = np.zeros(values, np.float32), np.zeros(values, np.float32)
        self._one = torch.zeros(1)

    def take(self) -> float:
        """Launch and copy; return the seconds that it took.

        As many rows are copied back as were sent: a gradient for each bypassing row, and in the steady state of a cache
        an evicted row for each admitted one.
        """
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            end = time.perf_counter() + LAUNCH_US * 1e-6
            self._one.zero_()
            while time.perf_counter() < end:
                pass
        for tensor in [*self.sent, *self.forwarded]:
            np.copyto(self._there[: tensor.numel()], tensor.numpy().reshape(-1))
        for tensor in self.sent:
            np.copyto(self._back[: tensor.numel()], self._there[: tensor.numel()])
        self.sent, self.forwarded = [], []
        taken = time.perf_counter() - start
        self.seconds += taken
        return taken


class Simulated:
    """A device whose step takes `seconds`, or as long as the load takes if that is longer; its gradients are constant.

    Args:
        rows: Maximum number of unique rows of a batch in a group.
        dims: Number of columns of each table of a group; all groups have the same.
    """

    def __init__(self, rows: int, dims: Sequence[int]) -> None:
        self.seconds = 0.0
        self.load: Load | None = None
        self._grads = [torch.full((rows, columns), 1e-3) for columns in dims]

    def step(self, rows: list[torch.Tensor]) -> None:
        """Take a step with these rows of all tables."""
        rest = self.seconds
        if self.load is not None:
            self.load.sent = self.load.sent or rows  # without a cache all rows are sent
            rest -= self.load.take()
        if rest > 0:
            time.sleep(rest)

    def gradients(self, rows: int) -> list[torch.Tensor]:
        """Return a group's gradients, each float32 [rows, D]."""
        return [grads[:rows] for grads in self._grads]

    def step_of(self, flight: StepBatch) -> Gradients:
        """Take a step with an in-flight batch, and return its gradients."""
        self.step([values for part in flight.groups for values in part.values])
        return Gradients([self.gradients(len(part.planned.ids)) for part in flight.groups])


def forward_free(
    model: Simulated,
    held: RowState | None,
    new: RowState,
    at: ForwardedPlaces,
    taken: StepGradients | None,
    rows: torch.Tensor,
) -> RowState:
    """Forward rows from step to step on the simulated device: nothing is computed, as with `FreeSlots`."""
    if model.load is not None:
        model.load.forwarded.append(new.block)
    return new


class FreeSlots:
    """A cache's slots on the simulated device; nothing is computed, because the step's time includes their work."""

    def __init__(self, like: DeviceSlots, unique: int, model: Simulated) -> None:
        self.block, self.row_slots = like.block[:1], like.row_slots[:1]
        self._model = model
        self._rows = torch.zeros((unique, like.block.shape[2]))
        self._left = torch.zeros((unique, *like.block.shape[1:])), torch.zeros((unique, like.row_slots.shape[1]))

    def rows(self, at: Places, passed: torch.Tensor, *admitted: torch.Tensor) -> torch.Tensor:
        if self._model.load is not None:
            self._model.load.sent += [passed, *admitted]
        return self._rows

    def _no_bytes(self, *args: object) -> int:
        return 0

    rows_bytes = update_bytes = exchange_bytes = _no_bytes

    def update(self, *args: object) -> None:
        pass

    def passed(self, at: Places, grads: torch.Tensor) -> torch.Tensor:
        return grads[len(at.hit_slots) + len(at.admitted_slots) :]

    def exchange(self, at: Places, leaving: int, *args: object) -> list[torch.Tensor]:
        return [values[:leaving] for values in self._left]

    def write(self, *args: object) -> None:
        pass

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [values.expand(len(slots), *values.shape[1:]).contiguous() for values in (self.block, self.row_slots)]
