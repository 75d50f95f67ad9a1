"""Gradients of parameters that every rank has, added up over all micro-batches in the order of the tree.

Each rank owns a slice of a bucket's elements: it is given that slice of every node, adds them up, and gives the sum to
all. That moves what an all-reduce by a ring moves; the order of the additions does not depend on the ranks. A bucket is
on its way as soon as the last micro-batch's backward pass has brought all of its gradients, as in
torch.nn.parallel.DistributedDataParallel (Li et al., VLDB 2020).
"""

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hostdev.core.micro_batches import Node, TreeSum, nodes_of
from hostdev.parallel.ranks import Channel, Ranks

BUCKET_BYTES = 4 << 20
Grads = list[Tensor | None]


def add_lists(left: Grads, right: Grads) -> Grads:
    """Add in place; what is None counts as nothing."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def tree_all_reduce(
    channel: Channel, parts: Sequence[Node[Tensor]], nodes: Sequence[Sequence[tuple[int, int]]]
) -> Tensor:
    """Return the sum over all micro-batches of what ranks have for their nodes, on all ranks the same.

    parts  this rank's, each float32 [n] in host memory
    nodes  (start, size) of the nodes of every rank
    """
    values = [part.value for part in parts if part.value is not None]
    n, W = len(values[0]), channel.ranks
    edges = [n * rank // W for rank in range(W + 1)]
    widths = [edges[rank + 1] - edges[rank] for rank in range(W)]
    mine = widths[channel.rank]
    flat = values[0]
    if len(values) > 1:
        flat = torch.cat([value[edges[rank] : edges[rank + 1]] for rank in range(W) for value in values])
    receive = [mine * len(each) for each in nodes]
    come = channel.all_to_all(flat, [width * len(values) for width in widths], receive)
    tree: TreeSum[Tensor] = TreeSum(lambda left, right: left.add_(right))
    at = 0
    for each in nodes:
        for start, size in each:
            tree.put(Node(start, size, come[at : at + mine]))
            at += mine
    total = tree.total()
    assert total is not None
    return channel.all_to_all(total.repeat(W), [mine] * W, widths)


class DenseGradients:
    """The parameters' gradients of one step after the other.

    ranks       that compute the micro-batches
    parameters  those that have gradients, on all ranks the same
    count       micro-batches of a step on each rank
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor], count: int) -> None:
        self._channel, self._count = ranks["dense"], count
        self.parameters = list(parameters)
        self._first = ranks.rank * count
        self._nodes = [nodes_of(rank * count, (rank + 1) * count) for rank in range(ranks.size)]
        self._buckets = _buckets(self.parameters)
        self._bucket_of = {number: b for b, bucket in enumerate(self._buckets) for number in bucket}
        self._worker = ThreadPoolExecutor(1, "hostdev-dense")
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_came, this, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self.parameters)
        ]
        self._may_lead = False  # each gradient comes once with a micro-batch, so that it is whole when it comes
        self._came = [0] * len(self.parameters)
        self._begin()

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._worker.shutdown(wait=False)

    def _begin(self) -> None:
        self._trees: list[TreeSum[Grads]] = [TreeSum(add_lists) for _ in self._buckets]
        self._totals: list[Future[Tensor]] = []
        self._next = self._first
        self._missing: list[set[int]] | None = None  # of each bucket in the last micro-batch

    def expect_last(self) -> None:
        """The backward pass that comes is of the step's last micro-batch here."""
        if self._may_lead:
            self._missing = [set(bucket) for bucket in self._buckets]

    def came(self, number: int) -> None:
        """A parameter's gradient has come."""
        self._came[number] += 1
        if self._missing is not None:
            if self._came[number] > 1:
                raise ValueError(
                    "a second backward pass of a micro-batch, where the steps before had one: call backward() once"
                )
            self._missing[self._bucket_of[number]].discard(number)
            while len(self._totals) < len(self._buckets) and not self._missing[len(self._totals)]:
                self._send(len(self._totals))

    def put(self) -> list[bool] | None:
        """Take a micro-batch's gradients; with the step's last one here, return which have come to this rank."""
        self._may_lead = max(self._came, default=0) <= 1
        last = self._next == self._first + self._count - 1
        for bucket in range(len(self._totals), len(self._buckets)):
            if last:
                self._send(bucket)
            else:
                self._take(bucket)
        self._next += 1
        self._came = [0] * len(self.parameters)
        if not last:
            return None
        self._missing = None
        return [self._has[number] for number in range(len(self.parameters))]

    def _take(self, bucket: int) -> None:
        parameters = [self.parameters[number] for number in self._buckets[bucket]]
        self._trees[bucket].put(Node(self._next, 1, [parameter.grad for parameter in parameters]))
        for parameter in parameters:
            parameter.grad = None

    def _send(self, bucket: int) -> None:
        """Let a bucket be on its way; all ranks do so in the same order."""
        self._take(bucket)
        if not bucket:
            self._has = [False] * len(self.parameters)
        parts = []
        for node in self._trees[bucket].nodes:
            pieces = []
            for number, grad in zip(self._buckets[bucket], node.value or [], strict=True):
                self._has[number] |= grad is not None
                like = self.parameters[number]
                pieces.append((torch.zeros_like(like, requires_grad=False) if grad is None else grad).reshape(-1))
            parts.append(Node(node.start, node.size, torch.cat(pieces).float()))
        self._totals.append(self._worker.submit(self._exchange, parts, _mark(parts[0].value)))

    def _exchange(self, parts: Sequence[Node[Tensor]], mark: Any) -> Tensor:
        if mark is not None:
            mark.synchronize()
        here = [part._replace(value=part.value.cpu()) for part in parts if part.value is not None]
        return tree_all_reduce(self._channel, here, self._nodes)

    def small(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of a few numbers, float32 [n], after the step's gradients."""
        parts = [Node(start, size, values.cpu() if not place else torch.zeros(len(values)))
                 for place, (start, size) in enumerate(self._nodes[self._channel.rank])]  # fmt: skip
        return self._worker.submit(tree_all_reduce, self._channel, parts, self._nodes).result()

    def finish(self, given: Sequence[bool]) -> None:
        """Give the parameters the sums; None to those of which no rank has had a gradient."""
        for bucket, total in zip(self._buckets, self._totals, strict=True):
            flat, at = total.result(), 0
            for number in bucket:
                parameter = self.parameters[number]
                n = parameter.numel()
                grad = flat[at : at + n].view_as(parameter).to(parameter.device, parameter.dtype)
                parameter.grad = grad.add_(0.0) if given[number] else None
                at += n
        self._begin()


class DenseExchange:
    """The `DenseGradients` of the parameters that a loop reduces; knows nothing of the loop.

    ranks  that compute the micro-batches; None: there are no others
    count  micro-batches of a step on each rank
    """

    def __init__(self, ranks: Ranks | None, count: int) -> None:
        self._ranks, self._count = ranks, count
        self._current: DenseGradients | None = None

    def of(self, parameters: list[Tensor]) -> DenseGradients:
        """Return what exchanges the gradients of these parameters."""
        before = self._current
        if before is None or [id(one) for one in before.parameters] != [id(one) for one in parameters]:
            self.close()
            assert self._ranks is not None
            before = self._current = DenseGradients(self._ranks, parameters, self._count)
        return before

    def expect_last(self) -> None:
        """The backward pass that comes is of the step's last micro-batch here."""
        if self._current is not None:
            self._current.expect_last()

    def close(self) -> None:
        """Let go of the parameters."""
        if self._current is not None:
            self._current.close()
            self._current = None


def _came(held: Any, number: int, _: Tensor) -> None:
    gradients = held()
    if gradients is not None:
        gradients.came(number)


def _mark(tensor: Tensor | None) -> Any:
    """Return a mark in the device's stream, or None on the CPU."""
    if tensor is None or tensor.device.type == "cpu":
        return None
    module = torch.get_device_module(tensor.device)
    event = module.Event()
    event.record(module.current_stream(tensor.device))
    return event


def _buckets(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return the parameters' numbers in buckets, the last ones first: so their gradients come."""
    buckets: list[list[int]] = []
    have = BUCKET_BYTES
    for number in reversed(range(len(parameters))):
        if have >= BUCKET_BYTES:
            buckets.append([])
            have = 0
        buckets[-1].append(number)
        have += 4 * parameters[number].numel()
    return buckets
