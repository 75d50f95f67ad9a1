"""The interface of trainable models."""

from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from hostdev.runtime.spec import Bag, Feature, TableSpec

Ids = npt.NDArray[Any] | Bag
Rows = dict[str, Any]  # by feature: a Tensor, or a tuple of Tensors if the feature has several tables


class Batch(Protocol):
    """A batch of B samples as a model sees it, on the host; its columns are those of the schema."""

    @property
    def dense(self) -> npt.NDArray[np.float32]:
        """The dense columns, float32 [B, nd]."""

    @property
    def ids(self) -> npt.NDArray[Any]:
        """The columns of kind "id", int32 or int64 [B, F]."""

    @property
    def bags(self) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]:
        """The columns of kind "bag" by name: concatenated values [N] of all samples, and lengths int32 [B]."""

    @property
    def bag_weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """For each weighted bag, the weights of its values, float32 [N]."""


class Model(nn.Module):
    """A network over rows of embedding tables.

    A model specifies the tables, but does not know where they are stored or when they change. A model class must have
    this constructor, and these attributes and methods, but need not inherit from `Model`::

        def __init__(self, schema: Schema, dim: int, *, seed: int, optimizer: SparseOptimizer | None = None): ...

    Random draws in `forward` (dropout) come from torch's generator on the device. Steps run in the same order in every
    mode, so equal seeds give equal draws unless other code uses that generator.

    Attributes:
        tables: The tables, by name.
        features: The features, by name, each with the names of its tables.
        lr: Learning rate of the dense layers' Adam.
        default_dim: Default number of embedding columns; optional.
    """

    default_dim: ClassVar[int]
    lr: float
    tables: dict[str, TableSpec]
    features: dict[str, Feature]

    def ids(self, batch: Batch) -> dict[str, Ids]:
        """Return each feature's ids: [B], [B, k] or a Bag. This runs on the host, possibly in another thread."""
        raise NotImplementedError

    def forward(self, dense: Tensor, rows: Rows) -> Tensor:
        """Return logits float32 [B], or [B, labels] if the schema has several labels; predictions for numeric labels.

        Args:
            dense: float32 [B, nd].
            rows: The looked-up rows of each feature, multiplied by the ids' weights: [B, D] with pooling, otherwise
                [*ids.shape, D]; a tuple of such tensors if the feature has several tables.
        """
        raise NotImplementedError
