"""The split of a batch into micro-batches, and the order of sums over micro-batches.

The order depends only on the number of micro-batches.

A sum is a binary tree: pairs of neighbouring values are added, then pairs of these sums, and so on; a node without a
partner at the end of a level moves up unchanged. A node covers the micro-batches [start, start + size), cut off at the
last one, where size is a power of two and start a multiple of it. Each rank adds the nodes that lie within its own
consecutive micro-batches, and the ranks' nodes are then added along the same tree. The result therefore does not depend
on which rank computed which micro-batch.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
EXCHANGES = ("tree", "all-reduce")  # how ranks sum gradients; the communication library orders an all-reduce


def cut(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return each part's (begin, end) in a batch; parts are as equal as possible, some empty if samples are too few."""
    return [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


class Node(NamedTuple, Generic[T]):
    """The sum of `size` micro-batches from `start` on; `value` is None if none of them has a value."""

    start: int
    size: int
    value: T | None


class TreeSum(Generic[T]):
    """The sum, in the order of the tree, of values that arrive in the order of the micro-batches.

    Args:
        add: Returns the sum of two values, and may change the first.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.nodes: list[Node[T]] = []  # the largest complete nodes so far, in order

    def put(self, node: Node[T]) -> None:
        """Add the next node."""
        while self.nodes and self.nodes[-1].size == node.size and self.nodes[-1].start % (2 * node.size) == 0:
            node = self._joined(self.nodes.pop(), node)
        self.nodes.append(node)

    def total(self) -> T | None:
        """Return the sum over all micro-batches, or None if every value was None; remove all nodes."""
        while len(self.nodes) > 1:
            right = self.nodes.pop()
            self.nodes.append(self._joined(self.nodes.pop(), right))
        return self.nodes.pop().value if self.nodes else None

    def _joined(self, left: Node[T], right: Node[T]) -> Node[T]:
        value = left.value if right.value is None else right.value
        if left.value is not None and right.value is not None:
            value = self._add(left.value, right.value)
        return Node(left.start, 2 * left.size, value)


def get_nodes(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the largest nodes, as (start, size), that consist of micro-batches in [start, stop) only, in order."""
    tree: TreeSum[None] = TreeSum(lambda left, right: None)
    for number in range(start, stop):
        tree.put(Node(number, 1, None))
    return [(node.start, node.size) for node in tree.nodes]
