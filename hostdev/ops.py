"""Operations on rows in host memory, and a parameter server, for programs without a `Runtime`."""

from hostdev.core.primitive import Primitive
from hostdev.core.table_primitives import (
    EmbeddingLookup,
    FusedSparseAdagrad,
    FusedSparseAdam,
    FusedSparseFtrl,
    FusedSparseLazyAdam,
    FusedSparseMomentum,
    FusedSparseRowWiseAdagrad,
    FusedSparseRowWiseAdam,
    FusedSparseSGD,
)
from hostdev.host.table import ParameterServer
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import unique

__all__ = [
    "EmbeddingLookup",
    "FusedSparseAdagrad",
    "FusedSparseAdam",
    "FusedSparseFtrl",
    "FusedSparseLazyAdam",
    "FusedSparseMomentum",
    "FusedSparseRowWiseAdagrad",
    "FusedSparseRowWiseAdam",
    "FusedSparseSGD",
    "ParameterServer",
    "Primitive",
    "set_host_threads",
    "unique",
]
