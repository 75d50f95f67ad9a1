"""How batches are cut into micro-batches and parts, and the order in which their gradients are added."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.micro_batches import Node, TreeSum, cut, get_nodes
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.preprocess.build import Options
from hostdev.data.shards import ShardReader
from tests.data import movies, twins
from tests.distributed.trees import tree_sum

BATCH = 130


def added(left, right):
    """The sum as it would be written, so that another order is another text."""
    return f"({left}+{right})"


def by_levels(values):
    """The tree, level by level: neighbours are added, and a leftover moves up."""
    while len(values) > 1:
        pairs = [(values[i], values[i + 1] if i + 1 < len(values) else None) for i in range(0, len(values), 2)]
        values = [added(a, b) if a and b else a or b for a, b in pairs]
    return values[0]


def in_parts(values, edges):
    """Return the sum, with each part's nodes added first."""
    whole = TreeSum(added)
    for start, stop in pairwise(edges):
        part = TreeSum(added)
        for number in range(start, stop):
            part.put(Node(number, 1, values[number]))
        assert [(node.start, node.size) for node in part.nodes] == get_nodes(start, stop)
        for node in part.nodes:
            whole.put(node)
    return whole.total()


some = st.lists(st.booleans(), min_size=1, max_size=70)


def named(present):
    """Name each micro-batch; None for those without a gradient."""
    return [f"g{number}" if here else None for number, here in enumerate(present)]


def test_an_order_in_full():
    assert tree_sum("abcde", added) == "(((a+b)+(c+d))+e)"
    assert tree_sum("abcdefg", added) == "(((a+b)+(c+d))+((e+f)+g))"
    assert tree_sum(["a", None, "c", None, None, "f"], added) == "((a+c)+f)"


@settings(deadline=None)
@given(some)
def test_the_sum_is_the_tree_of_all_levels(present):
    values = named(present)
    assert tree_sum(values, added) == by_levels(values)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 12), st.data())
def test_ranks_come_to_what_one_process_does(ranks, each, data):
    values = named(data.draw(st.lists(st.booleans(), min_size=ranks * each, max_size=ranks * each)))
    assert in_parts(values, range(0, len(values) + 1, each)) == tree_sum(values, added)


@settings(deadline=None)
@given(some, st.data())
def test_parts_of_unequal_size_come_to_the_same(present, data):
    values = named(present)
    inner = data.draw(st.lists(st.integers(0, len(values)), max_size=6))
    assert in_parts(values, [0, *sorted(inner), len(values)]) == tree_sum(values, added)


def test_nothing_comes_to_nothing():
    assert tree_sum([], added) is None
    assert tree_sum([None, None, None], added) is None
    assert get_nodes(5, 5) == []


def test_the_first_of_two_may_be_changed():
    """And the second may not, which its owner still has."""
    values = [[number] for number in range(7)]
    total = tree_sum(values, lambda left, right: left.extend(right) or left)
    assert total == [0, 1, 2, 3, 4, 5, 6]
    assert values[1::2] == [[1], [3], [5]]


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 300))
def test_nodes_lie_end_to_end_and_are_as_large_as_they_can_be(start, count):
    nodes = get_nodes(start, start + count)
    edges = [start, *(first + size for first, size in nodes)]
    assert [first for first, _ in nodes] == edges[:-1]
    assert edges[-1] == start + count
    for first, size in nodes:
        assert size & (size - 1) == 0
        assert first % size == 0
        assert first % (2 * size) or first + 2 * size > start + count


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 6))
def test_a_cut_is_as_equal_as_it_can_be(rows, each, ranks):
    parts = cut(rows, each * ranks)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == rows
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1
    # Of a rank's part of the batch the micro-batches are those of the whole batch.
    assert [parts[rank * each][0] for rank in range(ranks)] == [start for start, _ in cut(rows, ranks)]


def rows_of(batch):
    """The batch's rows as Python values."""
    bags = {}
    for name, (values, lengths) in batch.bags.items():
        ends = np.concatenate([[0], np.cumsum(lengths)])
        assert ends[-1] == len(values)
        bags[name] = [values[start:stop].tolist() for start, stop in pairwise(ends)]
    return [
        (batch.label[row], batch.dense[row].tolist(), batch.ids[row].tolist(), *(bag[row] for bag in bags.values()))
        for row in range(len(batch))
    ]


def made(size, rng):
    lengths = rng.integers(0, 4, size).astype(np.int32)
    others = rng.integers(0, 2, size).astype(np.int32)
    bags = {"a": (np.arange(lengths.sum()), lengths), "b": (np.arange(others.sum()) + 1000, others)}
    return Batch(
        np.arange(size, dtype=np.float32), rng.random((size, 2), np.float32), rng.integers(0, 9, (size, 3)), bags
    )


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 99))
def test_a_batch_is_split_with_its_bags(size, parts, seed):
    batch = made(size, np.random.default_rng(seed))
    edges = [0, *(stop for _, stop in cut(size, parts))]
    split = list(batch.split(edges))
    assert [len(part) for part in split] == np.diff(edges).tolist()
    assert [row for part in split for row in rows_of(part)] == rows_of(batch)
    assert {part.step_rows for part in split} == {size}
    assert all(part.ids.base is batch.ids for part in split)  # nothing is copied


def test_a_part_that_is_split_knows_the_whole_batch():
    batch = made(12, np.random.default_rng(1))
    first, _ = batch.split([0, 5, 12])
    assert [(len(part), part.step_rows) for part in first.split([0, 2, 5])] == [(2, 12), (3, 12)]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A reader of training rows with bags, in shards of which the last is small."""
    folder = tmp_path_factory.mktemp("uneven")
    twins.build_table(
        movies.make(rows=1000, users=30, items=20).write_csv(folder / "films.csv"),
        folder / "data",
        label="liked",
        numeric=("age",),
        categorical=("user", "item"),
        bags=(("history", " "), ("genres", "|")),
        options=Options(threshold=0, rows_per_shard=300),
    )
    found = manifest.read(folder / "data")
    sizes = {shard.rows for shard in found.shards("train")}
    assert len(sizes) > 1
    return ShardReader(folder / "data", found, "train")


@pytest.mark.parametrize("parts", [1, 2, 3, 7, BATCH + 20])
@pytest.mark.parametrize(("seed", "skip"), [(None, 0), (5, 0), (5, 3)])
def test_the_parts_of_all_are_the_batches(uneven, parts, seed, skip):
    """Batches that go over the ends of shards, a small one at the end, and more parts than rows among them."""
    batches = list(uneven.batches(BATCH, seed=seed, epoch=2, skip=skip))
    assert len(batches) == uneven.steps(BATCH) - skip
    assert len(batches[-1]) < BATCH
    readers = [uneven.batches(BATCH, seed=seed, epoch=2, skip=skip, part=(part, parts)) for part in range(parts)]
    for batch, *split in zip(batches, *readers, strict=True):
        assert [len(part) for part in split] == [stop - start for start, stop in cut(len(batch), parts)]
        assert [row for part in split for row in rows_of(part)] == rows_of(batch)
        assert {part.step_rows for part in split} == {len(batch)}
        assert {part.ids.dtype for part in split} == {batch.ids.dtype}


def test_one_batch_of_everything_in_parts(uneven):
    [batch] = uneven.batches(uneven.rows)
    parts = [next(uneven.batches(uneven.rows, part=(part, 4))) for part in range(4)]
    assert [row for part in parts for row in rows_of(part)] == rows_of(batch)
