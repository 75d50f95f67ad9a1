"""Reusable host buffers for a batch's copies, pinned if the device needs it.

Pinning is slow and stalls the device, so the first steps pin buffers, which later steps use again. A buffer has the
size of the largest batch so far plus a quarter, rounded up to a power of two as torch does.
"""

import math
import threading
import weakref

import torch
from torch import Tensor

from hostdev.core.memory import pinned_size

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
        if self._memory is None or start + nbytes > self._memory.numel():  # this is the largest batch so far
            return self._slabs.allocate(nbytes).view(dtype).view(shape)
        return self._memory[start : start + nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Give the memory back for other batches; tensors in it must not be used any more."""
        memory, self._memory = self._memory, None
        self._slabs.give_back(memory, self._used)
