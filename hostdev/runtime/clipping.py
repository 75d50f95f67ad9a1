"""torch's clipping of gradients with the rows of the batch in it, where a framework calls it.

A trainer clips the parameters that its optimizers have. The rows of a batch are in no optimizer, so they are added
while the loop of a `train_loader` is open: once a step, as a table's gradients belong to one optimizer. Frameworks
call `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` by their module; so these are replaced there.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

_MARK = "_hostdev_rows"


class Clipped(Protocol):
    """A loop whose rows are clipped with the parameters."""

    thread: int

    def take_clipped(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows to clip together with these parameters."""


_loops: WeakSet[Any] = WeakSet()


def add(loop: Clipped) -> None:
    """Clip the rows of a loop with the parameters, until it is gone or `remove` is called."""
    _loops.add(loop)


def remove(loop: Clipped) -> None:
    """End what `add` began."""
    _loops.discard(loop)


def install() -> None:
    """Replace torch's two functions, once in a process."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(torch.nn.utils, name)
        if not hasattr(original, _MARK):
            setattr(torch.nn.utils, name, _with_rows(original))


def _with_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for loop in list(_loops):
            if loop.thread == threading.get_ident():
                given += loop.take_clipped(given)
        return original(given, *args, **kwargs)

    setattr(clip, _MARK, True)
    return clip
