"""Hybrid parallelism by hand: a layer's weight is sliced over the ranks, and this file adds up their results.

For example, two ranks share the weight of a layer with 512 inputs and 128 outputs: each has the slice [128, 256] for
half of the inputs. Each rank multiplies its inputs by its slice, and the sum over the ranks is the layer's output. The
slices are marked, so that hostdev saves them as slices and does not add up their gradients over these ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn

import hostdev
from hostdev.models.wide_deep.network import WideDeep


class Sum(torch.autograd.Function):
    """The sum of a tensor over the ranks; the gradient of each rank's tensor is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, channel: Any) -> Tensor:
        """Return the sum, which is the same on all ranks."""
        total = part.clone()
        channel.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum's gradient for this rank's tensor."""
        return grads[0], None


class Copy(torch.autograd.Function):
    """A value of which each rank uses a slice; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, channel: Any) -> Tensor:
        """Return the value unchanged."""
        ctx.channel = channel
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the ranks' gradients."""
        total = grads[0].clone()
        ctx.channel.all_reduce(total)
        return total, None


class SlicedLinear(nn.Module):
    """A linear layer; each rank along `model` has the weights of a slice of the inputs, or all if it is alone.

    Args:
        whole: The layer of one process.

    Raises:
        UserError: The number of inputs is not a multiple of the number of ranks.
    """

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        ranks = hostdev.distributed.ranks()
        self.count, self.at = (1, 0) if ranks is None else (ranks.mesh.model, ranks.at.model)
        self.channel = ranks.channel("model") if ranks is not None and self.count > 1 else None
        if whole.in_features % self.count:
            raise hostdev.UserError(f"{whole.in_features} inputs cannot be cut into {self.count} slices of equal size")
        with torch.no_grad():
            self.weight = hostdev.parallel.sliced(
                nn.Parameter(whole.weight.chunk(self.count, 1)[self.at].clone()), dim=1
            )
        self.bias = whole.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [B, outputs] for [B, inputs], the same on all ranks."""
        if self.channel is None:
            return nn.functional.linear(inputs, self.weight, self.bias)
        mine = Copy.apply(inputs, self.channel).chunk(self.count, 1)[self.at]
        return Sum.apply(nn.functional.linear(mine, self.weight), self.channel) + self.bias


def slice_by_hand(network: nn.Module, name: str) -> nn.Module:
    """Replace the network's layer `name` with a `SlicedLinear`, and return the network."""
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, SlicedLinear(network.get_submodule(name)))
    return network


class WideDeepByHand(WideDeep):
    """Wide & Deep with its second hidden layer sliced by hand: `--model examples.parallel.by_hand:WideDeepByHand`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        slice_by_hand(self, "deep.2")
