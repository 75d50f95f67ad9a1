"""What training asks of a model."""

from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from hostdev.runtime.spec import Bag, Feature, TableSpec

Ids = npt.NDArray[Any] | Bag
Rows = dict[str, Any]  # by feature: Tensor, or a tuple of Tensors where the feature has several tables


class Batch(Protocol):
    """What a model sees of a batch of B rows, on the host; its ids are those of the schema."""

    @property
    def dense(self) -> npt.NDArray[np.float32]:
        """The dense columns, float32 [B, nd]."""

    @property
    def ids(self) -> npt.NDArray[Any]:
        """The columns of kind "id", int32 or int64 [B, F]."""

    @property
    def bags(self) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]:
        """The columns of kind "bag" by name: values [N], all rows' end to end, and lengths int32 [B]."""


class Model(nn.Module):
    """A network over rows of tables that it only names: it knows neither where they are nor who updates them.

    A class of one's own has the same constructor, attributes and methods, and need not inherit from this one::

        def __init__(self, schema: Schema, dim: int, *, seed: int, optimizer: SparseOptimizer | None = None): ...

    tables       the tables that it wants, by name
    features     by name, each with the names of its tables
    lr           learning rate of the dense layers' Adam
    default_dim  columns of the embeddings, where the user does not say; may be left out

    What `forward` draws at random (dropout) comes from torch's generator on the device. Steps come one after the other
    in every mode, so equal seeds give equal draws, as long as nothing else draws from that generator.
    """

    default_dim: ClassVar[int]
    lr: float
    tables: dict[str, TableSpec]
    features: dict[str, Feature]

    def ids(self, batch: Batch) -> dict[str, Ids]:
        """Return what each feature looks up: ids [B] or [B, k], or a Bag. Called on the host, from another thread."""
        raise NotImplementedError

    def forward(self, dense: Tensor, rows: Rows) -> Tensor:
        """Return logits float32 [B].

        dense  float32 [B, nd]
        rows   by feature: [B, k, D] of an unpooled one, [B, D] of a pooled one, each times its weight; a tuple of them
               where the feature has several tables
        """
        raise NotImplementedError
