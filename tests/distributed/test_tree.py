"""The kernel that adds gradients of several ranks against a twin that adds one row after the other, to the bit."""

from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.micro_batches import Node, TreeSum, get_nodes
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.tree import tree_sums, uses_of
from tests.distributed.trees import tree_sum


def plus(left, right):
    return left + right


def numbers(rng, *shape):
    """Draw values of all magnitudes, 0 and -0 among them: another order has other bits."""
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 5, shape)).astype(np.float32)
    values[rng.random(shape) < 0.15] = -0.0
    values[rng.random(shape) < 0.05] = 0.0
    return values


def same(got, wanted):
    """Equal bits: -0 is not 0."""
    assert got.dtype == wanted.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def run(nodes, uses, values, rows, dim):
    """Return the kernel's result.

    nodes   of each rank (start, size)
    uses    of each rank the rows that it uses, each once
    values  of each rank and node float32 [uses, dim]
    """
    flat, begins, at = [], [], 0
    for of_rank in values:
        begins.append([])
        for one in of_rank:
            begins[-1].append(at)
            flat.append(one.ravel())
            at += one.size
    out = np.full((rows, dim), np.nan, np.float32)
    found = uses_of(np.concatenate(uses).astype(np.int32), [len(mine) for mine in uses], rows)
    firsts = [[start for start, _ in each] for each in nodes]
    tree_sums(np.concatenate(flat), found, firsts, begins, out)
    for own, of_rank in enumerate(values):  # one rank's lie elsewhere
        again, there = np.full((rows, dim), np.nan, np.float32), [0, *accumulate(one.size for one in of_rank)][:-1]
        where = [there if rank == own else each for rank, each in enumerate(begins)]
        mine = np.concatenate([one.ravel() for one in of_rank])
        tree_sums(np.concatenate(flat), found, firsts, where, again, own, mine)
        same(again, out)
    return out


def drawn_uses(rng, ranks, rows, share):
    return [rng.permutation(rows)[: rng.binomial(rows, share)] for _ in range(ranks)]


shapes = {
    "ranks": st.integers(1, 9),
    "each": st.integers(1, 9),
    "rows": st.integers(1, 40),
    "dim": st.integers(1, 9),
    "share": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    "seed": st.integers(0, 2**32),
    "threads": st.sampled_from([1, 3]),
}


@settings(deadline=None)
@given(**shapes)
def test_the_kernel_adds_in_the_order_of_the_tree(ranks, each, rows, dim, share, seed, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(seed)
    nodes = [get_nodes(rank * each, (rank + 1) * each) for rank in range(ranks)]
    uses = drawn_uses(rng, ranks, rows, share)
    values = [[numbers(rng, len(mine), dim) for _ in nodes[rank]] for rank, mine in enumerate(uses)]
    expected = np.zeros((rows, dim), np.float32)
    for row in range(rows):
        tree = TreeSum(plus)
        for rank, mine in enumerate(uses):
            [*found] = np.flatnonzero(mine == row)
            for (start, size), given_values in zip(nodes[rank], values[rank], strict=True):
                tree.put(Node(start, size, given_values[found[0]] if found else None))
        total = tree.total()
        expected[row] = 0.0 if total is None else total + np.float32(0)
    same(run(nodes, uses, values, rows, dim), expected)


@settings(deadline=None)
@given(**shapes)
def test_ranks_come_to_what_one_process_does(ranks, each, rows, dim, share, seed, threads):
    """A micro-batch that does not use a row of its rank contributes zeros, as in autograd."""
    set_host_threads(threads)
    rng = np.random.default_rng(seed)
    M = ranks * each
    micro_uses = drawn_uses(rng, M, rows, share)
    grads = np.zeros((M, rows, dim), np.float32)
    for number, mine in enumerate(micro_uses):
        grads[number, mine] = numbers(rng, len(mine), dim)
    nodes, uses, values = [], [], []
    for rank in range(ranks):
        part = range(rank * each, (rank + 1) * each)
        mine = np.unique(np.concatenate([micro_uses[number] for number in part]))
        tree = TreeSum(plus)
        for number in part:
            tree.put(Node(number, 1, grads[number, mine]))
        nodes.append([(node.start, node.size) for node in tree.nodes])
        uses.append(rng.permutation(len(mine)))
        values.append([node.value[uses[-1]] for node in tree.nodes])
        uses[-1] = mine[uses[-1]]
    same(run(nodes, uses, values, rows, dim), tree_sum(grads, plus) + np.float32(0))


def test_a_row_that_nobody_uses_is_zero_and_never_minus_zero():
    minus = np.full((1, 2), -0.0, np.float32)
    out = run([[(0, 1)], [(1, 1)]], [np.array([1]), np.array([1])], [[minus], [minus]], 3, 2)
    same(out, np.zeros((3, 2), np.float32))
