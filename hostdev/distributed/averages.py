"""Running averages of BatchNorm layers: equal on all ranks, updated in the order of the micro-batches.

A layer normalises each micro-batch by that micro-batch's mean and variance. After a step, all ranks with the layer
exchange these statistics. They update the averages with the statistics of one micro-batch after another, as a single
process would (Ioffe & Szegedy, ICML 2015).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hostdev.core.errors import UserError
from hostdev.distributed.world import LocalChannel


class Averages:
    """Updates the running averages of the layers in this rank's modules.

    Args:
        modules: The modules of this rank.
        channel: Host-memory channel to the ranks that run other micro-batches through the same layers; None if no
            other rank does.
    """

    def __init__(self, modules: Sequence[nn.Module], channel: LocalChannel | None = None) -> None:
        self._layers = list({id(layer): layer for module in modules for layer in averaging(module)}.values())
        self._channel = channel or LocalChannel()
        self._number: int | None = None  # number of the current micro-batch
        self._kept: dict[int, _KeptBuffers] = {}  # by layer index, during the layer's forward pass
        self._seen: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in self._layers]  # statistics by layer
        for at, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(_Hook(self, Averages._before_forward, at))
            layer.register_forward_hook(_Hook(self, Averages._after_forward, at))

    @contextmanager
    def watching(self, number: int) -> Iterator[None]:
        """A context in which layers in training mode record their statistics but leave their averages unchanged.

        Args:
            number: Number of the micro-batch whose statistics are recorded.
        """
        self._number = number
        try:
            yield
        finally:
            self._number = None
            for at in list(self._kept):  # after a failed forward pass
                self._restore(at)

    def _before_forward(self, at: int) -> None:
        """Set a layer's averages to 0 and its momentum to 1: the averages then become the micro-batch's statistics."""
        layer = self._layers[at]
        if self._number is None or not layer.training:
            return
        buffers = layer._buffers  # bypasses the slow nn.Module.__setattr__
        mean, variance, count = (buffers[name] for name in _NAMES)
        self._kept[at] = _KeptBuffers(mean, variance, count, layer.momentum)
        layer.__dict__["momentum"] = 1.0
        for name in _NAMES:
            buffers[name] = torch.zeros_like(buffers[name])

    def _after_forward(self, at: int) -> None:
        """Record a layer's statistics, and restore its averages."""
        if at in self._kept:
            assert self._number is not None
            mean, variance = (self._layers[at]._buffers[name] for name in _NAMES[:2])
            self._seen[at].append((self._number, mean, variance))
            self._restore(at)

    def _restore(self, at: int) -> None:
        *buffers, momentum = self._kept.pop(at)
        self._layers[at].__dict__["momentum"] = momentum
        self._layers[at]._buffers.update(zip(_NAMES, buffers, strict=True))

    def move(self) -> None:
        """Update the averages with the statistics recorded in a step. All the channel's ranks must call this method."""
        if not self._layers:
            return
        seen = [sorted(each, key=lambda one: one[0]) for each in self._seen]
        self._seen = [[] for _ in self._layers]
        for layer, values in zip(self._layers, self._of_all(seen), strict=True):
            mean, variance, count = (layer._buffers[name] for name in _NAMES)
            for value, other in values:
                count.add_(1)
                by = layer.momentum if layer.momentum is not None else 1.0 / float(count)
                torch._foreach_mul_([mean, variance], 1.0 - by)
                torch._foreach_add_([mean, variance], [value.to(mean), other.to(mean)], alpha=by)

    def _of_all(self, seen: list[list[tuple[int, Tensor, Tensor]]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Return, for each layer, (mean, variance) of each micro-batch of all ranks, in the order of micro-batches."""
        if self._channel.ranks == 1:
            return [[(mean, variance) for _, mean, variance in each] for each in seen]
        dtype = torch.float32  # wide enough for all layers, so that nothing is rounded; the same on all ranks
        for layer in self._layers:
            dtype = torch.promote_types(dtype, _mean_of(layer).dtype)
        flat = [value.to("cpu", dtype).numpy() for each in seen for _, *both in each for value in both]
        counts = self._channel.gather(np.array([len(each) for each in seen], np.int64))
        received = self._channel.gather(np.concatenate(flat) if flat else torch.empty(0, dtype=dtype).numpy())
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._layers]
        for values, calls in zip(map(torch.from_numpy, received), counts, strict=True):
            begin = 0
            for at, (layer, count) in enumerate(zip(self._layers, calls.tolist(), strict=True)):
                end = begin + count * 2 * layer.num_features
                pairs = values[begin:end].view(count, 2, layer.num_features)
                found[at] += [(mean, variance) for mean, variance in pairs]
                begin = end
        return found


def _mean_of(layer: nn.Module) -> Tensor:
    """Return a layer's running mean."""
    found: Tensor = layer._buffers[_NAMES[0]]  # type: ignore[assignment]  # layers without it are not averaged
    return found


class _KeptBuffers(NamedTuple):
    """A layer's averages and momentum, kept here while the layer's forward pass uses other values."""

    mean: Any
    variance: Any
    count: Any
    momentum: float | None


_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class _Hook:
    """A layer's hook, which calls a method of an `Averages` object as long as the object exists.

    In a copy of the layer, the hook does nothing.
    """

    def __init__(
        self, averages: Averages | None = None, method: Callable[[Averages, int], None] | None = None, at: int = 0
    ) -> None:
        self._averages = weakref.ref(averages) if averages is not None else None
        self._method, self._at = method, at

    def __call__(self, *_: Any) -> None:
        if self._averages is not None and self._method is not None and (averages := self._averages()) is not None:
            self._method(averages, self._at)

    def __reduce__(self) -> Any:
        return _Hook, ()


def averaging(module: nn.Module) -> list[Any]:
    """Return a module's layers that keep running averages."""
    return [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.track_running_stats]


def require_own_averages(module: nn.Module) -> None:
    """Raise UserError for a SyncBatchNorm layer, which would wait for statistics of ranks that do not run the layer."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise UserError(
                f"layer {name!r} (SyncBatchNorm) exchanges statistics by itself; use BatchNorm, whose "
                "averages hostdev keeps equal on all ranks"
            )
