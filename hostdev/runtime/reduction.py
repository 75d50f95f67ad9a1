"""The gradients of a step's micro-batches added up, in the order of a tree: those of rows and of dense parameters."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hostdev.core.micro_batches import Node, TreeSum, nodes_of
from hostdev.parallel.dense import tree_all_reduce
from hostdev.parallel.ranks import Ranks
from hostdev.runtime.rows import Leaf

Grads = list[Tensor | None]


def _add(left: Grads, right: Grads) -> Grads:
    """Add in place; what is None counts as nothing."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class Reduction:
    """What the micro-batches of one step have come to so far.

    leaves  the rows of every table
    count   micro-batches of the step on each rank
    flags   a number on the device that is not 0 from the first step on that is not finite, and 1
    ranks   that have the others; None: all are here
    """

    def __init__(self, leaves: Sequence[Leaf], count: int, flags: tuple[Tensor, Tensor], ranks: Ranks | None) -> None:
        self._leaves, self._flags, self._ranks, self.count = leaves, flags, ranks, count
        self._rows: TreeSum[Grads] = TreeSum(_add)
        self._dense: TreeSum[Grads] = TreeSum(_add)
        self._first = 0 if ranks is None else ranks.rank * count
        self._next = self._first
        self._parameters: list[Tensor] = []
        self._values: list[Tensor | None] = []
        self.parts: list[list[Tensor] | None] = []  # with other ranks, of each leaf the gradients of this one's nodes

    @property
    def is_complete(self) -> bool:
        """Tell whether all micro-batches have been added."""
        return self._next == self._first + self.count

    @property
    def has_rows(self) -> bool:
        """Tell whether gradients of rows have come, to whatever rank."""
        return any(part is not None for part in self.parts)

    def add(self, parameters: Iterable[Tensor], values: Tensor | None) -> Tensor | None:
        """See `Rows.reduce`."""
        given = list(parameters)
        if self._values and [id(one) for one in given] != [id(one) for one in self._parameters]:
            raise ValueError("reduce() was given other parameters with another micro-batch of the same step")
        self._parameters = given
        self._values.append(values)
        self._rows.put(Node(self._next, 1, _taken([leaf.rows for leaf in self._leaves])))
        self._dense.put(Node(self._next, 1, _taken(given)))
        self._next += 1
        if not self.is_complete:
            return None
        if self._ranks is not None:
            return self._exchange(self._ranks)
        # What is not there is left out here, and 0 where ranks exchange it: both come to the same, but for a -0.
        for leaf, total in zip(self._leaves, self._rows.total() or (), strict=False):
            leaf.rows.grad = None if total is None else total.add_(0.0)
        for parameter, total in zip(given, self._dense.total() or (), strict=False):
            parameter.grad = None if total is None else total.add_(0.0)
        return _stacked(self._values)

    def _exchange(self, ranks: Ranks) -> Tensor | None:
        """Give all ranks the sums over all of the parameters' gradients, and of the rows' what is to be sent."""
        rows, dense = self._rows.nodes, self._dense.nodes
        has_value = any(value is not None for value in self._values)
        size = max((value.numel() for value in self._values if value is not None), default=0)
        here = [any(node.value[number] is not None for node in each if node.value is not None)
                for each, what in ((rows, self._leaves), (dense, self._parameters)) for number in range(len(what))]  # fmt: skip
        channel = ranks["dense"]
        telling = np.array([[*here, size, *ranks.telling]], np.int64)
        told = channel.exchange_counts(np.repeat(telling, ranks.size, axis=0)).max(0).tolist()
        given, size, ranks.told = told[: len(here)], told[len(here)], told[len(here) + 1 :]
        self._check([part for each in (rows, dense) for node in each for part in node.value or () if part is not None])
        self.parts = [
            [_zeros(node.value, number, leaf.rows) for node in rows] if has else None
            for number, (leaf, has) in enumerate(zip(self._leaves, given, strict=False))
        ]
        present = [number for number, has in enumerate(given[len(self._leaves) :]) if has]
        parameters = [self._parameters[number] for number in present]
        nodes = [nodes_of(rank * self.count, (rank + 1) * self.count) for rank in range(ranks.size)]
        flag, _ = self._flags
        parts = []
        for place, node in enumerate(dense):
            pieces = [_zeros(node.value, number, self._parameters[number]).reshape(-1) for number in present]
            pieces.append(self._losses(node, size, ranks.size * self.count))
            pieces.append((flag if place == 0 else torch.zeros_like(flag)).view(1))
            parts.append(Node(node.start, node.size, torch.cat(pieces).cpu()))
        total = tree_all_reduce(channel, parts, nodes).to(flag.device)
        flag.copy_(total[-1])
        at = 0
        for parameter in parameters:
            grad = total[at : at + parameter.numel()].view_as(parameter)
            parameter.grad = grad.add_(0.0)
            at += parameter.numel()
        if not size:
            return None
        shape = next((value.shape for value in self._values if value is not None), torch.Size([size]))
        return total[at:-1].view(ranks.size * self.count, *(shape if has_value else (size,)))

    def _losses(self, node: Node[Grads], size: int, count: int) -> Tensor:
        """Return the values of a node's micro-batches in their places among those of all, and 0 elsewhere."""
        out = torch.zeros((count, size), dtype=torch.float32, device=self._flags[0].device)
        for number in range(node.start, min(node.start + node.size, self._next)):
            value = self._values[number - self._first]
            if value is not None:
                out[number] = value.detach().view(-1)
        return out.view(-1)

    def _check(self, grads: list[Tensor]) -> None:
        """Note whether what this rank has is finite, as `Rows.guard` does of the sums."""
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, *self._flags)


def _zeros(grads: Grads | None, number: int, like: Tensor) -> Tensor:
    found = None if grads is None else grads[number]
    return torch.zeros_like(like, requires_grad=False) if found is None else found


def _taken(tensors: Sequence[Tensor]) -> Grads:
    grads = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return grads


def _stacked(values: Sequence[Tensor | None]) -> Tensor | None:
    """Return all values, those of a micro-batch without any as 0; None where there are none at all."""
    given = next((value for value in values if value is not None), None)
    if given is None:
        return None
    return torch.stack([torch.zeros_like(given) if value is None else value for value in values])
