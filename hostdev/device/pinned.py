"""Host memory for the copies of a batch, pinned where the device asks for it, and used again by later batches.

Pinning is slow and stops the device, so it is done in the first steps: slabs are as large as the largest batch so far
needs, and a quarter more, rounded to a power of two as torch would.
"""

import math
import threading
import weakref

import torch
from torch import Tensor

from hostdev.core.memory import pinned_size

_ALIGNED = 64  # bytes: a cache line


class Slabs:
    """The slabs of one device.

    pin      pin their memory
    batches  that have one at a time, at most; 0: every batch gets new memory
    """

    def __init__(self, *, pin: bool, batches: int) -> None:
        self.pin, self.batches = pin, batches
        self._free: list[Tensor] = []
        self._made: list[weakref.ref[Tensor]] = []  # one that an error has kept from coming back is made again
        self._bytes = 0  # of each
        self._lock = threading.Lock()

    def take(self, nbytes: int = 0) -> "Slab":
        """Return memory for a batch that needs about so much; `release` gives it back."""
        if not self.batches:
            return self.loose()
        with self._lock:
            self._grow(nbytes)
            return Slab(self, self._free.pop() if self._free else None)

    def loose(self) -> "Slab":
        """Return memory that nobody gives back: torch keeps pinned memory until the copies from it are done."""
        return Slab(self, None)

    def allocate(self, nbytes: int) -> Tensor:
        """Return bytes of memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.pin)

    def give_back(self, memory: Tensor | None, used: int) -> None:
        """Take in a slab's memory; the device is done with it."""
        if not self.batches:
            return
        with self._lock:
            if memory is not None and memory.numel() == self._bytes:
                self._free.append(memory)
            self._grow(used)

    def _grow(self, nbytes: int) -> None:
        """Make slabs: those that are missing, or larger ones in place of all."""
        if nbytes > self._bytes:
            self._bytes = pinned_size(nbytes)
            self._free, self._made = [], []
        self._made = [made for made in self._made if made() is not None]
        for _ in range(self.batches - len(self._made)):
            self._free.append(self.allocate(self._bytes))
            self._made.append(weakref.ref(self._free[-1]))


class Slab:
    """The host memory of one batch; any thread may ask for a part of it."""

    def __init__(self, slabs: Slabs, memory: Tensor | None) -> None:
        self._slabs, self._memory = slabs, memory
        self._used = 0
        self._lock = threading.Lock()

    def buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory without initial values, from which a copy need not wait."""
        if not self._slabs.batches:
            return torch.empty(shape, dtype=dtype, device="cpu")
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            start = self._used
            self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        if self._memory is None or start + nbytes > self._memory.numel():  # the largest batch so far
            return self._slabs.allocate(nbytes).view(dtype).view(shape)
        return self._memory[start : start + nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Give the memory back; nobody reads what is there from now on."""
        memory, self._memory = self._memory, None
        self._slabs.give_back(memory, self._used)
