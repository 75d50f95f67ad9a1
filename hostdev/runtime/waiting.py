"""Whether a dense optimizer waits with gradients for its step: then a batch is not over, though its rows have theirs.

Asked only in the first batch of a loop, and only where that is left, or looked at, before any optimizer has stepped:
later batches are known to have one or to have none.
"""

import gc
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor
from torch.optim import Optimizer

_stepped_with: WeakKeyDictionary[Optimizer, tuple[ReferenceType[Tensor], int]] = WeakKeyDictionary()


def note_step(optimizer: Optimizer) -> None:
    """Remember which gradient an optimizer has stepped with, so that it counts as new only after it has changed."""
    if (parameter := first_parameter(optimizer)) is not None and parameter.grad is not None:
        _stepped_with[optimizer] = ref(parameter.grad), parameter.grad._version


def waiting_optimizers() -> list[Optimizer]:
    """Return the optimizers of this process that have gradients which they have not stepped with."""
    gc.collect()  # one that nobody holds does not wait
    optimizers = [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
    return [optimizer for optimizer in optimizers if _waits(optimizer)]


def _waits(optimizer: Optimizer) -> bool:
    parameter = first_parameter(optimizer)
    if parameter is None or parameter.grad is None:
        return False
    known, version = _stepped_with.get(optimizer, (None, 0))
    return known is None or known() is not parameter.grad or version != parameter.grad._version


def first_parameter(optimizer: Optimizer) -> Tensor | None:
    """Return the first parameter that has a gradient."""
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])  # not there while it is being made
    return next((parameter for group in groups for parameter in group["params"] if parameter.grad is not None), None)
