"""What crosses between host memory and the device's, without anybody waiting who need not.

On an accelerator: pinned memory, a copy stream each way and one for results, events. On the CPU device nothing is
copied: a tensor and its host memory are the same.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.primitive import OpLog, Primitive
from hostdev.device.backend import is_accelerator
from hostdev.device.ops import ops_for
from hostdev.device.pinned import Slab, Slabs


class Staging:
    """The copy streams of one device. Any thread may call; each tensor belongs to one batch.

    device   where the dense layers run
    log      where the copies' durations go
    batches  that have host memory of their own at a time, at most
    streams  the module with Stream, Event, stream and current_stream: torch's for the device if None
    """

    def __init__(
        self, device: torch.device, log: OpLog | None = None, *, batches: int = 1, streams: Any = None
    ) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        self._copy_down = Primitive("HostToDevice", _to_device, log=log)
        self._copy_up = Primitive("DeviceToHost", _to_host, log=log)
        self.copies = is_accelerator(device) or streams is not None
        self.slabs = Slabs(pin=is_accelerator(device), batches=batches if self.copies else 0)
        if self.copies:
            self._streams = streams or torch.get_device_module(device)
            self._down, self._up, self._results = (self._streams.Stream(device) for _ in range(3))
            self._event = _sleeping_event(self._streams)

    def enter_thread(self) -> None:
        """Make the device the current one of a new thread, whose own would be the first."""
        if self.slabs.pin:
            torch.accelerator.set_device_index(self.device)

    def send(self, tensors: Sequence[Tensor], memory: Slab) -> tuple[list[Tensor], Any]:
        """Copy tensors to the device; return the copies and what `await_sent` takes. On the CPU, the tensors.

        memory  the batch's, through which tensors go that are not in it
        """
        if not self.copies:
            return list(tensors), None
        with self._streams.stream(self._down):
            return self._copy_down([self._staged(tensor, memory) for tensor in tensors], self.device), self._mark()

    def patch(self, rows: Tensor, positions: npt.NDArray[np.int32], late: Tensor, memory: Slab) -> Any:
        """Put late rows [L, ...] at their positions [L] into rows [U, ...], sent before; return a mark, as `send`."""
        with self._streams.stream(self._down):
            host = [self._staged(torch.from_numpy(positions), memory), self._staged(late, memory)]
            at, values = self._copy_down(host, self.device)
            ops_for(self.device).place(rows, at, values)
            return self._mark()

    def await_sent(self, marks: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Let the device's current stream wait for what was sent; the calling thread does not."""
        if not self.copies:
            return
        stream = self._streams.current_stream(self.device)
        for mark in marks:
            stream.wait_event(mark)
        for tensor in tensors:  # the allocator must not give it away before this stream has used it
            tensor.record_stream(stream)

    def receive(self, tensors: Sequence[Tensor], memory: Slab) -> tuple[list[Tensor], Any]:
        """Copy tensors of the current stream to host memory; return the copies, and what `await_mark` takes."""
        return self._receive(tensors, memory, self._up) if self.copies else (list(tensors), None)

    def pick(self, wanted: Sequence[tuple[Tensor, npt.NDArray[np.int32]]], memory: Slab) -> list[Tensor]:
        """Return rows of tensors of the current stream, each at positions [L], for `receive`; only where it copies.

        The step does not wait for it: it is done in the stream of `receive`.
        """
        self._up.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._up):
            different = {id(positions): positions for _, positions in wanted}  # a group's tables have the same
            host = [self._staged(torch.from_numpy(positions), memory) for positions in different.values()]
            at = dict(zip(different, self._copy_down(host, self.device), strict=True))
            picked = [tensor.index_select(0, at[id(positions)]) for tensor, positions in wanted]
            for tensor, _ in wanted:
                tensor.record_stream(self._up)
            return picked

    def receive_results(self, tensors: Sequence[Tensor], memory: Slab) -> tuple[list[Tensor], Any]:
        """Do `receive` for what is small and asked for soon, not behind larger copies."""
        return self._receive(tensors, memory, self._results, timed=False) if self.copies else (list(tensors), None)

    def _receive(
        self, tensors: Sequence[Tensor], memory: Slab, stream: Any, *, timed: bool = True
    ) -> tuple[list[Tensor], Any]:
        stream.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(stream):
            host = [memory.buffer(*tensor.shape, dtype=tensor.dtype) for tensor in tensors]
            (self._copy_up if timed else _to_host)(host, tensors)
            for tensor in tensors:  # the allocator must not give it away before it is copied
                tensor.record_stream(stream)
            return host, self._mark()

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
        event = self._event(enable_timing=True)
        event.record(self._streams.current_stream(self.device))
        return event

    def nanoseconds(self, begin: Any, end: Any) -> int:
        """Return the time between two marks that the device has passed."""
        return int(begin.elapsed_time(end) * 1e6) if self.copies else int(end - begin)

    def _staged(self, tensor: Tensor, memory: Slab) -> Tensor:
        """A tensor in memory from which a copy need not wait."""
        if not self.slabs.pin or tensor.is_pinned():
            return tensor
        return memory.buffer(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def _mark(self) -> Any:
        event = self._event()
        event.record(self._streams.current_stream(self.device))
        return event


def _sleeping_event(streams: Any) -> Callable[..., Any]:
    """Return what makes events for which a thread waits asleep, as the host has other work; not every backend can."""
    try:
        streams.Event(blocking=True)
    except TypeError:
        return cast(Callable[..., Any], streams.Event)
    return functools.partial(streams.Event, blocking=True)


def _to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def _to_host(host: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for to, tensor in zip(host, tensors, strict=True):
        to.copy_(tensor, non_blocking=True)
