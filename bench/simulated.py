"""Simulated devices: a step that waits and, on demand, takes as much of the host's time as a real device's step."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from hostdev.cache.slots import DeviceSlots, Places
from hostdev.pipeline.results import Gradients, StepBatch

# A step of Wide & Deep launches about 100 kernels of the dense layers, their gradients and Adam, and up to 20 for rows
# (the benchmark `launches`). PyTorch takes 4 to 10 us of the host for each.
LAUNCHES = 120
LAUNCH_US = 5


class Load:
    """What a device takes from the host in a step: launches, and copies of the batch's rows.

    A launch is Python that holds the interpreter's lock; an operation on one element ends it, which lets go of the lock
    for a moment, as every launch does. A copy goes through memory in one thread without the lock. That is more than
    a real one takes, which reads or writes the host's memory once, and needs no core.
    """

    def __init__(self, values: int) -> None:
        self.sent: list[torch.Tensor] = []  # to the device, for this step
        self.seconds = 0.0  # of all steps so far
        self._there, self._back = np.zeros(values, np.float32), np.zeros(values, np.float32)
        self._one = torch.zeros(1)

    def take(self) -> float:
        """Launch and copy, and return how long it took.

        As many rows come back as were sent: gradients for the rows that passed by, and in the steady state of a cache
        an evicted row for each that was admitted.
        """
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            end = time.perf_counter() + LAUNCH_US * 1e-6
            self._one.zero_()
            while time.perf_counter() < end:
                pass
        for tensor in self.sent:
            np.copyto(self._there[: tensor.numel()], tensor.numpy().reshape(-1))
        for tensor in self.sent:
            np.copyto(self._back[: tensor.numel()], self._there[: tensor.numel()])
        self.sent = []
        taken = time.perf_counter() - start
        self.seconds += taken
        return taken


class Simulated:
    """A device whose step waits `seconds` and whose gradients are there already; with a load these seconds have it in
    them, and are at least what it takes.

    rows  unique rows of a batch in a group, at most
    dims  columns of its tables; all groups have the same
    """

    def __init__(self, rows: int, dims: Sequence[int]) -> None:
        self.seconds = 0.0
        self.load: Load | None = None
        self._grads = [torch.full((rows, columns), 1e-3) for columns in dims]

    def step(self, rows: list[torch.Tensor]) -> None:
        """Take as long as a step with these rows of all tables takes."""
        rest = self.seconds
        if self.load is not None:
            self.load.sent = self.load.sent or rows  # without a cache all of them
            rest -= self.load.take()
        if rest > 0:
            time.sleep(rest)

    def gradients(self, rows: int) -> list[torch.Tensor]:
        """Return a group's gradients, each float32 [rows, D]."""
        return [grads[:rows] for grads in self._grads]

    def step_of(self, flight: StepBatch) -> Gradients:
        """Take a step with a batch in flight."""
        self.step([values for part in flight.groups for values in part.values])
        return Gradients([self.gradients(part.size) for part in flight.groups])


class FreeSlots:
    """A cache's slots on the simulated device, whose work is in the step's time: nothing is computed here."""

    def __init__(self, like: DeviceSlots, unique: int, model: Simulated) -> None:
        self.block, self.row_slots = like.block[:1], like.row_slots[:1]
        self._model = model
        self._rows = torch.zeros((unique, like.block.shape[2]))
        self._left = torch.zeros((unique, *like.block.shape[1:])), torch.zeros((unique, like.row_slots.shape[1]))

    def rows(self, at: Places, passed: torch.Tensor, admitted: torch.Tensor) -> torch.Tensor:
        if self._model.load is not None:
            self._model.load.sent += [passed, admitted]
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
