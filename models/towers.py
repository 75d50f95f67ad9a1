"""Towers: a small network for each label, on top of what the labels share."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hostdev.models.layers import in_float32, perceptron


class Towers(nn.Module):
    """A ReLU network with one output for each label.

    Args:
        labels: Number of labels.
        inputs: Width of each tower's input.
        layers: Widths of the hidden layers.
    """

    def __init__(self, labels: int, inputs: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(perceptron([inputs, *layers, 1]) for _ in range(labels))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return float32 [B, labels], or [B] for a single label; the last layers are float32 under autocast.

        Args:
            inputs: Each tower's input [B, inputs]; a single one is that of all towers.
        """
        each = inputs if len(inputs) == len(self.towers) else inputs * len(self.towers)
        found = [self._output(tower, one) for tower, one in zip(self.towers, each, strict=True)]
        return found[0] if len(found) == 1 else torch.stack(found, 1)

    @staticmethod
    def _output(tower: nn.Module, inputs: Tensor) -> Tensor:
        layers = list(tower.children())
        for layer in layers[:-1]:
            inputs = layer(inputs)
        return in_float32(layers[-1], inputs)
