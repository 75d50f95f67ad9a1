"""The device's memory, which the CPU cannot read, and pinned memory, which both can read.

New memory is full of bytes 0xFF: floats are NaN, integers -1. As with a caching allocator, memory that is given up
belongs to others at once, in the order of the stream that it was allocated on: what another stream has still to do with
it reads 0xFF, unless `record_stream` keeps it until then.
"""

import bisect
import ctypes
import threading
import weakref
from collections import deque
from functools import partial

import torch
from torch import Tensor

from .schedule import Memory, Queue, RaceError, current_queue, enqueue, lock, report
from .settings import config, counters

NAME = "standin"
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_EXTENSION = 12  # kDLExtDev, the kind of device that DLPack has for torch's PrivateUse1
aten = torch.ops.aten


class Buffer(Memory):
    """A storage's memory.

    raw       its bytes
    home      the stream that it was allocated on
    recorded  streams that `record_stream` has named
    """

    def __init__(self, nbytes: int, home: Queue) -> None:
        super().__init__()
        self.raw = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        self.home = home
        self.recorded: set[Queue] = set()

    def is_used(self) -> bool:
        """Return whether a recorded stream still uses it."""
        return any(use.queue in self.recorded and use.number > use.queue.done for use in self.uses.values())

    def __str__(self) -> str:
        return f"memory of {self.raw.numel()} bytes, allocated on {self.home},"


_freed: deque[Buffer] = deque()  # a finalizer may run anywhere, so it does no more than append
_held: list[Buffer] = []  # given up, and recorded for a stream that is not done with it
_allocated = [0] * config.devices


# -- tensors ---------------------------------------------------------------------------------------------------------
class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_kept: list[object] = []


def _empty_tensor(device: int) -> Tensor:
    """Return an empty tensor on a device of any index; torch's own function supports only index 0."""
    size, stride = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
    managed = _Managed(_DLTensor(None, _EXTENSION, device, 1, 1, 8, 1, size, stride, 0), None, None)
    _kept.append(managed)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: Tensor = torch._C._from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))
    return tensor


_empty: dict[int, Tensor] = {}


def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: int) -> Tensor:
    """Return a tensor on a device, allocated in this thread's stream there."""
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
    nbytes = extent * dtype.itemsize
    collect()
    with lock:
        if nbytes + _allocated[device] > config.total_bytes:
            raise torch.OutOfMemoryError(f"standin: out of memory: {nbytes} bytes")
        _allocated[device] += nbytes
        counters.device_bytes += nbytes
        counters.device_peak_bytes = max(counters.device_peak_bytes, counters.device_bytes)
        if device not in _empty:
            _empty[device] = _empty_tensor(device)
    buffer = Buffer(nbytes, current_queue(device))
    where = torch.device(NAME, device)
    storage = torch._C._construct_storage_from_data_pointer(buffer.raw.data_ptr(), where, nbytes)
    storage.buffer = buffer
    weakref.finalize(storage, _freed.append, buffer).atexit = False
    tensor: Tensor = aten.view.dtype.redispatch(CPU, _empty[device], dtype)  # a new one, whose storage is replaced
    set_storage(tensor, storage, size, stride)
    return tensor


def set_storage(tensor: Tensor, storage: torch.UntypedStorage, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Replace a tensor's memory."""
    aten.set_.source_Storage_storage_offset.redispatch(CPU, tensor, storage, 0, size, stride)


def buffer_of(tensor: Tensor) -> Buffer:
    """Return the memory of a tensor."""
    buffer: Buffer = tensor.untyped_storage().buffer
    return buffer


def hidden(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over a tensor's memory, for tasks."""
    raw = buffer_of(tensor).raw.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def contiguous(size: tuple[int, ...], memory_format: torch.memory_format | None = None) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return torch.empty(size, device="meta", memory_format=memory_format).stride()
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def collect() -> None:
    """Free memory that was released since the last call, and recorded memory that no stream uses any more."""
    while True:
        try:
            buffer = _freed.popleft()
        except IndexError:
            break
        with lock:
            loose = [use for use in buffer.uses.values() if not use.comes_before(buffer.home)]
            loose = [use for use in loose if use.queue not in buffer.recorded]
            _held.append(buffer)
        if config.check:
            for use in loose:
                report(RaceError(f"{buffer} is given up while {use} may still use it, without record_stream"))
        if loose and not buffer.recorded:  # the next owner writes, as far as those streams may see it
            enqueue("reuse", partial(buffer.raw.fill_, 0xFF), buffer.home)
    with lock:
        for buffer in [buffer for buffer in _held if not buffer.is_used()]:
            _held.remove(buffer)
            _allocated[buffer.home.device] -= buffer.raw.numel()
            counters.device_bytes -= buffer.raw.numel()


def allocated(device: int) -> int:
    """Return the number of bytes allocated on a device."""
    collect()
    return _allocated[device]


# -- pinned memory ---------------------------------------------------------------------------------------------------
class Pinned:
    """Pinned host memory, found by address as a driver does: arrays and tensors over it are pinned, too.

    Its ranges are used each on its own: a program may give parts of it to different copies.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.end = start, start + nbytes
        self.ranges: list[Range] = []

    def range_of(self, start: int, end: int) -> "Range":
        """Return a range of it; drop unused ranges that overlap."""
        with lock:
            found = next((each for each in self.ranges if (each.start, each.end) == (start, end)), None)
            if found is None:
                found = Range(self, start, end)
                self.ranges = [each for each in self.ranges if not (each.overlaps(found) and each.unused())]
                self.ranges.append(found)
            return found


class Range(Memory):
    """A part of pinned memory."""

    def __init__(self, pinned: Pinned, start: int, end: int) -> None:
        super().__init__()
        self._pinned, self.start, self.end = pinned, start, end

    def __str__(self) -> str:
        return f"{self.end - self.start} bytes of pinned memory of {self._pinned.end - self._pinned.start}"

    def overlaps(self, other: Memory) -> bool:
        return isinstance(other, Range) and self.start < other.end and other.start < self.end

    def _overlapping(self) -> "list[Range]":
        return [each for each in self._pinned.ranges if each.overlaps(self)]

    def check(self, name: str, queue: Queue, *, writes: bool) -> None:
        for each in self._overlapping():
            Memory.check(each, name, queue, writes=writes)

    def unused(self) -> bool:
        return super().at_rest()

    def at_rest(self) -> bool:
        return all(each.unused() for each in self._overlapping())

    def is_written(self) -> bool:
        return any(Memory.is_written(each) for each in self._overlapping())


_pinned: list[Pinned] = []  # by address
_unpinned: deque[Pinned] = deque()
_pinning = threading.Lock()


def _collect_pinned() -> None:
    while _unpinned:
        memory = _unpinned.popleft()
        at = bisect.bisect_left(_pinned, memory.start, key=lambda each: each.start)
        while _pinned[at] is not memory:
            at += 1
        del _pinned[at]


def pin(tensor: Tensor, *, poison: bool = False) -> Tensor:
    """Mark a new tensor's memory as pinned.

    poison  and fill it with 0xFF
    """
    if tensor.numel():
        storage = tensor.untyped_storage()
        if poison:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
        memory = Pinned(storage.data_ptr(), storage.nbytes())
        with _pinning:
            _collect_pinned()
            bisect.insort(_pinned, memory, key=lambda each: each.start)
        storage.pinned = memory  # so that the storage's Python object lives as long as the storage
        weakref.finalize(storage, _unpinned.append, memory).atexit = False
        counters.pinned_allocations += 1
        counters.pinned_bytes += storage.nbytes()
    return tensor


def pinned_memory(tensor: Tensor) -> Range | None:
    """Return the range of pinned memory that a CPU tensor covers; None if its memory is not pinned."""
    if not tensor.numel():
        return None
    start = tensor.data_ptr()
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    with _pinning:
        _collect_pinned()
        at = bisect.bisect_right(_pinned, start, key=lambda each: each.start) - 1
        found = _pinned[at] if at >= 0 and start < _pinned[at].end else None
    return found.range_of(start, start + extent * tensor.itemsize) if found is not None else None
