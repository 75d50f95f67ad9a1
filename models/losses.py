"""The loss of a model's outputs for binary and numeric labels, with weights of samples."""

import torch.nn.functional as F
from torch import Tensor

from hostdev.core.errors import UserError
from hostdev.data.schema import SINGLE_LABEL, Targets


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
