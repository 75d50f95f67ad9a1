"""Buffers of what ranks give each other: by rank, group and table, end to end."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


def sizes_of(counts: Sequence[Sequence[int]], dims: Sequence[Sequence[int]]) -> list[int]:
    """Return how many values go to, or come from, each rank.

    counts  of each group the rows, by rank
    dims    of each group the columns of its tables
    """
    widths = [sum(each) for each in dims]
    return [sum(n * width for n, width in zip(each, widths, strict=True)) for each in zip(*counts, strict=True)]


def views_of(flat: Rows, counts: Sequence[Sequence[int]], dims: Sequence[Sequence[int]]) -> list[list[list[Rows]]]:
    """Return the parts of a buffer: by rank, group and table, each [counts[group][rank], D]."""
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
