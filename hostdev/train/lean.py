"""Spares a run the import of torch's compiler, which takes about a second and which training does not use.

torch imports it when a method of an optimizer is first called, only to mark the method as one not to compile, and when
an optimizer steps. The run calls these methods from no compiled code. A model may use `torch.compile`, which imports
the compiler as ever.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_MARK = "__dynamo_disable"  # where torch's `_disable_dynamo` keeps a method that it has marked


@contextmanager
def without_compiler() -> Iterator[None]:
    """A context in which torch's optimizers do not import the compiler; if it is imported already, nothing changes."""
    methods = () if "torch._dynamo" in sys.modules else (getattr(Optimizer, name) for name in _METHODS)
    plain = (getattr(method, "__wrapped__", None) for method in methods)  # None: this torch does not mark it
    changed = [function for function in plain if function is not None and not hasattr(function, _MARK)]
    for function in changed:
        setattr(function, _MARK, function)
    try:
        yield
    finally:
        for function in changed:
            delattr(function, _MARK)


class Adam(torch.optim.Adam):
    """torch's Adam, whose step does not import the compiler."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, as torch's Adam does."""
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)
