"""Batches, which hold the samples of one step; and the rows of memory-mapped shards that batches are gathered from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.data import ragged
from hostdev.kernels.columns import get_addresses, length_tasks, list_tasks, places_of, take_tasks
from hostdev.kernels.pool import run_tasks


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
    """Join batches with equal columns into one, without samples' weights; return a single batch unchanged."""
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


@dataclass(frozen=True)
class ShardPiece:
    """The n rows of one record batch; each bag has concatenated values [N] and offsets [n + 1]."""

    label: npt.NDArray[np.float32]  # [n], or [n, labels] if there are several labels
    dense: npt.NDArray[np.float32]  # [n, dense columns]
    ids: npt.NDArray[Any]  # [n, columns with one id]
    bags: dict[str, tuple[npt.NDArray[Any], ragged.Offsets]]
    weight: npt.NDArray[np.float32] | None = None  # [n]
    bag_weights: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # [N] for each weighted bag

    def __len__(self) -> int:
        return len(self.label)


class ShardRows:
    """The concatenated rows of one or more pieces, which are not copied.

    Args:
        pieces: The pieces, in order.
        order: Permutation of the rows, int64 [n], or None for stored order.
    """

    def __init__(self, pieces: Sequence[ShardPiece], order: npt.NDArray[np.int64] | None) -> None:
        self.pieces, self._order = pieces, order  # keeps the memory behind the addresses alive
        starts = ragged.offsets_of(np.array([len(piece) for piece in pieces]))
        self._first, self._size = starts[:-1], int(starts[-1])
        names = ("label", "dense", "ids") + (() if pieces[0].weight is None else ("weight",))
        self.columns = tuple(get_addresses([getattr(piece, name) for piece in pieces]) for name in names)
        self.bags = {
            name: tuple(get_addresses([piece.bags[name][part] for piece in pieces]) for part in (0, 1))
            for name in pieces[0].bags
        }
        self.bag_weights = {
            name: get_addresses([piece.bag_weights[name] for piece in pieces]) for name in pieces[0].bag_weights
        }

    def places(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the locations of the rows at positions [start, stop) of the order, encoded as in kernels.columns."""
        rows = np.arange(start, stop) if self._order is None else self._order[start:stop]
        return places_of(rows, self._first)

    def __len__(self) -> int:
        return self._size


Range = tuple[ShardRows, int, int]  # positions [start, stop) in the order of `ShardRows`


def gathered(ranges: Sequence[Range], whole: int | None) -> Batch:
    """Copy rows into a batch, in the order of `ranges`, using the host threads.

    Args:
        ranges: The rows to copy: one or more ranges, with the same columns.
        whole: Size of the step's full batch if the new batch is a slice of it, otherwise None.
    """
    ends = np.cumsum([0, *(stop - start for _, start, stop in ranges)]).tolist()
    found = [
        (rows, rows.places(start, stop), part) for (rows, start, stop), part in zip(ranges, _slices(ends), strict=True)
    ]
    like = ranges[0][0].pieces[0]
    label = np.empty((ends[-1], *(like.label.shape[1:] or (1,))), np.float32)
    weight = None if like.weight is None else np.empty((ends[-1], 1), np.float32)
    dense, ids = (np.empty((ends[-1], each.shape[1]), each.dtype) for each in (like.dense, like.ids))
    lengths = {name: np.empty(ends[-1], np.int32) for name in like.bags}
    columns = (label, dense, ids) if weight is None else (label, dense, ids, weight)
    tasks = []
    for rows, places, part in found:
        for addresses, out in zip(rows.columns, columns, strict=True):
            if out.shape[1]:
                tasks += take_tasks(places, addresses, out[part])
        for name, (_, offsets) in rows.bags.items():
            tasks += length_tasks(places, offsets, lengths[name][part])
    run_tasks(tasks)
    bags, bag_weights, tasks = {}, {}, []
    for name, each in lengths.items():
        begins = ragged.offsets_of(each)
        bags[name] = np.empty(begins[-1], like.bags[name][0].dtype), each
        if name in like.bag_weights:
            bag_weights[name] = np.empty(begins[-1], np.float32)
        for rows, places, part in found:
            values, offsets = rows.bags[name]
            tasks += list_tasks(places, offsets, values, begins[part.start : part.stop + 1], bags[name][0])
            if name in bag_weights:
                given = rows.bag_weights[name]
                tasks += list_tasks(places, offsets, given, begins[part.start : part.stop + 1], bag_weights[name])
    run_tasks(tasks)
    labels = label[:, 0] if like.label.ndim == 1 else label
    return Batch(labels, dense, ids, bags, whole, None if weight is None else weight[:, 0], bag_weights)


def _slices(ends: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(ends)]
