"""Averages that layers keep of what they have seen (BatchNorm): the same on all ranks, in the order of micro-batches.

A micro-batch's own mean and variance are what the layer takes for it, wherever it is computed. All ranks with the layer
are told those of the step, and move the averages by each in turn, as one process that takes the micro-batches one after
the other: Ioffe & Szegedy, ICML 2015.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hostdev.core.errors import UserError
from hostdev.parallel.ranks import Channel


class Averages:
    """The layers of some modules that keep averages.

    channel  of the host to the ranks that compute other micro-batches with the same layers; None: there are none
    """

    def __init__(self, modules: Sequence[nn.Module], channel: Channel | None) -> None:
        found = {id(layer): layer for module in modules for layer in averaging(module)}
        self._layers = list(found.values())
        self._channel = channel
        self._seen: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # by micro-batch and layer: each call's

    @contextmanager
    def watching(self, number: int) -> Iterator[None]:
        """Within, layers that train tell what they see of a micro-batch, and their averages stay as they are."""
        changed = []
        for at, layer in enumerate(self._layers):
            if not layer.training:
                continue
            kept = layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum
            changed.append((layer, kept))
            # moved by all of it, they are what is seen
            layer.momentum = 1.0
            layer.running_mean = torch.zeros_like(kept[0])
            layer.running_var = torch.zeros_like(kept[1])
            layer.num_batches_tracked = torch.zeros_like(kept[2])
            layer._hostdev_told = layer.register_forward_hook(self._told(number, at))
        try:
            yield
        finally:
            for layer, kept in changed:
                layer._hostdev_told.remove()
                del layer._hostdev_told
                layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum = kept

    def _told(self, number: int, at: int) -> Any:
        def told(layer: Any, *_: Any) -> None:
            seen = layer.running_mean.clone(), layer.running_var.clone()
            self._seen.setdefault((number, at), []).append(seen)

        return told

    def move(self) -> None:
        """Move the averages by what has been seen in a step; all ranks of the channel call it."""
        if not self._layers:
            return
        seen, self._seen = self._seen, {}
        for at, layer in enumerate(self._layers):
            mine = [one for number, where in sorted(seen) if where == at for one in seen[number, at]]
            for mean, variance in self._of_all(mine, layer.num_features):
                layer.num_batches_tracked.add_(1)
                by = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
                for average, value in ((layer.running_mean, mean), (layer.running_var, variance)):
                    average.mul_(1.0 - by).add_(value.to(average.device), alpha=by)

    def _of_all(self, mine: Sequence[tuple[Tensor, Tensor]], features: int) -> list[tuple[Tensor, Tensor]]:
        if self._channel is None or self._channel.ranks == 1:
            return list(mine)
        flat = [value.cpu().numpy() for each in mine for value in each]
        come = self._channel.gather(np.concatenate(flat) if flat else np.empty(0, np.float32))
        rows = torch.from_numpy(np.concatenate(come)).view(-1, 2, features)
        return [(mean, variance) for mean, variance in rows]


def averaging(module: nn.Module) -> list[Any]:
    """Return the layers of a module that keep averages over batches."""
    return [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.track_running_stats]


def require_own_averages(module: nn.Module) -> None:
    """Raise UserError for layers that average over ranks on their own, which would wait for those that do not come."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise UserError(
                f"layer {name!r} (SyncBatchNorm) exchanges with other processes by itself; use BatchNorm, whose "
                "averages are kept alike"
            )
