"""How a batch is cut into micro-batches, and in which order what they come to is added: functions of their number only.

A sum over micro-batches is a binary tree: neighbours are added, then neighbours of these, and one that is left over at
the end of a level goes up as it is. Of M micro-batches [0, M) a node is [start, start + size), size a power of two and
start a multiple of it, cut off at M. So whoever has computed some neighbouring micro-batches adds what nodes they make
up, and the rest is added where the nodes meet: the result does not depend on who has computed what.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
EXCHANGES = ("tree", "all-reduce")  # how ranks add up what all of them have; the latter in an order of its own


def cut(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return where the parts of a batch begin and end: as equal as they can be, some empty where rows are few."""
    return [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


class Node(NamedTuple, Generic[T]):
    """What some neighbouring micro-batches have come to; None where that is nothing, which is not added."""

    start: int
    size: int
    value: T | None


class TreeSum(Generic[T]):
    """Adds in the tree's order what comes in the order of the micro-batches.

    add  returns the sum of two values, and may change the first
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.nodes: list[Node[T]] = []  # as large as they can be so far, in order

    def put(self, node: Node[T]) -> None:
        """Add the next one."""
        while self.nodes and self.nodes[-1].size == node.size and self.nodes[-1].start % (2 * node.size) == 0:
            node = self._joined(self.nodes.pop(), node)
        self.nodes.append(node)

    def total(self) -> T | None:
        """Return the sum over all, which came from the first on; None where there is nothing."""
        while len(self.nodes) > 1:
            right = self.nodes.pop()
            self.nodes.append(self._joined(self.nodes.pop(), right))
        return self.nodes.pop().value if self.nodes else None

    def _joined(self, left: Node[T], right: Node[T]) -> Node[T]:
        value = left.value if right.value is None else right.value
        if left.value is not None and right.value is not None:
            value = self._add(left.value, right.value)
        return Node(left.start, 2 * left.size, value)


def nodes_of(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the nodes (start, size) that the micro-batches [start, stop) make up."""
    tree: TreeSum[None] = TreeSum(lambda left, right: None)
    for number in range(start, stop):
        tree.put(Node(number, 1, None))
    return [(node.start, node.size) for node in tree.nodes]
