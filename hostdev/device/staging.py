"""What crosses between host memory and the device's, without anybody waiting who need not.

On an accelerator: pinned memory, a copy stream each way, events. On the CPU device nothing is copied: a tensor and its
host memory are the same.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.device.backend import is_accelerator
from hostdev.primitive import OpLog, Primitive


class Staging:
    """The copy streams of one device. Any thread may call; each tensor belongs to one batch.

    device   where the dense layers run
    log      where the copies' durations go
    streams  the module with Stream, Event, stream and current_stream: torch's for the device if None
    """

    def __init__(self, device: torch.device, log: OpLog | None = None, streams: Any = None) -> None:
        self.device = device
        self._copy_down = Primitive("HostToDevice", self._to_device, log=log)
        self._copy_up = Primitive("DeviceToHost", self._to_host, log=log)
        self.copies = is_accelerator(device) or streams is not None
        if self.copies:
            self._streams = streams or torch.get_device_module(device)
            self._down, self._up = self._streams.Stream(device), self._streams.Stream(device)
            self._pin = is_accelerator(device)

    def buffer(self, *shape: int) -> Tensor:
        """Return host memory, float32 without initial values, from which a copy need not wait."""
        return torch.empty(shape, pin_memory=self.copies and self._pin)

    def send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Copy tensors to the device; return the copies and what `await_sent` takes. On the CPU, the tensors."""
        if not self.copies:
            return list(tensors), None
        with self._streams.stream(self._down):
            return self._copy_down(tensors), self._mark()

    def patch(self, rows: Tensor, positions: npt.NDArray[np.int32], late: Tensor) -> Any:
        """Put late rows [L, D] at their positions [L] into rows [U, D], sent before; return what `await_sent` takes."""
        with self._streams.stream(self._down):
            at, values = self._copy_down([torch.from_numpy(positions), late])
            rows.index_copy_(0, at.long(), values)
            return self._mark()

    def await_sent(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        """Let the device's current stream wait for what was sent; the calling thread does not."""
        if mark is None:
            return
        stream = self._streams.current_stream(self.device)
        stream.wait_event(mark)
        for tensor in tensors:  # the allocator must not give it away before this stream has used it
            tensor.record_stream(stream)

    def receive(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Copy tensors of the current stream to host memory; return the copies, and what `await_mark` takes."""
        if not self.copies:
            return list(tensors), None
        current = self._streams.current_stream(self.device)
        self._up.wait_stream(current)
        with self._streams.stream(self._up):
            return self._copy_up(tensors), self._mark()

    def await_mark(self, mark: Any) -> None:
        """Wait, in this thread, until the device has passed a mark."""
        if mark is not None:
            mark.synchronize()

    def mark(self) -> Any:
        """Return a mark in the device's current stream, for `await_mark`; None on the CPU."""
        return self._mark() if self.copies else None

    def clock(self) -> Any:
        """Return a mark in the current stream, or on the CPU the time, for `nanoseconds`."""
        if not self.copies:
            return time.perf_counter_ns()
        event = self._streams.Event(enable_timing=True)
        event.record(self._streams.current_stream(self.device))
        return event

    def nanoseconds(self, begin: Any, end: Any) -> int:
        """Return the time between two marks that the device has passed."""
        return int(begin.elapsed_time(end) * 1e6) if self.copies else int(end - begin)

    def _to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._pinned(tensor).to(self.device, non_blocking=True) for tensor in tensors]

    def _to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        received = []
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._up)  # the allocator must not give it away before it is copied
            received.append(host)
        return received

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pin and not tensor.is_pinned() else tensor

    def _mark(self) -> Any:
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event
