"""Operations: torch's CPU kernels on hidden memory, queued in the current stream; copies between devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .memory import (
    CPU,
    NAME,
    Buffer,
    allocate,
    aten,
    buffer_of,
    contiguous,
    hidden,
    pin,
    pinned_memory,
    set_storage,
)
from .schedule import (
    Memory,
    Queue,
    Task,
    current_device,
    current_queue,
    enqueue,
    finish,
    let_change,
    make_wait,
    queue_of,
    wait,
)
from .settings import counters


def launch(name: str, run: Callable[[], object], queue: Queue, *arguments: Any) -> Task:
    """Queue a task with work; arguments as for `enqueue`."""
    task = enqueue(name, run, queue, *arguments)
    counters.count_launch(name)
    return task


def is_here(value: object) -> bool:
    """Return whether a value is a tensor on a simulated device."""
    return isinstance(value, Tensor) and value.device.type == NAME


# -- any operation ---------------------------------------------------------------------------------------------------
class _Schema:
    """The relevant parts of an operation's schema.

    view     only makes views
    written  the arguments that it changes, by position and name
    outs     of these, those of `out=`
    fresh    it returns new tensors
    tensors  the positions of tensors
    """

    def __init__(self, op: Any) -> None:
        arguments, returns = op._schema.arguments, op._schema.returns
        aliases = [each.alias_info for each in returns]
        self.view = any(alias is not None and not alias.is_write for alias in aliases)
        self.written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
        self.outs = [(i, name) for i, name in self.written if arguments[i].is_out]
        self.fresh = any(alias is None for alias in aliases)
        self.tensors = {i for i, a in enumerate(arguments) if a.type.kind() == "TensorType"}
        self.returns = len(returns)
        if self.fresh and not all(alias is None for alias in aliases):
            raise NotImplementedError(f"{op} returns both new tensors and its arguments")


_schemas: dict[Any, _Schema] = {}


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(each, function) for each in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _meta_of(tensor: Tensor) -> Tensor:
    if not is_here(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Call:
    """One call of an operation: its arguments, and tensors over the same memory for tasks."""

    def __init__(self, op: Any, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args = tuple(  # a number in a tensor's place has lost its wrapping on the way here
            torch.tensor(value) if i in schema.tensors and isinstance(value, (int, float)) else value
            for i, value in enumerate(args)
        )
        self.op, self.schema, self.args, self.kwargs = op, schema, args, kwargs
        self.scalars: list[tuple[Tensor, int]] = []  # on the CPU, and their versions
        self.here = [tensor for tensor in _tensors([*args, *kwargs.values()]) if is_here(tensor)]
        devices = {tensor.device.index for tensor in self.here}
        if len(devices) > 1:
            raise RuntimeError(f"{op}: expected all tensors on the same device, but they are on {sorted(devices)}")
        self.device = devices.pop() if devices else _index(kwargs.get("device"))
        for i, name in schema.outs:
            self._resize(i, name)
        self.targets = _tensors([self._argument(i, name) for i, name in schema.written])
        self.reads = [buffer_of(tensor) for tensor in self.here]
        self.writes: list[Memory] = [buffer_of(tensor) for tensor in self.targets]
        self.hidden_args = _map(args, self._hide)
        self.hidden_kwargs = {key: _map(value, self._hide) for key, value in kwargs.items()}
        if "device" in kwargs:
            self.hidden_kwargs["device"] = torch.device("cpu")

    def _argument(self, i: int, name: str) -> Any:
        return self.args[i] if i < len(self.args) else self.kwargs.get(name)

    def _hide(self, tensor: Tensor) -> Tensor:
        if is_here(tensor):
            return hidden(tensor)
        if tensor.dim():
            shape = tuple(tensor.shape)
            raise RuntimeError(f"{self.op}: expected all tensors on {NAME}, but one of shape {shape} is on the CPU")
        self.scalars.append((tensor, tensor._version))  # not cloned: torch promotes types by what it is
        return tensor

    def _resize(self, i: int, name: str) -> None:
        out = self._argument(i, name)
        if isinstance(out, Tensor) and not out.numel():  # of another shape; torch allows it for empty ones
            self.shapes()
            size = tuple(self._meta_outs[name].shape)
            if size != out.shape:
                resize(out, size)

    def shapes(self) -> Any:
        """Return the results as meta tensors."""
        args = _map(self.args, _meta_of)
        kwargs = {key: _map(value, _meta_of) for key, value in self.kwargs.items()}
        self._meta_outs = kwargs
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        with torch.no_grad():
            return self.op(*args, **kwargs)

    def work(self) -> Callable[[], Any]:
        """Return the task's work. It must not hold the tensors, which may be freed before it runs."""
        kernel, args, kwargs, scalars = (
            _kernels.get(self.op, self.op),
            self.hidden_args,
            self.hidden_kwargs,
            self.scalars,
        )

        def run() -> Any:
            for tensor, version in scalars:
                if tensor._version != version:
                    raise RuntimeError("a scalar in host memory was changed before the device had read it")
            return kernel(*args, **kwargs)

        return run

    def launch(self, run: Callable[[], object], outs: list[Buffer]) -> None:
        """Queue the call."""
        launch(str(self.op), run, current_queue(self.device), self.reads, [*self.writes, *outs])


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation that has a CPU kernel."""
    schema = _schemas.get(op)
    if schema is None:
        schema = _schemas[op] = _Schema(op)
    if schema.view:
        return op.redispatch(CPU, *args, **kwargs)  # sizes and strides only
    call = _Call(op, schema, args, kwargs)
    if schema.written and not schema.fresh:
        call.launch(call.work(), [])
        if schema.returns > 1:
            return tuple(call.targets)
        return call.targets[0] if schema.returns else None
    if not schema.returns:
        call.launch(call.work(), [])
        return None
    try:
        specs = call.shapes()
    except Exception as error:
        text = str(error).lower()
        if not (isinstance(error, NotImplementedError) or "meta" in text or "fake" in text):
            raise
        return _synchronous(call)
    outs = _map(
        specs,
        lambda t: allocate(tuple(t.shape), t.stride(), t.dtype, call.device) if t.device.type == "meta" else t,
    )
    flat = _tensors(outs)
    work, targets = call.work(), [hidden(tensor) for tensor in flat]

    def run() -> None:
        for target, value in zip(targets, _tensors(work()), strict=True):
            target.copy_(value)

    call.launch(run, [buffer_of(tensor) for tensor in flat])
    return outs


def _synchronous(call: _Call) -> Any:
    """Run an operation whose result's shape depends on values or is unknown: the host waits for it."""
    work, found = call.work(), []
    call.launch(lambda: found.append(work()), [])
    finish(current_queue(call.device), f"shape of {call.op}")

    def moved(value: Tensor) -> Tensor:
        out = allocate(tuple(value.shape), value.stride(), value.dtype, call.device)
        hidden(out).copy_(value)
        return out

    return _map(found[0], moved)


def _sqrt(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return correctly rounded square roots, as accelerators do; torch's CPU kernel does not."""
    y = torch.from_numpy(np.sqrt(x.numpy())) if x.dtype in (torch.float32, torch.float64) else x.sqrt()
    return y if out is None else out.copy_(y)


_kernels = {aten.sqrt.default: _sqrt, aten.sqrt.out: _sqrt, aten.sqrt_.default: lambda x: _sqrt(x, out=x)}


def autocast(op: Any) -> Callable[..., Any]:
    """Return the operation with autocast's precision."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def lower(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = torch.get_autocast_dtype(NAME)
            return op(*_map(args, lambda t: t.to(dtype) if t.dtype == torch.float32 else t), **kwargs)

    return lower


# -- memory and copies -----------------------------------------------------------------------------------------------
def _index(device: torch.device | None) -> int:
    return current_device() if device is None or device.index is None else device.index


def empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    size = tuple(size)
    return allocate(size, contiguous(size, memory_format), dtype or torch.get_default_dtype(), _index(device))


def empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return allocate(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), _index(device))


def resize(tensor: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    size = tuple(size)
    out = allocate(size, contiguous(size, memory_format), tensor.dtype, tensor.device.index)
    source, target = hidden(tensor).reshape(-1), hidden(out).view(-1)
    both = min(tensor.numel(), out.numel())
    queue = current_queue(tensor.device.index)
    launch("resize", lambda: target[:both].copy_(source[:both]), queue, [buffer_of(tensor)], [buffer_of(out)])
    set_storage(tensor, out.untyped_storage(), size, out.stride())
    return tensor


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between any two devices."""
    if not target.numel():
        return target
    if is_here(source) and is_here(target):
        _copy_on_device(source, target)
    elif is_here(target):
        _copy_to_device(source, target, non_blocking)
    else:
        _copy_to_host(source, target, non_blocking)
    return target


def _copy_on_device(source: Tensor, target: Tensor) -> None:
    values, out = hidden(source), hidden(target)
    queue, other = current_queue(source.device.index), current_queue(target.device.index)
    if other is not queue:
        make_wait(queue, enqueue("event", None, other))
    task = launch("copy", lambda: out.copy_(values), queue, [buffer_of(source)], [buffer_of(target)])
    if other is not queue:
        make_wait(other, task)


def _copy_to_device(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    out, queue, memory = hidden(target), current_queue(target.device.index), pinned_memory(source)
    name, writes = "host to device", [buffer_of(target)]
    if non_blocking and memory is not None:
        values = source.detach()  # read when the task runs
        launch(name, lambda: out.copy_(values), queue, [memory], writes, values)
        return
    values = source.detach().clone()  # a driver has read pageable memory when the call returns
    task = launch(name, lambda: out.copy_(values), queue, [memory] if memory is not None else [], writes)
    if non_blocking:
        counters.count_wait("copy of pageable memory")  # a driver may wait; what relies on that is wrong
    else:
        wait(task, "copy to device")


def _copy_to_host(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    values, out, queue, memory = hidden(source), target.detach(), current_queue(source.device.index), None
    if non_blocking:
        memory = pinned_memory(target)
    if memory is not None:
        let_change(memory)
        if memory.at_rest() and out.is_contiguous():
            out.view(-1).view(torch.uint8).fill_(0xFF)  # until the host has waited there is nothing
    writes = [memory] if memory is not None else []
    task = launch("device to host", lambda: out.copy_(values), queue, [buffer_of(source)], writes)
    if memory is None:
        wait(task, "copy to host")


def local_scalar(tensor: Tensor) -> Any:
    values, queue, found = hidden(tensor), current_queue(tensor.device.index), []
    task = launch("item", lambda: found.append(values.item()), queue, [buffer_of(tensor)])
    wait(task, "item")
    return found[0]


def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    buffer_of(tensor).recorded.add(queue_of(stream.stream_id))


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return pinned_memory(tensor) is not None


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    return pin(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor))


# -- registration ----------------------------------------------------------------------------------------------------
_aten, _any = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")  # they live as long as this


def register() -> None:
    """Register all operations with torch's dispatcher."""
    for name, function in {
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "resize_": resize,
        "_copy_from": copy_from,
        "_local_scalar_dense": local_scalar,
        "record_stream": record_stream,
    }.items():
        _aten.impl(name, function, "PrivateUse1")
    for op in (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor):
        _aten.impl(f"set_.{op._overloadname}", partial(op.redispatch, CPU), "PrivateUse1")
    _aten.impl("is_pinned", is_pinned, "CPU")
    _aten.impl("_pin_memory", pin_memory, "CPU")
    _any.fallback(fallback, "PrivateUse1")
    _any.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for packet in (aten.linear, aten.matmul, aten.mm, aten.addmm, aten.bmm, aten.mv):
        op = packet.default
        _aten.impl(op._schema.name.removeprefix("aten::"), autocast(op), "AutocastPrivateUse1")
