"""The interface of trainable models, and the loss of their outputs."""

from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor, nn

from hostdev.core.errors import UserError
from hostdev.data.schema import SINGLE_LABEL, Targets
from hostdev.runtime.spec import Bag, Feature, TableSpec

Ids = npt.NDArray[Any] | Bag
Rows = dict[str, Any]  # by feature: a Tensor, or a tuple of Tensors if the feature has several tables


class ModelBatch(Protocol):
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

    def ids(self, batch: ModelBatch) -> dict[str, Ids]:
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


class TargetLoss:
    """The sum over labels of the mean over samples of weight * loss.

    The loss is the sigmoid cross entropy of a logit for a label of 0 or 1, and the squared error of a prediction for a
    numeric label. As in torch's losses, the mean divides by the number of samples and not by the sum of their weights.

    Args:
        labels: Names of all labels.
        targets: Which labels are numbers.
    """

    def __init__(self, labels: tuple[str, ...] = ("label",), targets: Targets = SINGLE_LABEL) -> None:
        self.labels, self.targets = labels, targets

    def __call__(self, outputs: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar.

        Args:
            outputs: float32 [B], or [B, labels] if there are several labels; logits, or predictions for numeric labels.
            label: float32, of the same shape.
            weight: float32 [B]; None if all are 1.

        Raises:
            UserError: The outputs and the labels differ in shape.
        """
        if outputs.shape != label.shape:
            raise UserError(
                f"the model returned outputs of shape {list(outputs.shape)} for labels of shape {list(label.shape)} "
                f"({', '.join(self.labels)}); return one output for each sample and label"
            )
        if len(self.labels) == 1:
            return self._mean(self.labels[0], outputs, label, weight)
        total = self._mean(self.labels[0], outputs[:, 0], label[:, 0], weight)
        for i, name in enumerate(self.labels[1:], 1):
            total = total + self._mean(name, outputs[:, i], label[:, i], weight)
        return total

    def _mean(self, name: str, output: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        if name not in self.targets.numeric:
            return F.binary_cross_entropy_with_logits(output, label, weight)
        if weight is None:
            return F.mse_loss(output, label)
        return (weight * (output - label).square()).mean()
