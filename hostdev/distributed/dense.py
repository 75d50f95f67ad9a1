"""All-reduce of the dense parameters' gradients over all micro-batches, by default in the order of a tree.

The gradients are grouped into buckets, and `all_reduce` sums each bucket. With `reduce_early` of `Runtime.train`, a
bucket is sent as soon as the last micro-batch's backward pass has computed all its gradients, as in
torch.nn.parallel.DistributedDataParallel (Li et al., VLDB 2020).

`DenseState` is the state of dense layers and their optimizer, in the form in which it is digested and saved.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hostdev.core.micro_batches import EXCHANGES, Node, TreeSum, get_nodes
from hostdev.distributed.all_reduce import AllReduce, Tree, make_tree
from hostdev.distributed.channel import Channel

BUCKET_BYTES = 4 << 20
Grads = list[Tensor | None]
Sum = tuple[Tensor, Any]  # a sum, and its completion event (None in host memory)


class DenseState(NamedTuple):
    """The whole state of dense layers and their optimizer, in the format of torch's `state_dict()`."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    names: Sequence[str]  # names of parameters, each once, in the optimizer's order
    buffers: Sequence[str]  # names of persistent buffers


def get_dense_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> DenseState:
    """Return the state of a network that is whole on this rank, and of its optimizer."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    numbered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return DenseState(network.state_dict(), optimizer.state_dict(), numbered, get_buffer_names(network))


def get_buffer_names(network: nn.Module) -> list[str]:
    """Return the names of a network's persistent buffers."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return [
        name for name, value in network.state_dict().items() if name not in parameters and isinstance(value, Tensor)
    ]


def take_grads(tensors: Sequence[Tensor]) -> Grads:
    """Return the gradients of tensors, and remove them from the tensors."""
    grads = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return grads


def add_lists(left: Grads, right: Grads) -> Grads:
    """Return the sums of two lists, added to the tensors of `left` in place; None counts as zero."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def broadcast_tensors(tensors: Iterable[Tensor], channel: Any) -> None:  # Any: a `Channel` or `LocalChannel`
    """Overwrite tensors with those of the channel's first rank."""
    if channel.ranks == 1:
        return  # avoids copies to and from the host
    for tensor in tensors:
        there = tensor.detach().cpu().contiguous()
        channel.broadcast(there)
        tensor.data.copy_(there)


class DenseGradients:
    """Sums the gradients of a fixed list of parameters over all micro-batches and ranks, step by step.

    Args:
        channel: Connects the ranks that have the same parameters.
        parameters: The parameters with gradients, the same on all ranks.
        count: Number of micro-batches in a step on each rank.
        exchange: How to sum over ranks; one of `EXCHANGES`.
    """

    def __init__(
        self, channel: Channel, parameters: Sequence[Tensor], count: int, exchange: str = EXCHANGES[0]
    ) -> None:
        self._channel, self._count = channel, count
        self.parameters = list(parameters)
        self._first = channel.rank * count
        self._nodes = [get_nodes(rank * count, (rank + 1) * count) for rank in range(channel.ranks)]
        self._buckets = _buckets(self.parameters)
        make: Callable[..., Tree | AllReduce] = make_tree if exchange == EXCHANGES[0] else AllReduce
        self._sums = [make(channel, self._nodes, sum(map(self._size, bucket))) for bucket in self._buckets]
        self._small: Tree | None = None
        self._bucket_of = {number: b for b, bucket in enumerate(self._buckets) for number in bucket}
        if any(parameter.dtype != torch.float32 for parameter in self.parameters):
            raise ValueError("ranks can sum float32 gradients only; keep the parameters float32, and use autocast")
        self._worker = ThreadPoolExecutor(1, "hostdev-dense", partial(_enter, channel.device))
        on_cpu = channel.device.type == "cpu"
        self._stream = None if on_cpu else torch.get_device_module(channel.device).Stream(channel.device)
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_on_gradient, this, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self.parameters)
        ]
        self._may_lead = False  # whether each parameter got at most one gradient in the previous micro-batch
        self._counts = [0] * len(self.parameters)
        self._begin()

    def close(self) -> None:
        """Remove the hooks and stop the thread."""
        for hook in self._hooks:
            hook.remove()
        self._worker.shutdown(wait=False)

    def _begin(self) -> None:
        self._trees: list[TreeSum[Grads]] = [TreeSum(add_lists) for _ in self._buckets]
        self._totals: list[Future[Sum]] = []
        self._next = self._first
        self._missing: list[set[int]] | None = None  # for each bucket, the parameters without a gradient yet

    def expect_last(self) -> None:
        """Prepare for the backward pass of the step's last micro-batch on this rank."""
        if self._may_lead:
            self._missing = [set(bucket) for bucket in self._buckets]

    def count_gradient(self, number: int) -> None:
        """Count a parameter's gradient; in the step's last micro-batch, send the buckets that are complete."""
        self._counts[number] += 1
        if self._missing is not None:
            if self._counts[number] > 1:
                raise ValueError(
                    "the last micro-batch of a step had two backward passes; call backward() once per micro-batch"
                )
            self._missing[self._bucket_of[number]].discard(number)
            while len(self._totals) < len(self._buckets) and not self._missing[len(self._totals)]:
                self._send(len(self._totals))

    def put(self) -> list[bool] | None:
        """Take a micro-batch's gradients.

        Returns:
            After the step's last micro-batch, whether each parameter got a gradient in the step. Otherwise None.
        """
        self._may_lead = max(self._counts, default=0) <= 1
        last = self._next == self._first + self._count - 1
        for bucket in range(len(self._totals), len(self._buckets)):
            if last:
                self._send(bucket)
            else:
                self._take(bucket)
        self._next += 1
        self._counts = [0] * len(self.parameters)
        if not last:
            return None
        self._missing = None
        return [self._has[number] for number in range(len(self.parameters))]

    def put_nodes(self, nodes: Sequence[Node[Grads]]) -> list[bool]:
        """Take all gradients of a step at once instead of with `put`; return whether each parameter has a gradient."""
        for bucket, numbers in enumerate(self._buckets):
            self._trees[bucket].nodes = [
                Node(start, size, None if value is None else [value[number] for number in numbers])
                for start, size, value in nodes
            ]
            self._hand_on(bucket)
        return [self._has[number] for number in range(len(self.parameters))]

    def _take(self, bucket: int) -> None:
        parameters = [self.parameters[number] for number in self._buckets[bucket]]
        self._trees[bucket].put(Node(self._next, 1, [parameter.grad for parameter in parameters]))
        for parameter in parameters:
            parameter.grad = None

    def _send(self, bucket: int) -> None:
        """Collect a bucket's gradients and submit them for summation; every rank submits buckets in the same order."""
        self._take(bucket)
        self._hand_on(bucket)

    def _hand_on(self, bucket: int) -> None:
        if not bucket:
            self._has = [False] * len(self.parameters)
        parts = []
        for node in self._trees[bucket].nodes:
            pieces = []
            for number, grad in zip(self._buckets[bucket], node.value or [], strict=True):
                self._has[number] |= grad is not None
                like = self.parameters[number]
                pieces.append((torch.zeros_like(like, requires_grad=False) if grad is None else grad).reshape(-1))
            parts.append(self._joined(bucket, pieces))
        self._trees[bucket] = TreeSum(add_lists)
        self._totals.append(self._submit(self._sums[bucket], parts))

    def _joined(self, bucket: int, pieces: Sequence[Tensor]) -> Tensor:
        """Return a node's gradients as one flat float32 tensor on their device."""
        flat = self._sums[bucket].flat
        if not len(flat) or any(piece.device != flat.device or piece.dtype != flat.dtype for piece in pieces):
            return torch.cat(list(pieces)).float()
        return torch.cat(list(pieces), out=flat)

    def _size(self, number: int) -> int:
        return self.parameters[number].numel()

    def _submit(self, tree: Tree | AllReduce, parts: Sequence[Tensor]) -> Future[Sum]:
        return self._worker.submit(self._exchange, tree, parts, _record_event(parts[0]))

    def _exchange(self, tree: Tree | AllReduce, parts: Sequence[Tensor], mark: Any) -> Sum:
        """Sum the parts over all ranks; runs in the worker's thread."""
        if self._stream is None:  # through host memory
            if mark is not None:
                mark.synchronize()
            return tree.sum([part.cpu() for part in parts]), None
        with torch.get_device_module(self._channel.device).stream(self._stream):
            if mark is not None:  # None on the CPU
                mark.wait(self._stream)
                for part in parts:
                    part.record_stream(self._stream)
            return tree.sum([part.to(self._channel.device) for part in parts]), self._stream.record_event()

    def _summed(self, found: Future[Sum]) -> Tensor:
        """Wait for a sum, and return it, ready for use on the current stream."""
        total, done = found.result()
        if done is not None:
            current = torch.get_device_module(total.device).current_stream(total.device)
            done.wait(current)
            total.record_stream(current)
        return total

    def small(self, values: Tensor) -> Tensor:
        """Sum a few numbers over all ranks, after the step's gradients; return float32 [n]."""
        if self._small is None or self._small.n != len(values):
            self._small = make_tree(self._channel, self._nodes, len(values))
        values = values.to(self._channel.device)
        parts = [values] + [torch.zeros_like(values)] * (len(self._nodes[self._channel.rank]) - 1)
        return self._summed(self._submit(self._small, parts))

    def finish(self, given: Sequence[int]) -> None:
        """Set each parameter's grad to the sum over all ranks, or to None if no rank has a gradient (`given` is 0)."""
        for bucket, total in zip(self._buckets, self._totals, strict=True):
            flat, at = self._summed(total), 0
            for number in bucket:
                parameter = self.parameters[number]
                n = parameter.numel()
                grad = flat[at : at + n].view_as(parameter).to(parameter.device, parameter.dtype)
                parameter.grad = grad if given[number] else None
                at += n
        self._begin()


class DenseExchange:
    """Holds the `DenseGradients` of a training loop, and replaces it when the loop's parameters change.

    Args:
        channel: Connects the ranks that have the same parameters; None if this rank has no parameters.
        count: Number of micro-batches in a step on each rank.
        kind: How to sum over ranks; one of `EXCHANGES`.
        others: Two channels for host memory, one to the same ranks as `channel` and one to all ranks; None if `channel`
            connects all ranks.
    """

    def __init__(
        self, channel: Channel | None, count: int, kind: str, others: tuple[Channel, Channel] | None = None
    ) -> None:
        self._channel, self._count, self._kind, self._others = channel, count, kind, others
        self._current: DenseGradients | None = None
        self._sums: dict[int, Tree] = {}  # trees over all ranks, by the number of values

    @property
    def is_of_all(self) -> bool:
        """Return whether all ranks have the same parameters."""
        return self._others is None

    def reduce_flags(self, has: Sequence[bool]) -> list[bool]:
        """Return, for each parameter, whether any of the ranks with the same parameters has a gradient for it."""
        assert self._others is not None
        [found] = np.max([self._others[0].gather(np.array(has, np.int64))], axis=1)
        return [bool(one) for one in found]

    def small(self, dense: DenseGradients, values: Tensor) -> Tensor:
        """Sum a few numbers over all ranks; return float32 [n]."""
        if self._others is None:
            return dense.small(values)
        to_all, n = self._others[1], len(values)
        if n not in self._sums:
            self._sums[n] = make_tree(to_all, [[(rank, 1)] for rank in range(to_all.ranks)], n)
        return self._sums[n].sum([values.cpu()])

    def is_new(self, parameters: list[Tensor]) -> bool:
        """Return whether the parameters differ from those of the previous step."""
        before = self._current
        return before is None or [id(one) for one in before.parameters] != [id(one) for one in parameters]

    def of(self, parameters: list[Tensor]) -> DenseGradients:
        """Return the `DenseGradients` of these parameters."""
        before = self._current
        if before is None or self.is_new(parameters):
            self.close()
            assert self._channel is not None
            before = self._current = DenseGradients(self._channel, parameters, self._count, self._kind)
        return before

    def expect_last(self) -> None:
        """Prepare for the backward pass of the step's last micro-batch on this rank."""
        if self._current is not None:
            self._current.expect_last()

    def close(self) -> None:
        """Release the parameters."""
        if self._current is not None:
            self._current.close()
            self._current = None


def _on_gradient(held: Any, number: int, _: Tensor) -> None:
    gradients = held()
    if gradients is not None:
        gradients.count_gradient(number)


def _record_event(tensor: Tensor | None) -> Any:
    """Record an event on the device's current stream and return it, or return None on the CPU."""
    if tensor is None or tensor.device.type == "cpu":
        return None
    module = torch.get_device_module(tensor.device)
    event = module.Event()
    event.record(module.current_stream(tensor.device))
    return event


def _enter(device: torch.device) -> None:
    """Make the device current in a new thread, which would otherwise use the first device."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def _buckets(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Group the parameters' indices into buckets in reverse order, the order in which backward produces gradients."""
    buckets: list[list[int]] = []
    have = BUCKET_BYTES
    for number in reversed(range(len(parameters))):
        if have >= BUCKET_BYTES:
            buckets.append([])
            have = 0
        buckets[-1].append(number)
        have += 4 * parameters[number].numel()
    return buckets
