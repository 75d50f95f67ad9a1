"""Train recommender models whose embedding tables are too big for the accelerator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hostdev.cache.cache import EmbeddingCache
    from hostdev.checkpoint.saved import open
    from hostdev.core.errors import UserError
    from hostdev.core.initializers import Constant, Normal, Uniform
    from hostdev.core.launched import alone
    from hostdev.core.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowWiseAdagrad
    from hostdev.core.primitive import (
        EmbeddingLookup,
        FusedSparseAdagrad,
        FusedSparseFtrl,
        FusedSparseLazyAdam,
        FusedSparseRowWiseAdagrad,
        FusedSparseSGD,
        Primitive,
    )
    from hostdev.device.table import DeviceTable
    from hostdev.host.server import ParameterServer
    from hostdev.host.table import HostTable
    from hostdev.kernels.pool import set_host_threads
    from hostdev.kernels.unique import unique
    from hostdev.parallel.join import join
    from hostdev.parallel.network import Network
    from hostdev.parallel.plan import sliced
    from hostdev.parallel.ranks import ranks
    from hostdev.predict.predictor import Predictor
    from hostdev.runtime.ema import EMA
    from hostdev.runtime.runtime import Runtime
    from hostdev.runtime.spec import Bag, CacheSpec, Feature, TableSpec

# The public surface; what is not here is free to change. Loaded on first use, so that each command starts quickly.
_PUBLIC = {
    "EMA": "hostdev.runtime.ema",
    "SGD": "hostdev.core.optimizers",
    "Adagrad": "hostdev.core.optimizers",
    "RowWiseAdagrad": "hostdev.core.optimizers",
    "FusedSparseAdagrad": "hostdev.core.primitive",
    "FusedSparseRowWiseAdagrad": "hostdev.core.primitive",
    "FusedSparseSGD": "hostdev.core.primitive",
    "FTRL": "hostdev.core.optimizers",
    "Constant": "hostdev.core.initializers",
    "EmbeddingCache": "hostdev.cache.cache",
    "EmbeddingLookup": "hostdev.core.primitive",
    "FusedSparseFtrl": "hostdev.core.primitive",
    "FusedSparseLazyAdam": "hostdev.core.primitive",
    "Bag": "hostdev.runtime.spec",
    "CacheSpec": "hostdev.runtime.spec",
    "DeviceTable": "hostdev.device.table",
    "Feature": "hostdev.runtime.spec",
    "Runtime": "hostdev.runtime.runtime",
    "TableSpec": "hostdev.runtime.spec",
    "HostTable": "hostdev.host.table",
    "LazyAdam": "hostdev.core.optimizers",
    "Network": "hostdev.parallel.network",
    "NonFiniteError": "hostdev.runtime.loop",
    "Normal": "hostdev.core.initializers",
    "ParameterServer": "hostdev.host.server",
    "Predictor": "hostdev.predict.predictor",
    "Primitive": "hostdev.core.primitive",
    "Uniform": "hostdev.core.initializers",
    "UserError": "hostdev.core.errors",
    "alone": "hostdev.core.launched",
    "join": "hostdev.parallel.join",
    "open": "hostdev.checkpoint.saved",
    "ranks": "hostdev.parallel.ranks",
    "set_host_threads": "hostdev.kernels.pool",
    "sliced": "hostdev.parallel.plan",
    "unique": "hostdev.kernels.unique",
}


__all__ = [
    "EMA",
    "FTRL",
    "SGD",
    "Adagrad",
    "Bag",
    "CacheSpec",
    "Constant",
    "DeviceTable",
    "EmbeddingCache",
    "EmbeddingLookup",
    "Feature",
    "FusedSparseAdagrad",
    "FusedSparseFtrl",
    "FusedSparseLazyAdam",
    "FusedSparseRowWiseAdagrad",
    "FusedSparseSGD",
    "HostTable",
    "LazyAdam",
    "Network",
    "NonFiniteError",
    "Normal",
    "ParameterServer",
    "Predictor",
    "Primitive",
    "RowWiseAdagrad",
    "Runtime",
    "TableSpec",
    "Uniform",
    "UserError",
    "alone",
    "join",
    "open",
    "ranks",
    "set_host_threads",
    "sliced",
    "unique",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'hostdev' has no attribute {name!r}")
