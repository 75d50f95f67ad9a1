"""Sums of each row's gradients from several ranks, added in the order of the tree in `core.micro_batches`.

Shapes: N gradients from all ranks, U rows, D columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import inline, kernel, prefetch_to_read
from hostdev.kernels.pool import parallel_for
from hostdev.kernels.segment import sort_uses

_MOST_HEIGHT = 64
_NONE = np.empty(0, np.bool_)
_GRAIN = 256  # rows per range
_AHEAD = 8  # prefetch distance in occurrences: memory latency / time per row


@inline
def _height(a, b):
    """Return the height of the lowest common ancestor of two nodes, each identified by its first micro-batch."""
    different, height = np.uint64(a) ^ np.uint64(b), 0
    while different:
        different >>= np.uint64(1)
        height += 1
    return height


@kernel
def _sum_rows(start, stop, ends, order, source, node_ends, nodes, strides, own_rank, own, grads, only, out):
    one, D = np.uint64(1), np.uint64(out.shape[1])
    stack = np.empty((_MOST_HEIGHT, out.shape[1]), np.float32)
    places = np.empty(_MOST_HEIGHT, np.int64)
    last = np.uint64(ends[stop])
    for u in range(np.uint64(start), np.uint64(stop)):
        if len(only) and not only[u]:
            continue
        total = out[u]
        begin, end = np.uint64(ends[u]), np.uint64(ends[u + one])
        if begin == end:
            for j in range(D):
                total[j] = np.float32(0)
            continue
        height = 0
        for k in range(begin, end):
            ahead = k + np.uint64(_AHEAD)
            if ahead < last:  # prefetch the gradient of the first node
                use = np.uint64(order[ahead])
                rank = np.uint64(source[use])
                row = np.uint64(strides[np.uint64(node_ends[rank])]) + use * D
                prefetch_to_read(own if rank == own_rank else grads, row, D * 4)
            use = np.uint64(order[k])
            rank = np.uint64(source[use])
            values = own if rank == own_rank else grads
            first, after = np.uint64(node_ends[rank]), np.uint64(node_ends[rank + one])
            if begin + one == end and first + one == after:  # the row's only gradient
                row = np.uint64(strides[first]) + use * D
                for j in range(D):
                    total[j] = values[row + j] + np.float32(0)
                break
            for node in range(first, after):
                place = nodes[node]
                while height > 1 and _height(places[height - 2], places[height - 1]) < _height(
                    places[height - 1], place
                ):
                    below, above = stack[height - 2], stack[height - 1]
                    for j in range(D):
                        below[j] += above[j]
                    height -= 1
                row = np.uint64(strides[node]) + use * D
                top = stack[height]
                for j in range(D):
                    top[j] = values[row + j]
                places[height] = place
                height += 1
        if not height:
            continue
        while height > 1:
            below, above = stack[height - 2], stack[height - 1]
            for j in range(D):
                below[j] += above[j]
            height -= 1
        for j in range(D):
            total[j] = stack[0, j] + np.float32(0)


class RankUses(NamedTuple):
    """The occurrences of U rows on several ranks, sorted by row.

    Attributes:
        ends: int64 [U + 2]; the occurrences of row u are order[ends[u] : ends[u + 1]].
        order: int32 [N], the occurrences sorted by row, and within a row by rank.
        source: int32 [N], the rank of each occurrence.
        counts: For each rank, its number of occurrences.
    """

    ends: npt.NDArray[np.int64]
    order: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    counts: Sequence[int]


def uses_of(inverse: npt.NDArray[np.int32], counts: Sequence[int], rows: int) -> RankUses:
    """Sort occurrences by row.

    Args:
        inverse: int32 [N], the row of each occurrence; the occurrences are ordered by rank.
        counts: For each rank, its number of occurrences.
        rows: U, the number of rows.
    """
    ends, order = np.empty(rows + 2, np.int64), np.empty(len(inverse), np.int32)
    sort_uses(inverse, ends, order)
    return RankUses(ends, order, np.repeat(np.arange(len(counts), dtype=np.int32), counts), counts)


def tree_sums(
    grads: npt.NDArray[np.float32],
    uses: RankUses,
    nodes: Sequence[Sequence[int]],
    begins: Sequence[Sequence[int]],
    out: npt.NDArray[np.float32],
    own_rank: int = -1,
    own: npt.NDArray[np.float32] | None = None,
    only: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Sum the ranks' gradients of each row.

    Args:
        grads: float32, 1-dimensional: the received gradients.
        uses: The occurrences of the rows.
        nodes: For each rank, the first micro-batch of each of its nodes, ascending.
        begins: For each rank and node, where the node's gradients, [number of the rank's occurrences, D], begin in
            `grads`, or in `own` for the rank `own_rank`.
        out: float32 [U, D], written: the sums; 0 for rows that do not occur, and never -0.
        own_rank: The rank whose gradients are in `own`.
        own: float32, 1-dimensional: the gradients of the rank `own_rank`, if they are not in `grads`; else None.
        only: bool [U], which rows to write, or None to write all rows.
    """
    firsts = np.cumsum(uses.counts) - uses.counts  # each rank's first occurrence
    D = out.shape[1]
    strides = [begin - int(firsts[rank]) * D for rank, each in enumerate(begins) for begin in each]
    node_ends = np.concatenate([[0], np.cumsum([len(each) for each in nodes])])
    flat = np.array([node for each in nodes for node in each], np.int64)
    arguments = (
        uses.ends,
        uses.order,
        uses.source,
        node_ends,
        flat,
        np.array(strides, np.int64),
        own_rank,
        grads if own is None else own,
        grads,
        _NONE if only is None else only,
        out,
    )
    parallel_for(_sum_rows, len(out), *arguments, grain=_GRAIN)
