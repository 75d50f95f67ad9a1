"""Sends row gradients to the rows' owners, which sum them: for all rows at once, or for some rows first.

The flat buffers of an all-to-all are ordered by rank, then group, then table.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from hostdev.distributed.channel import Channel
from hostdev.kernels.arrays import Mask, Rows
from hostdev.kernels.lookup import lookup_tasks
from hostdev.kernels.pool import Task, run_tasks
from hostdev.kernels.tree import tree_sums, uses_of

Parts = Sequence[Sequence[Sequence[Rows] | None]]


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


class SelectedRows(NamedTuple):
    """A subset of a group's rows in a batch, known to both the requesting and the owning ranks."""

    asked: Mask  # mask [U] of the rows that this rank requests
    wanted: Mask  # mask [any] of the rows requested from this rank, sorted by requesting rank
    rows: Mask  # mask [any] of the distinct rows requested from this rank

    def others(self) -> "SelectedRows":
        """Return the rows of the group that are not in this subset."""
        return SelectedRows(~self.asked, ~self.wanted, ~self.rows)


def give_gradients(
    channel: Channel,
    asked: Sequence[Any],
    grads: Parts,
    nodes: Sequence[Sequence[tuple[int, int]]],
    sums: Sequence[Sequence[Rows | None]],
    chosen: Sequence[SelectedRows] | None = None,
) -> int:
    """Send gradients to the rows' owners, and sum the gradients of this rank's rows.

    Args:
        channel: Carries the gradients.
        asked: By group, the rows that this rank requested and those requested from this rank (`exchange.Asked`).
        grads: By group and table, a list of gradients, float32 [U, D], one for each node of this rank
            (`core.micro_batches`); None if no rank has gradients.
        nodes: (start, size) of each rank's nodes; an empty list for a rank that requests nothing.
        sums: By group and table, the array into which the sums are written, float32 [any, D]; None for a table without
            gradients. Only chosen rows are written.
        chosen: By group, the rows whose gradients are exchanged; None means all rows.

    Returns:
        A lower bound on the bytes sent: one gradient for each row that another rank owns.
    """
    mine = channel.rank
    dims = [[0 if out is None else out.shape[1] for out in each] for each in sums]
    giving = [find_positions(one.counts, None if chosen is None else chosen[g].asked) for g, one in enumerate(asked)]
    taking = [_counts(one.wanted, None if chosen is None else chosen[g].wanted) for g, one in enumerate(asked)]
    # The gradients of rows that this rank owns are not sent.
    counts = [[len(at) * len(nodes[mine]) * (rank != mine) for rank, at in enumerate(each)] for each in giving]
    wanted = [[n * len(nodes[rank]) * (rank != mine) for rank, n in enumerate(each)] for each in taking]
    sizes = count_values(counts, dims)
    buffer = np.empty(sum(sizes), np.float32)
    views, tasks = make_views(buffer, counts, dims), list[Task]()
    own: list[list[Rows | None]] = [[None] * len(each) for each in dims]
    for group, places in enumerate(giving):
        for table, parts in enumerate(grads[group]):
            if parts is None:
                continue
            for rank, at in enumerate(places):
                out = views[rank][group][table]
                if rank == mine:
                    if isinstance(at, range) and len(parts) == 1:
                        own[group][table] = parts[0][at.start : at.stop].reshape(-1)
                        continue
                    out = np.empty((len(at) * len(parts), dims[group][table]), np.float32)
                    own[group][table] = out.reshape(-1)
                for number, part in enumerate(parts):
                    tasks += _copying(part, at, out[number * len(at) : (number + 1) * len(at)])
    run_tasks(tasks)
    received = channel.all_to_all(torch.from_numpy(buffer), sizes, count_values(wanted, dims)).numpy()
    begins = _begins(taking, dims, [len(each) for each in nodes], mine)
    firsts = [[start for start, _ in each] for each in nodes]
    for group, one in enumerate(asked):
        if not any(dims[group]):
            continue
        only = None if chosen is None else chosen[group].rows
        inverse = one.inverse if chosen is None else one.inverse[chosen[group].wanted]
        rows = next(len(out) for out in sums[group] if out is not None)
        uses = uses_of(inverse, taking[group], rows)
        for table, total in enumerate(sums[group]):
            if total is not None:
                tree_sums(received, uses, firsts, begins[group, table], total, mine, own[group][table], only)
    return 4 * sum(
        len(at) * sum(each)
        for places, each in zip(giving, dims, strict=True)
        for rank, at in enumerate(places)
        if rank != mine
    )


def _counts(wanted: Sequence[int], mask: Mask | None) -> list[int]:
    """Return the number of rows that arrive from each rank."""
    if mask is None:
        return list(wanted)
    return [int(np.count_nonzero(mask[start:stop])) for start, stop in pairwise([0, *accumulate(wanted)])]


def _copying(part: Rows, at: Any, out: Rows) -> list[Task]:
    if not isinstance(at, range):
        return lookup_tasks(part[:, None], at, out)
    out[:] = part[at.start : at.stop]
    return []


def _begins(
    counts: Sequence[Sequence[int]], dims: Sequence[Sequence[int]], nodes: Sequence[int], mine: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Return where the rows of each rank's nodes begin in the received buffer, by group and table.

    This rank's own rows are not received; they begin at 0 in a separate buffer.
    """
    begins: dict[tuple[int, int], list[list[int]]] = {}
    at = 0
    for rank, of_rank in enumerate(nodes):
        place = at
        for group, each in enumerate(dims):
            for table, dim in enumerate(each):
                size, first = counts[group][rank] * dim, 0 if rank == mine else place
                begins.setdefault((group, table), []).append([first + number * size for number in range(of_rank)])
                place += size * of_rank
        at = at if rank == mine else place
    return begins
