"""The dense network. It takes looked-up, masked rows and knows nothing of the tables that they come from.

B rows, F fields, D the deep dimension.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hostdev.core.initializers import Normal, initial_array

LAYERS = (1024, 512, 256, 128)


class WideDeep(nn.Module):
    """logit = wide + deep: a linear model on the wide rows, and a ReLU network on the deep ones.

    fields, dim  of the deep rows, so that the network's input is fields * dim wide
    seed         of the initial weights and biases, all N(0, 0.01^2), each a function of the seed and its name
    layers       widths of the hidden layers
    """

    def __init__(self, fields: int, dim: int, *, seed: int, layers: Sequence[int] = LAYERS) -> None:
        super().__init__()
        widths = [fields * dim, *layers, 1]
        modules: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.deep = nn.Sequential(*modules[:-1])
        self.bias = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                values = initial_array(tuple(parameter.shape), Normal(0.01), seed, f"dense/{name}")
                parameter.copy_(torch.from_numpy(values))

    def forward(self, linear: Tensor, deep: Tensor) -> Tensor:
        """Return logits float32 [B]; the last layer is calculated in float32 under autocast, too.

        linear  float32 [B], the sum over the fields of wide weight x mask
        deep    [B, F * D], the embeddings x mask of all fields side by side; under autocast in its dtype
        """
        *hidden, last = self.deep
        for layer in hidden:
            deep = layer(deep)
        with torch.autocast(deep.device.type, enabled=False):  # a single logit a row in bfloat16 would have 8 bits
            logits: Tensor = linear + self.bias + last(deep.float()).squeeze(1)
        return logits
