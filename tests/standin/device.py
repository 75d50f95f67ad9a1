"""The device's module for torch, with Stream, Event and their registration for the whole process."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import operations
from .memory import NAME, allocate, allocated, pin
from .schedule import (
    Queue,
    current_device,
    current_queue,
    defaults,
    enqueue,
    finish,
    finish_all,
    make_wait,
    new_queue,
    poll,
    queue_of,
    set_current_device,
    set_current_queue,
    wait,
)
from .settings import config, counters

_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


class Stream(torch.Stream):
    """A new stream, or the stream with the given `stream_id`."""

    queue: Queue

    def __new__(cls, device: Any = None, priority: int = 0, stream_id: int | None = None) -> "Stream":
        queue = new_queue(_index(device)) if stream_id is None else queue_of(stream_id)
        self = super().__new__(cls, stream_id=queue.number, device_index=queue.device, device_type=_TYPE)
        self.queue = queue
        return self

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        Event().record(stream).wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        finish(self.queue, "stream.synchronize")

    def query(self) -> bool:
        return poll(self.queue.tail)

    def __enter__(self) -> "Stream":
        self._context = _on(self)
        self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


@contextlib.contextmanager
def _on(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream and its device current in this thread."""
    if stream is None:
        yield
        return
    queue = queue_of(stream.stream_id)
    device, before = set_current_device(queue.device), set_current_queue(queue)
    try:
        yield
    finally:
        set_current_queue(before)
        set_current_device(device)


_torch_event = torch.Event


class Event(torch.Event):
    """An event in a stream. `torch.Event` is this class; for other devices it still is torch's."""

    def __new__(
        cls, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        if device is not None and torch.device(device).type != NAME:
            return _torch_event(device, enable_timing=enable_timing)
        self = super().__new__(cls, torch.device(NAME, _index(device)), enable_timing=enable_timing)
        self._timing, self._task, self._index = enable_timing, None, _index(device)
        return self

    def record(self, stream: torch.Stream | None = None) -> "Event":
        queue = current_queue(self._index) if stream is None else queue_of(stream.stream_id)
        self._task = enqueue("event", None, queue)
        return self

    def wait(self, stream: torch.Stream | None = None) -> None:
        if self._task is not None:
            make_wait(current_queue(self._index) if stream is None else queue_of(stream.stream_id), self._task)

    def synchronize(self) -> None:
        wait(self._task, "event.synchronize")

    def query(self) -> bool:
        return poll(self._task)

    def elapsed_time(self, other: "Event") -> float:
        passed = [event._timing and event._task is not None and event._task.done for event in (self, other)]
        if not all(passed):
            raise RuntimeError("both events need enable_timing, and to have been recorded and passed")
        return max((other._task.end - self._task.end) * 1e3, 1e-6)


class Module:
    """The module that `torch.get_device_module` returns."""

    Stream, Event = Stream, Event
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: config.devices)
    current_device = staticmethod(current_device)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_device_name = staticmethod(lambda device=None: "a simulated accelerator")
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    memory_allocated = staticmethod(lambda device=None: allocated(_index(device)))
    max_memory_allocated = staticmethod(lambda device=None: counters.device_peak_bytes)
    stream = staticmethod(_on)

    class device:  # noqa: N801
        """A context that makes a device current in this thread."""

        def __init__(self, device: Any) -> None:
            self._index = _index(device)

        def __enter__(self) -> None:
            self._before = set_current_device(self._index)

        def __exit__(self, *exception: Any) -> None:
            set_current_device(self._before)

    @staticmethod
    def set_device(device: Any) -> None:
        set_current_device(_index(device))

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return config.total_bytes - allocated(_index(device)), config.total_bytes

    @staticmethod
    def current_stream(device: Any = None) -> Stream:
        return Stream(stream_id=current_queue(_index(device)).number)

    @staticmethod
    def default_stream(device: Any = None) -> Stream:
        return Stream(stream_id=defaults[_index(device)].number)

    @staticmethod
    def set_stream(stream: torch.Stream) -> None:
        queue = queue_of(stream.stream_id)
        set_current_device(queue.device)
        set_current_queue(queue)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        finish_all(device=_index(device))


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _pinning(create: Any) -> Any:
    """Return a factory of CPU tensors that supports `pin_memory`; torch's own would need CUDA."""

    def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        out = create(*args, **kwargs)
        return pin(out, poison=create.__name__.startswith("empty")) if pin_memory else out

    return created


_new_storage = torch.UntypedStorage.__new__


def _storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is not None and torch.device(device).type == NAME:  # torch's own would read a null pointer
        nbytes = int(args[0]) if args else 0
        return allocate((nbytes,), (1,), torch.uint8, _index(device)).untyped_storage()
    return _new_storage(cls, *args, **kwargs) if device is None else _new_storage(cls, *args, device=device, **kwargs)


_tensor_to = torch.Tensor.to


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to` whose default index is this thread's device; torch's is always 0."""
    named = args and isinstance(args[0], (str, torch.device)) and torch.device(args[0]) == torch.device(NAME)
    if current_device() and named:
        args = (torch.device(NAME, current_device()), *args[1:])
    return _tensor_to(tensor, *args, **kwargs)


_run_backward = torch.autograd._engine_run_backward


def _backward(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass in this thread, on its stream; torch's thread for a device uses only the default stream."""
    with torch.autograd.set_multithreading_enabled(False):
        return _run_backward(*args, **kwargs)


def _exchange(device: int) -> int:
    return set_current_device(device)


_hook, _guard, _module = _Hook(), _Guard(), Module()  # torch keeps no references
_setup_privateuseone_for_python_backend(NAME, _module, _hook, _guard)
operations.register()
for _name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided", "tensor"):
    setattr(torch, _name, _pinning(getattr(torch, _name)))
torch.UntypedStorage.__new__ = staticmethod(_storage)
torch.Tensor.to = _to
torch.Event = Event
torch.autograd._engine_run_backward = _backward
torch._C._accelerator_synchronizeDevice = lambda index: Module.synchronize(index)
torch._C._accelerator_getStream = lambda index: Module.current_stream(index)
torch._C._accelerator_setStream = Module.set_stream
torch._C._accelerator_getDeviceIndex = current_device
torch._C._accelerator_setDeviceIndex = Module.set_device
torch._C._accelerator_exchangeDevice = torch._C._accelerator_maybeExchangeDevice = _exchange
torch._C._accelerator_getMemoryInfo = Module.mem_get_info
