"""What a torch.amp.GradScaler does to gradients that it does not know of: those of host tables' rows.

A scaler multiplies the loss, and divides the gradients of the parameters that its optimizers have; rows of a host table
are in none. So `watch` wraps `torch.amp.GradScaler.scale`, which the scalers of torch.cuda.amp and torch.cpu.amp
inherit, to note what it multiplied by: the scale may have changed when a table takes its step. A scaler with a `scale`
of its own is not seen.
"""

import functools
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler

_MOST_SCALES = 64  # remembered of a scaler; only those since a table's last step are of interest


class _Scale:
    """A value of a scaler's scale, and the number of the last loss that it multiplied."""

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version  # grows with every change in place
        self.value = tensor.detach().clone()
        self.last = 0


_scales: WeakKeyDictionary[GradScaler, deque[_Scale]] = WeakKeyDictionary()
_losses = 0  # scaled so far, by any scaler


def watch() -> None:
    """Note from now on what losses are scaled with; once is enough."""
    original = GradScaler.scale
    if getattr(original, "watched_by_hostdev", False):
        return

    @functools.wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if self.is_enabled():
            _note(self)
        return scaled

    scale.watched_by_hostdev = True  # type: ignore[attr-defined]
    GradScaler.scale = scale  # type: ignore[method-assign]


def _note(scaler: GradScaler) -> None:
    global _losses
    _losses += 1
    tensor = scaler._scale
    if tensor is None:  # an iterator of outputs, not yet looked at
        tensor = torch.tensor(scaler.get_scale())
    scales = _scales.setdefault(scaler, deque(maxlen=_MOST_SCALES))
    if not scales or scales[-1].version != tensor._version:
        scales.append(_Scale(tensor))
    scales[-1].last = _losses


def losses_scaled() -> int:
    """Return how many losses have been scaled so far, for `in_use` and `scale_since`."""
    return _losses


def in_use(since: int) -> bool:
    """Tell whether a scaler that is still alive has scaled a loss since so many."""
    return any(scales[-1].last > since for scales in _scales.values())


def scale_since(scaler: GradScaler, since: int) -> float:
    """Return what a scaler has multiplied losses by since so many; ValueError where there is no such number."""
    values = {float(scale.value) for scale in _scales.get(scaler, ()) if scale.last > since}
    if not values:
        raise ValueError(
            "this GradScaler has scaled no loss since the forward pass: call scaler.scale(loss).backward()"
        )
    if len(values) > 1:
        raise ValueError("the scale has changed between the passes of one step; call scaler.update() after the step")
    return values.pop()


def unscale(grad: Tensor, scale: float) -> None:
    """Divide gradients in place as `GradScaler.unscale_` does: by multiplying with the inverse, rounded to float32."""
    grad.mul_(float(torch.tensor(scale, dtype=torch.float64).reciprocal().float()))


def report(scaler: GradScaler, owner: object, device: torch.device, *, not_finite: bool) -> None:
    """Let a scaler's next `update` know whether gradients were finite, as if `owner` were an optimizer."""
    found = torch.full((), float(not_finite), device=device)
    scaler._per_optimizer_states[id(owner)]["found_inf_per_device"][device] = found
