"""Train recommender models whose embedding tables do not fit on the accelerator.

`__init__.pyi` lists the public names, each with its module. A name is imported at its first use, so that every command
starts quickly. What is not listed may change.
"""

import warnings
from importlib import import_module
from typing import Any

import lazy_loader

__version__ = "0.1.0"
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_MOVED = {"Network": "parallel", "sliced": "parallel", "ranks": "distributed"} | dict.fromkeys(
    (
        "EmbeddingLookup",
        "FusedSparseAdagrad",
        "FusedSparseFtrl",
        "FusedSparseLazyAdam",
        "FusedSparseRowWiseAdagrad",
        "FusedSparseSGD",
        "ParameterServer",
        "Primitive",
        "set_host_threads",
        "unique",
    ),
    "ops",
)


def __getattr__(name: str) -> Any:
    if name in _MOVED:  # for one release
        module = f"hostdev.{_MOVED[name]}"
        warnings.warn(f"hostdev.{name} is {module}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(import_module(module), name)
    return _load(name)
