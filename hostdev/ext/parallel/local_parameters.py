"""This rank's parameters as plain tensors, for gradient sums, optimizers and checkpoints."""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from hostdev.ext.parallel.plan import Sliced, sliced


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
