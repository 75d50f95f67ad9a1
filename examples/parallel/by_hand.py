"""Hybrid parallelism by hand: a layer's weight is sliced over the ranks, and this file adds up their results.

For example, two ranks share a weight [512, 128]: each has 256 of the inputs, a tensor [128, 256] in torch's layout. It
multiplies its inputs with its slice; the sum over the ranks is the layer's output. The slices are marked, so hostdev
saves them as slices and leaves their gradients to their ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn

import hostdev
from hostdev.models.wide_deep.network import WideDeep


class Sum(torch.autograd.Function):
    """The sum over ranks of what each has: each one's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, channel: Any) -> Tensor:
        """Return the sum, on all ranks the same."""
        total = part.clone()
        channel.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum's gradient."""
        return grads[0], None


class Copy(torch.autograd.Function):
    """A value that each rank has and uses a slice of: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, channel: Any) -> Tensor:
        """Return the value."""
        ctx.channel = channel
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients."""
        total = grads[0].clone()
        ctx.channel.all_reduce(total)
        return total, None


class SlicedLinear(nn.Module):
    """A linear layer of which each rank along model has a slice of the inputs' weights; all of it where it is alone.

    whole  the layer as it is in one process; its number of inputs is a multiple of the ranks
    """

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        ranks = hostdev.distributed.ranks()
        self.count, self.at = (1, 0) if ranks is None else (ranks.mesh.model, ranks.at.model)
        self.channel = ranks.channel("model") if ranks is not None and self.count > 1 else None
        if whole.in_features % self.count:
            raise hostdev.UserError(f"{whole.in_features} inputs cannot be cut into {self.count} slices of one size")
        with torch.no_grad():
            self.weight = hostdev.parallel.sliced(
                nn.Parameter(whole.weight.chunk(self.count, 1)[self.at].clone()), dim=1
            )
        self.bias = whole.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [B, outputs] for [B, inputs], on all ranks the same."""
        if self.channel is None:
            return nn.functional.linear(inputs, self.weight, self.bias)
        mine = Copy.apply(inputs, self.channel).chunk(self.count, 1)[self.at]
        return Sum.apply(nn.functional.linear(mine, self.weight), self.channel) + self.bias


def slice_by_hand(network: nn.Module, name: str) -> nn.Module:
    """Put a `SlicedLinear` in the place of a network's layer, and return the network."""
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, SlicedLinear(network.get_submodule(name)))
    return network


class WideDeepByHand(WideDeep):
    """Wide & Deep whose second hidden layer is sliced by hand: `--model examples.parallel.by_hand:WideDeepByHand`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        slice_by_hand(self, "deep.2")
