"""The sum over all micro-batches in one place."""

from hostdev.core.micro_batches import Node, TreeSum


def tree_sum(values, add):
    """The sum over the values of all micro-batches in the tree's order; None counts as nothing."""
    tree = TreeSum(add)
    for number, value in enumerate(values):
        tree.put(Node(number, 1, value))
    return tree.total()
