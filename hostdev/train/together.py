"""What the ranks of a training do with a model's dense side and its predictions."""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch.nn.modules.batchnorm import _NormBase

from hostdev.core.errors import UserError
from hostdev.models.model import Model
from hostdev.parallel.ranks import Ranks


def require_no_averages(model: Model) -> None:
    """Raise UserError for layers whose averages over batches would differ from rank to rank."""
    for name, layer in model.named_modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            raise UserError(
                f"layer {name!r} ({type(layer).__name__}) keeps averages of what it has seen, which would differ "
                "between processes; use LayerNorm, or track_running_stats=False"
            )


def broadcast(model: Model, ranks: Ranks) -> None:
    """Let all ranks begin with the parameters and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        there = tensor.detach().cpu().contiguous()
        ranks.control.broadcast(there)
        tensor.data.copy_(there)


def of_all(ranks: Ranks, sizes: list[int], *arrays: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return the values of all ranks in the order of the rows: batch by batch, each by rank.

    sizes  of this rank's parts of the batches, end to end in each array
    """
    edges = [np.cumsum(each)[:-1] for each in ranks.control.gather(np.array(sizes, np.int64))]
    found = []
    for array in arrays:
        parts = [np.split(each, edge) for each, edge in zip(ranks.control.gather(array), edges, strict=True)]
        found.append(np.concatenate([part[batch] for batch in range(len(sizes)) for part in parts] or [array]))
    return found
