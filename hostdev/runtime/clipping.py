"""Lets torch's clipping functions, when a framework calls them, clip the batch's rows together with the parameters.

A trainer clips the parameters of its optimizers, which do not include the rows of the batch. This module adds the
rows, once per step, while the loop of a `train_loader` is open. Frameworks look up `clip_grad_norm_` and
`clip_grad_value_` in the module `torch.nn.utils` at each call, so both are replaced there until the last such loop
ends.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from hostdev.runtime.torch_hooks import Function, Replacement, TorchHooks


class Clipped(Protocol):
    """A loop whose rows' gradients are clipped with those of the parameters."""

    @property
    def thread(self) -> int:
        """The identifier of the loop's thread."""

    def take_clipped(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows to clip together with these parameters."""


_loops: WeakSet[Any] = WeakSet()


def add(loop: Clipped) -> None:
    """Clip a loop's rows together with the parameters, until the loop is deleted or `remove` is called.

    Raises:
        RuntimeError: This version of torch lacks `clip_grad_norm_` or `clip_grad_value_`.
    """
    with _hooks.lock:
        _hooks.place()
        _loops.add(loop)


def remove(loop: Clipped) -> None:
    """Undo `add`; if no loop is left, restore torch's own functions."""
    with _hooks.lock:
        _loops.discard(loop)
        if not list(_loops):
            _hooks.remove()


def _add_rows(original: Function) -> Function:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for loop in list(_loops):
            if loop.thread == threading.get_ident():
                given += loop.take_clipped(given)
        return original(given, *args, **kwargs)

    return clip


_hooks = TorchHooks(
    [
        Replacement(torch.nn.utils, name, _add_rows, "when a trainer clips gradients")
        for name in ("clip_grad_norm_", "clip_grad_value_")
    ]
)
