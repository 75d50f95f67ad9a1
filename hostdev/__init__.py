"""Train recommender models whose embedding tables do not fit on the accelerator.

`__init__.pyi` lists the public names, each with its module. A name is imported at its first use, so that every command
starts quickly. Other names are not public and may change.
"""

import warnings
from importlib import import_module
from typing import Any

import lazy_loader

__version__ = "0.2.0.dev0"
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_MOVED = {"Network": "parallel", "sliced": "parallel", "ranks": "distributed"}  # the other moved names are in ops


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except AttributeError:
        room = _MOVED.get(name, "ops")
        module = import_module(f"hostdev.{room}")
        if name not in module.__all__:
            raise
    # for one release
    warnings.warn(f"hostdev.{name} has moved to hostdev.{room}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(module, name)
