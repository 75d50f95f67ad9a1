"""Parameters that several stages share: sums their gradients over the stages, so that all copies stay equal.

For each micro-batch, gradients of later stages are added first, as in the backward pass of a single process. The
sum is therefore bit-identical to that of a single process, unless one stage uses a parameter more than once.

`LocalParameters` has this rank's parameters as plain tensors, for gradient sums, optimizers and checkpoints.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor, nn

from hostdev.core.pieces import Piece
from hostdev.distributed.channel import Channel
from hostdev.ext.parallel.plan import Sliced, sliced

Gradients = dict[tuple[int, int], Tensor | None]  # by stage and micro-batch


class LocalParameters:
    """The local tensor of each parameter: for a DTensor, this rank's slice, in the same memory; else the parameter.

    Args:
        network: The network, with its layers sliced.
        strategies: The sliced layers' strategies, by name.
    """

    def __init__(self, network: nn.Module, strategies: dict[str, Sliced]) -> None:
        self._leaves: dict[int, nn.Parameter] = {}
        self._cut: list[tuple[Any, nn.Parameter]] = []
        self.names: dict[int, str] = {}  # by id of the local tensor
        for name, parameter in network.named_parameters():
            layer, _, key = name.rpartition(".")
            leaf, torchs = parameter, cast(Any, parameter)
            if layer in strategies:
                leaf = nn.Parameter(torchs.to_local().detach(), parameter.requires_grad)
                dim = strategies[layer].dims[key]
                if dim is not None:
                    sliced(leaf, dim)
                self._cut.append((parameter, leaf))
            self._leaves[id(parameter)] = leaf
            self.names[id(leaf)] = name

    def leaf(self, parameter: Tensor) -> nn.Parameter:
        """Return a parameter's local tensor."""
        return self._leaves[id(parameter)]

    def of(self, parameters: Iterable[Tensor]) -> list[nn.Parameter]:
        """Return the parameters' local tensors without duplicates."""
        return list({id(one): self.leaf(one) for one in parameters}.values())

    def named(self) -> dict[str, nn.Parameter]:
        """Return all local tensors by name, without duplicates."""
        return {self.names[id(leaf)]: leaf for leaf in self._leaves.values()}

    def name(self, leaf: Tensor) -> str:
        """Return a local tensor's name."""
        return self.names[id(leaf)]

    def collect(self) -> None:
        """Move the gradients of DTensors to the local tensors."""
        for parameter, leaf in self._cut:
            if parameter.grad is not None:
                grad = parameter.grad
                if grad.placements != parameter.placements:
                    grad = grad.redistribute(placements=parameter.placements)
                leaf.grad, parameter.grad = grad.to_local(), None

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Keep the local tensors of these parameters, and release all others."""
        ids = {id(one) for one in parameters}
        self._leaves = {key: leaf for key, leaf in self._leaves.items() if key in ids}
        self._cut = [(parameter, leaf) for parameter, leaf in self._cut if id(parameter) in ids]
        self.names = {id(leaf): self.names[id(leaf)] for leaf in self._leaves.values()}


class Tied:
    """The parameters that more than one stage uses.

    Args:
        stages: The pieces of all stages.
        leaves: Local tensors of the parameters.
        channel: Connects the ranks along the pipe axis, in host memory.
    """

    def __init__(self, stages: Sequence[Sequence[Piece]], leaves: LocalParameters, channel: Channel) -> None:
        self._channel = channel
        users: dict[str, list[int]] = {}
        self._parameters: dict[str, Tensor] = {}
        for number, stage in enumerate(stages):
            for parameter in leaves.of(one for piece in stage for one in piece.parameters):
                if not parameter.requires_grad:  # frozen copies stay equal
                    continue
                users.setdefault(leaves.name(parameter), []).append(number)
                self._parameters[leaves.name(parameter)] = parameter
        self.users = {name: stages for name, stages in users.items() if len(stages) > 1}
        self._parameters = {name: self._parameters[name] for name in self.users}
        self._gradients: dict[str, Gradients] = {name: {} for name in self.users}
        self._ids = {id(parameter): name for name, parameter in self._parameters.items()}

    def __contains__(self, parameter: Tensor) -> bool:
        """Return whether several stages use a parameter."""
        return id(parameter) in self._ids

    def _rank(self, stage: int) -> int:
        return stage % self._channel.ranks

    def owned(self) -> list[Tensor]:
        """Return the parameters whose gradients this rank sums, because it has the first stage that uses them."""
        return [
            self._parameters[name] for name, users in self.users.items() if self._rank(users[0]) == self._channel.rank
        ]

    def put(self, stage: int, number: int, parameter: Tensor) -> None:
        """Store the gradient that one of this rank's stages computed for a parameter and a micro-batch."""
        self._gradients[self._ids[id(parameter)]][stage, number] = parameter.grad
        parameter.grad = None

    def gathered(self, count: int) -> list[list[Tensor | None]]:
        """Return, for each parameter of `owned`, its gradient for each micro-batch, summed over the stages.

        All ranks of the pipe axis must call this method.
        """
        found = []
        for name, users in self.users.items():
            owner, parameter = self._rank(users[0]), self._parameters[name]
            received, self._gradients[name] = self._gradients[name], {}
            for stage in users[1:]:
                if self._rank(stage) != owner:
                    received |= self._send_to_owner(parameter, received, stage, owner, count)
            if self._channel.rank == owner:
                found.append(
                    [
                        _sum_grads([received.get((stage, number)) for stage in reversed(users)])
                        for number in range(count)
                    ]
                )
        return found

    def _send_to_owner(self, parameter: Tensor, received: Gradients, stage: int, owner: int, count: int) -> Gradients:
        """Send a stage's gradients of a parameter to the rank that sums them; return them there, else {}."""
        mine, source, n = self._channel.rank, self._rank(stage), parameter.numel()
        has = [int(received.get((stage, number)) is not None) for number in range(count)]
        has_gradient = self._channel.share(has if mine == source else None)[source]
        parts = [
            grad.reshape(-1).cpu() for number in range(count) if (grad := received.get((stage, number))) is not None
        ]
        flat = torch.cat(parts) if mine == source and parts else parameter.detach().new_empty(0, device="cpu")
        size = sum(has_gradient) * n
        give = [size * (mine == source and rank == owner) for rank in range(self._channel.ranks)]
        take = [size * (mine == owner and rank == source) for rank in range(self._channel.ranks)]
        come_flat = self._channel.all_to_all(flat, give, take)
        if mine != owner:
            return {}
        rows = iter(come_flat.view(-1, n)) if n else repeat(come_flat)
        return {
            (stage, number): next(rows).view_as(parameter).to(parameter.device)
            for number, one in enumerate(has_gradient)
            if one
        }

    def spread(self) -> None:
        """Copy the sums of the gradients to all stages that use the parameters.

        All ranks of the pipe axis must call this method.
        """
        for name, users in self.users.items():
            owner, parameter = self._rank(users[0]), self._parameters[name]
            ranks = {self._rank(stage) for stage in users}
            mine, n = self._channel.rank, parameter.numel()
            has = self._channel.share(parameter.grad is not None if mine == owner else None)[owner]
            if not has:
                continue
            others = ranks - {owner}
            flat = parameter.detach().new_empty(0, device="cpu")
            if mine == owner:
                assert parameter.grad is not None
                flat = parameter.grad.detach().reshape(-1).cpu().repeat(len(others))
            give = [n * (mine == owner and rank in others) for rank in range(self._channel.ranks)]
            take = [n * (mine in others and rank == owner) for rank in range(self._channel.ranks)]
            received = self._channel.all_to_all(flat, give, take)
            if mine in others:
                parameter.grad = received.view_as(parameter).to(parameter.device)


def _sum_grads(grads: Sequence[Tensor | None]) -> Tensor | None:
    given = [grad for grad in grads if grad is not None]
    if not given:
        return None
    total = given[0].clone() if len(given) > 1 else given[0]
    for grad in given[1:]:
        total.add_(grad)
    return total
