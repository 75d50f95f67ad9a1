"""Flat buffers of an all-to-all, ordered by rank, then group, then table."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hostdev.kernels.arrays import Mask, Rows


def count_values(counts: Sequence[Sequence[int]], dims: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of values in each rank's part of the buffer.

    The part holds counts[group][rank] rows of each table in each group. dims[group] lists D of each table in the group.
    """
    widths = [sum(each) for each in dims]
    return [sum(n * width for n, width in zip(each, widths, strict=True)) for each in zip(*counts, strict=True)]


def make_views(flat: Rows, counts: Sequence[Sequence[int]], dims: Sequence[Sequence[int]]) -> list[list[list[Rows]]]:
    """Return views of a buffer, indexed [rank][group][table], each of shape [counts[group][rank], D]."""
    at, views = 0, []
    for of_rank in zip(*counts, strict=True):
        groups = []
        for n, each in zip(of_rank, dims, strict=True):
            tables = []
            for dim in each:
                tables.append(flat[at : at + n * dim].reshape(n, dim))
                at += n * dim
            groups.append(tables)
        views.append(groups)
    return views


def find_positions(counts: Sequence[int], mask: Mask | None) -> list[Any]:
    """Return the positions of each rank's rows in a list of all ranks' rows, sorted by rank.

    The list has counts[rank] rows of each rank. A rank's positions are a range or, with a mask, an ascending int32
    array of the positions that the mask selects.
    """
    edges = [0, *accumulate(counts)]
    if mask is None:
        return [range(start, stop) for start, stop in pairwise(edges)]
    chosen = np.flatnonzero(mask).astype(np.int32)
    return np.split(chosen, np.searchsorted(chosen, edges[1:-1]))
