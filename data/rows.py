"""Rows of memory-mapped shards, and batches gathered from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.data import ragged
from hostdev.data.batch import Batch
from hostdev.kernels.columns import get_addresses, length_tasks, list_tasks, places_of, take_tasks
from hostdev.kernels.pool import run_tasks


@dataclass(frozen=True)
class Piece:
    """The n rows of one record batch; each bag has concatenated values [N] and offsets [n + 1]."""

    label: npt.NDArray[np.float32]  # [n], or [n, labels] if there are several labels
    dense: npt.NDArray[np.float32]  # [n, dense columns]
    ids: npt.NDArray[Any]  # [n, columns with one id]
    bags: dict[str, tuple[npt.NDArray[Any], ragged.Offsets]]
    weight: npt.NDArray[np.float32] | None = None  # [n]
    bag_weights: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # [N] for each weighted bag

    def __len__(self) -> int:
        return len(self.label)


class Rows:
    """The concatenated rows of one or more pieces, which are not copied.

    Args:
        pieces: The pieces, in order.
        order: Permutation of the rows, int64 [n], or None for stored order.
    """

    def __init__(self, pieces: Sequence[Piece], order: npt.NDArray[np.int64] | None) -> None:
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
        """Return the locations of the rows at positions [start, stop) of the order, encoded as in kernels.pieces."""
        rows = np.arange(start, stop) if self._order is None else self._order[start:stop]
        return places_of(rows, self._first)

    def __len__(self) -> int:
        return self._size


Range = tuple[Rows, int, int]  # positions [start, stop) in the order of a `Rows`


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
