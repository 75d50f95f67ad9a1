"""Gradients of parameters that every rank has, added up over all micro-batches in the order of the tree.

Each rank owns a slice of the gradients' elements: it is given that slice of every node, adds them up, and gives the sum to
all. That moves what an all-reduce by a ring moves; the order of the additions does not depend on the ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hostdev.core.micro_batches import Node, TreeSum
from hostdev.parallel.ranks import Channel


def tree_all_reduce(channel: Channel, parts: Sequence[Node[Tensor]], nodes: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return the sum over all micro-batches of what ranks have for their nodes, on all ranks the same.

    parts  this rank's, each float32 [n] in host memory
    nodes  (start, size) of the nodes of every rank
    """
    n, W = int(parts[0].value.numel()), channel.ranks  # type: ignore[union-attr]
    edges = [n * rank // W for rank in range(W + 1)]
    widths = [edges[rank + 1] - edges[rank] for rank in range(W)]
    mine = widths[channel.rank]
    values = [part.value for part in parts if part.value is not None]
    if len(values) == 1:
        flat = values[0]
    else:
        flat = torch.cat([value[edges[rank] : edges[rank + 1]] for rank in range(W) for value in values])
    receive = [mine * len(each) for each in nodes]
    come = channel.all_to_all(flat, [width * len(values) for width in widths], receive)
    tree: TreeSum[Tensor] = TreeSum(lambda left, right: left.add_(right))
    at = 0
    for each in nodes:
        for start, size in each:
            tree.put(Node(start, size, come[at : at + mine]))
            at += mine
    total = tree.total()
    assert total is not None
    return channel.all_to_all(total.repeat(W), [mine] * W, widths)
