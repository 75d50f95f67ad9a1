"""Batches; each holds the samples of one step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Batch:
    """B samples, whose ids are in the range [0, `Schema.rows`).

    Attributes:
        label: float32 [B], or [B, labels] if the schema has several labels: 0 or 1, or any number for regression.
        dense: float32 [B, dense columns], scaled.
        ids: int32 or int64 [B, columns of kind "id"].
        bags: For each column of kind "bag", the concatenated ids of all samples [N], with the dtype of `ids`, and the
            number of ids of each sample, int32 [B].
        whole: Size of the step's full batch if this batch is a slice of it, otherwise None.
        weight: float32 [B], the samples' weights in the loss, or None if all are 1.
        bag_weights: For each weighted bag, the weights of its ids, float32 [N].
    """

    label: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[Any]
    bags: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]
    whole: int | None = None
    weight: npt.NDArray[np.float32] | None = None
    bag_weights: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of samples, B."""
        return len(self.label)

    @property
    def step_rows(self) -> int:
        """Size of the step's full batch."""
        return len(self) if self.whole is None else self.whole

    def split(self, edges: Sequence[int]) -> "Iterator[Batch]":
        """Yield the slices of the batch between consecutive indices in `edges`, without copying."""
        ends = {name: np.concatenate([[0], np.cumsum(lengths)]) for name, (_, lengths) in self.bags.items()}
        for start, stop in pairwise(edges):
            bags = {
                name: (values[ends[name][start] : ends[name][stop]], lengths[start:stop])
                for name, (values, lengths) in self.bags.items()
            }
            bag_weights = {
                name: values[ends[name][start] : ends[name][stop]] for name, values in self.bag_weights.items()
            }
            weight = None if self.weight is None else self.weight[start:stop]
            label, dense, ids = self.label[start:stop], self.dense[start:stop], self.ids[start:stop]
            yield Batch(label, dense, ids, bags, self.step_rows, weight, bag_weights)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return the samples of one or more batches with the same columns, in order, as one batch without weights."""
    if len(batches) == 1:
        return batches[0]
    bags = {
        name: (
            np.concatenate([batch.bags[name][0] for batch in batches]),
            np.concatenate([batch.bags[name][1] for batch in batches]),
        )
        for name in batches[0].bags
    }
    bag_weights = {
        name: np.concatenate([batch.bag_weights[name] for batch in batches]) for name in batches[0].bag_weights
    }
    label, dense, ids = (
        np.concatenate([getattr(batch, name) for batch in batches]) for name in ("label", "dense", "ids")
    )
    return Batch(label, dense, ids, bags, bag_weights=bag_weights)
