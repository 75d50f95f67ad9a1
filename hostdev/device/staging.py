"""Asynchronous copies between host memory and the device.

An accelerator uses pinned memory, a copy stream in each direction, a stream for results, and events. On the CPU device
nothing is copied: tensors use the host memory itself.

Host buffers for a batch's copies are pinned if the device needs it. Pinning is slow and stalls the device, so the first
steps pin buffers, which later steps use again. A buffer has the size of the largest batch so far plus a quarter,
rounded up to a power of two as torch does.
"""

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.memory import pinned_size
from hostdev.core.primitive import OpLog, Primitive
from hostdev.device.backend import is_accelerator
from hostdev.device.ops import get_ops

_ALIGNED = 64  # bytes: a cache line


class PinnedBuffers:
    """The buffers for one device's copies.

    Args:
        pin: Whether to pin the buffers' memory.
        batches: Maximum number of batches that hold a buffer at once; 0 gives every batch new memory.
    """

    def __init__(self, *, pin: bool, batches: int) -> None:
        self.pin, self.batches = pin, batches
        self._free: list[Tensor] = []
        self._made: list[weakref.ref[Tensor]] = []  # weak references: if an error loses a buffer, a new one replaces it
        self._bytes = 0  # size of each buffer
        self._lock = threading.Lock()

    def take(self, nbytes: int = 0) -> "PinnedBuffer":
        """Return memory for a batch that needs about `nbytes`; `PinnedBuffer.release` gives it back."""
        if not self.batches:
            return self.loose()
        with self._lock:
            self._grow(nbytes)
            return PinnedBuffer(self, self._free.pop() if self._free else None)

    def loose(self) -> "PinnedBuffer":
        """Return memory that need not be released: torch keeps pinned memory until copies from it are done."""
        return PinnedBuffer(self, None)

    def allocate(self, nbytes: int) -> Tensor:
        """Return `nbytes` of new memory, pinned if the device needs it."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.pin)

    def give_back(self, memory: Tensor | None, used: int) -> None:
        """Take back a buffer's memory, which the device must have stopped using; the batch needed `used` bytes."""
        if not self.batches:
            return
        with self._lock:
            if memory is not None and memory.numel() == self._bytes:
                self._free.append(memory)
            self._grow(used)

    def _grow(self, nbytes: int) -> None:
        """Allocate missing buffers; if `nbytes` exceeds their size, replace all buffers by larger ones."""
        if nbytes > self._bytes:
            self._bytes = pinned_size(nbytes)
            self._free, self._made = [], []
        self._made = [made for made in self._made if made() is not None]
        for _ in range(self.batches - len(self._made)):
            self._free.append(self.allocate(self._bytes))
            self._made.append(weakref.ref(self._free[-1]))


class PinnedBuffer:
    """The host memory of one batch; any thread may allocate a part of it."""

    def __init__(self, pinned_buffers: PinnedBuffers, memory: Tensor | None) -> None:
        self._slabs, self._memory = pinned_buffers, memory
        self._used = 0
        self._lock = threading.Lock()

    def buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized tensor in host memory, for an asynchronous copy."""
        if not self._slabs.batches:
            return torch.empty(shape, dtype=dtype, device="cpu")
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            start = self._used
            self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        if self._memory is None or start + nbytes > self._memory.numel():  # no buffer, or the largest batch so far
            return self._slabs.allocate(nbytes).view(dtype).view(shape)
        return self._memory[start : start + nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Give the memory back for other batches; tensors in it must not be used any more."""
        memory, self._memory = self._memory, None
        self._slabs.give_back(memory, self._used)


class Staging:
    """The copy streams of one device. Any thread may use them; each tensor belongs to one batch.

    Args:
        device: The device of the dense layers.
        log: Receives the copies' durations.
        batches: Maximum number of batches that hold a pinned buffer at once.
        streams: The module with Stream, Event, stream and current_stream; None for torch's module of the device.
    """

    def __init__(
        self, device: torch.device, log: OpLog | None = None, *, batches: int = 1, streams: Any = None
    ) -> None:
        self.device = torch.empty(0, device=device).device  # the device with its index
        self._copy_down = Primitive("HostToDevice", _to_device, log=log)
        self._copy_up = Primitive("DeviceToHost", _to_host, log=log)
        self.copies = is_accelerator(device) or streams is not None
        self.pinned_buffers = PinnedBuffers(pin=is_accelerator(device), batches=batches if self.copies else 0)
        if self.copies:
            self._streams = streams or torch.get_device_module(device)
            self._down, self._up, self._results = (self._streams.Stream(device) for _ in range(3))
            self._event = _make_event_factory(self._streams)

    def enter_thread(self) -> None:
        """Make the device current in a new thread, in which the first device would otherwise be current."""
        if self.pinned_buffers.pin:
            torch.accelerator.set_device_index(self.device)

    def send(self, tensors: Sequence[Tensor], memory: PinnedBuffer) -> tuple[list[Tensor], Any]:
        """Copy tensors to the device; return the copies and an event for `await_sent`. On the CPU, nothing is copied.

        Args:
            tensors: Tensors in host memory.
            memory: The batch's pinned buffer. Tensors that are not in pinned memory are copied there first.
        """
        if not self.copies:
            return list(tensors), None
        with self._streams.stream(self._down):
            return self._copy_down(
                [self._stage(tensor, memory) for tensor in tensors], self.device
            ), self._record_event()

    def patch(self, rows: Tensor, positions: npt.NDArray[np.int32], late: Tensor, memory: PinnedBuffer) -> Any:
        """Send rows `late` [L, ...] to positions [L] of `rows`, which were sent before; return an event."""
        with self._streams.stream(self._down):
            host = [self._stage(torch.from_numpy(positions), memory), self._stage(late, memory)]
            at, values = self._copy_down(host, self.device)
            get_ops(self.device).place(rows, at, values)
            return self._record_event()

    def await_sent(self, marks: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Make the device's current stream wait for sent tensors; the calling thread does not wait."""
        if not self.copies:
            return
        stream = self._streams.current_stream(self.device)
        for mark in marks:
            stream.wait_event(mark)
        for tensor in tensors:  # the allocator must not reuse the tensor before this stream is done with it
            tensor.record_stream(stream)

    def receive(self, tensors: Sequence[Tensor], memory: PinnedBuffer) -> tuple[list[Tensor], Any]:
        """Copy tensors of the current stream to host memory; return the copies and an event for `await_event`."""
        return self._receive(tensors, memory, self._up) if self.copies else (list(tensors), None)

    def pick(self, wanted: Sequence[tuple[Tensor, npt.NDArray[np.int32]]], memory: PinnedBuffer) -> list[Tensor]:
        """Return, for each tensor on an accelerator, its rows at the given positions [L], for `receive` to copy.

        The tensors belong to the current stream. Rows are selected in the stream of `receive`, so the step does not
        wait for this.
        """
        self._up.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._up):
            different = {id(positions): positions for _, positions in wanted}  # a group's tables share positions
            host = [self._stage(torch.from_numpy(positions), memory) for positions in different.values()]
            at = dict(zip(different, self._copy_down(host, self.device), strict=True))
            picked = [tensor.index_select(0, at[id(positions)]) for tensor, positions in wanted]
            for tensor, _ in wanted:
                tensor.record_stream(self._up)
            return picked

    def receive_results(self, tensors: Sequence[Tensor], memory: PinnedBuffer) -> tuple[list[Tensor], Any]:
        """Receive small, urgent tensors as `receive` does, but in a separate stream, not behind larger copies."""
        return self._receive(tensors, memory, self._results, timed=False) if self.copies else (list(tensors), None)

    def _receive(
        self, tensors: Sequence[Tensor], memory: PinnedBuffer, stream: Any, *, timed: bool = True
    ) -> tuple[list[Tensor], Any]:
        stream.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(stream):
            host = [memory.buffer(*tensor.shape, dtype=tensor.dtype) for tensor in tensors]
            (self._copy_up if timed else _to_host)(host, tensors)
            for tensor in tensors:  # the allocator must not reuse the tensor before it is copied
                tensor.record_stream(stream)
            return host, self._record_event()

    def await_event(self, mark: Any) -> None:
        """Block this thread until the device has passed an event."""
        if mark is not None:
            mark.synchronize()

    def mark(self) -> Any:
        """Record an event in the device's current stream, for `await_event`; None on the CPU."""
        return self._record_event() if self.copies else None

    def clock(self) -> Any:
        """Record and return a timing event in the current stream, for `nanoseconds`; on the CPU, return the time."""
        if not self.copies:
            return time.perf_counter_ns()
        event = self._event(enable_timing=True)
        event.record(self._streams.current_stream(self.device))
        return event

    def nanoseconds(self, begin: Any, end: Any) -> int:
        """Return the time between two results of `clock`, which the device must have passed."""
        return int(begin.elapsed_time(end) * 1e6) if self.copies else int(end - begin)

    def _stage(self, tensor: Tensor, memory: PinnedBuffer) -> Tensor:
        """Return the tensor, or a copy of it in pinned memory, so that it can be copied asynchronously."""
        if not self.pinned_buffers.pin or tensor.is_pinned():
            return tensor
        return memory.buffer(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def _record_event(self) -> Any:
        event = self._event()
        event.record(self._streams.current_stream(self.device))
        return event


def _make_event_factory(streams: Any) -> Callable[..., Any]:
    """Return a factory of events; threads sleep instead of spinning while they wait, if the backend supports it."""
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
