"""Avoids the import of torch's compiler, which takes about a second and which training does not use.

torch imports its compiler in an optimizer's step, and at the first call of some other methods, only to exclude these
methods from compilation. hostdev does not call these methods from compiled code. A model may still use `torch.compile`,
which then imports the compiler.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_MARK = "__dynamo_disable"  # in this attribute, torch's `_disable_dynamo` stores the method to call instead


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch's optimizers from importing torch's compiler in this context, unless it is already imported."""
    methods = () if "torch._dynamo" in sys.modules else (getattr(Optimizer, name) for name in _METHODS)
    plain = (getattr(method, "__wrapped__", None) for method in methods)  # None if torch does not wrap it
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
