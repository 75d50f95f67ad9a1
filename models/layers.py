"""Fully connected layers, their initial values, and a float32 last layer.

A tower is a small network for one label, on top of the layers that all labels share.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hostdev.core.dropout import make_mask
from hostdev.core.initializers import Constant, Initializer, Normal, initial_array
from hostdev.core.pieces import Piece


def perceptron(widths: Sequence[int], *, dropout: float = 0.0, linear: bool = True) -> nn.Sequential:
    """Return linear layers with these widths, each followed by ReLU and dropout, except the last if `linear`."""
    modules: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        if dropout:
            modules.append(Dropout(dropout))
    return nn.Sequential(*modules[: -2 if dropout else -1] if linear else modules)


class Dropout(nn.Dropout):
    """nn.Dropout; on a CPU, it draws one number from torch's generator, and computes the mask from it in parallel.

    torch's own dropout draws every value from one serial generator, which takes as long as a layer. Elsewhere, in a
    compiled or traced network, and for tensors that are not plain (fake or distributed ones), this is torch's dropout.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the input with values set to 0 at random and all other values scaled, in training; else the input."""
        is_plain = type(input) is Tensor and input.device.type == "cpu" and input.is_floating_point()
        if not (self.training and is_plain and not self.inplace and 0 < self.p < 1) or _is_traced():
            return super().forward(input)
        key = int(torch.empty((), dtype=torch.int64).random_())
        mask = torch.from_numpy(make_mask(tuple(input.shape), self.p, key))
        return input * mask.to(input.dtype)


def _is_traced() -> bool:
    """Return whether torch compiles, traces or transforms the network, so that a mask would become a constant."""
    level = getattr(torch._C._functorch, "maybe_current_level", None)
    is_transformed = level is not None and level() is not None
    return torch.compiler.is_compiling() or torch._C._is_tracing() or is_transformed


def hidden_pieces(name: str, layers: nn.Sequential, *, alone: bool = False) -> list[Piece]:
    """Return all layers except the last as segments, which map pairs to pairs (see `pass_through`) unless `alone`."""
    return [
        Piece(f"{name}.{number}", layer if alone else partial(pass_through, layer), (layer,))
        for number, layer in enumerate(list(layers)[:-1])
    ]


def pass_through(layer: nn.Module, by: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first value unchanged, and the layer's output for the second."""
    return by, layer(value)


def in_float32(last: nn.Module, inputs: Tensor) -> Tensor:
    """Apply a last layer, which has one output, in float32 even under autocast; return float32 [B]."""
    with torch.autocast(inputs.device.type, enabled=False):  # a bfloat16 logit would have 8 significant bits
        logits: Tensor = last(inputs.float()).squeeze(1)
    return logits


def initialize(module: nn.Module, seed: int, init: Callable[[str, Tensor], Initializer]) -> None:
    """Set each parameter to values drawn by seed and parameter name.

    `init` is called with a parameter's name and the parameter, and returns the initializer.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = initial_array(tuple(parameter.shape), init(name, parameter), seed, f"dense/{name}")
            parameter.copy_(torch.from_numpy(values))


def glorot_normal(weight: Tensor) -> Normal:
    """Return the Glorot initializer (Glorot & Bengio, AISTATS 2010) for a weight [outputs, inputs]."""
    return Normal(math.sqrt(2 / sum(weight.shape)))


def he_normal(weight: Tensor) -> Normal:
    """Return the He initializer (He et al., ICCV 2015) for a weight [outputs, inputs]."""
    return Normal(math.sqrt(2 / weight.shape[1]))


def with_zero_biases(weights: Callable[[Tensor], Initializer]) -> Callable[[str, Tensor], Initializer]:
    """Return an `init` that initializes matrices by `weights`, and vectors (biases) to 0."""
    return lambda name, parameter: weights(parameter) if parameter.dim() == 2 else Constant(0.0)


class Towers(nn.ModuleList):
    """For each label, a ReLU network with one output.

    Args:
        labels: Number of labels.
        inputs: Width of each tower's input.
        layers: Widths of the hidden layers.
    """

    def __init__(self, labels: int, inputs: int, layers: Sequence[int]) -> None:
        super().__init__(perceptron([inputs, *layers, 1]) for _ in range(labels))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the outputs, float32 [B, labels], or [B] for a single label; last layers are float32 under autocast.

        Args:
            inputs: Each tower's input [B, inputs], or a single tensor that is the input of all towers.
        """
        each = inputs if len(inputs) == len(self) else inputs * len(self)
        found = []
        for tower, one in zip(self, each, strict=True):
            *hidden, last = tower.children()
            for layer in hidden:
                one = layer(one)
            found.append(in_float32(last, one))
        return found[0] if len(found) == 1 else torch.stack(found, 1)
