"""Towers: a small network for each label, on top of what the labels share."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hostdev.models.layers import in_float32, perceptron


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
