"""The targets of a data set: the labels that a model learns to predict, and the weights of samples in the loss."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The targets besides the first label; by default there are none, and the first label is 0 or 1.

    Attributes:
        more: Names of further labels.
        numeric: Names of the labels that can be any number; the others are 0 or 1.
        weight: Name of the column with the samples' weights, or None.
    """

    more: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    weight: str | None = None

    def labels(self, first: str) -> tuple[str, ...]:
        """Return the names of all labels, given the first."""
        return (first, *self.more)

    def names(self, first: str) -> tuple[str, ...]:
        """Return the names of all labels, given the first, and of the weight if there is one."""
        return (*self.labels(first), *(() if self.weight is None else (self.weight,)))

    def as_json(self) -> dict[str, Any]:
        """Return the values that differ from the defaults."""
        found = {"more": list(self.more), "numeric": list(self.numeric), "weight": self.weight}
        return {name: value for name, value in found.items() if value}


SINGLE_LABEL = Targets()


def columns_of(label: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """Return a list with each label's values [n], from an array [n] (a single label) or [n, labels]."""
    return [label] if label.ndim == 1 else list(label.T)


def find_wrong_weights(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the indices of the weights [N], of samples or of a bag's ids, that are not finite or below 0."""
    return np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))


def find_wrong(
    label: npt.NDArray[np.float32], weight: npt.NDArray[np.float32] | None, labels: tuple[str, ...], targets: Targets
) -> tuple[str, str, npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
    """Find the first label or weight column that has invalid values in n samples.

    Returns the column's name, what is wrong, the indices of the samples with an invalid value, and all values of the
    column; None if all columns are valid.
    """
    for name, values in zip(labels, columns_of(label), strict=True):
        is_number = name in targets.numeric
        wrong = np.flatnonzero(~np.isfinite(values) if is_number else (values != 0) & (values != 1))
        if len(wrong):
            return name, "not finite" if is_number else "not 0 or 1", wrong, values
    if weight is not None and targets.weight is not None:
        wrong = find_wrong_weights(weight)
        if len(wrong):
            return targets.weight, "not a finite weight of at least 0", wrong, weight
    return None
