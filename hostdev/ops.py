"""Primitives to look rows up and to update them in host memory, for programs without a `Runtime`."""

from hostdev.core.primitive import (
    EmbeddingLookup,
    FusedSparseAdagrad,
    FusedSparseFtrl,
    FusedSparseLazyAdam,
    FusedSparseRowWiseAdagrad,
    FusedSparseSGD,
    Primitive,
)
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import unique

__all__ = [
    "EmbeddingLookup",
    "FusedSparseAdagrad",
    "FusedSparseFtrl",
    "FusedSparseLazyAdam",
    "FusedSparseRowWiseAdagrad",
    "FusedSparseSGD",
    "Primitive",
    "set_host_threads",
    "unique",
]
