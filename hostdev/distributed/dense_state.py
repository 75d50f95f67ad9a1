"""The state of dense layers and their optimizer, in the form in which it is digested and saved."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class DenseState(NamedTuple):
    """The whole state of dense layers and their optimizer, in the format of torch's `state_dict()`."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    names: Sequence[str]  # names of parameters, each once, in the optimizer's order
    buffers: Sequence[str]  # names of persistent buffers


def get_dense_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> DenseState:
    """Return the state of a network that is whole on this rank, and of its optimizer."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    numbered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return DenseState(network.state_dict(), optimizer.state_dict(), numbered, get_buffer_names(network))


def get_buffer_names(network: nn.Module) -> list[str]:
    """Return the names of a network's persistent buffers."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return [
        name for name, value in network.state_dict().items() if name not in parameters and isinstance(value, Tensor)
    ]
