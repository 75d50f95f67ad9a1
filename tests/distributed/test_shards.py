"""The rows of a table spread over ranks: each has one place, and popular ones lie evenly."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hostdev
from hostdev import HostTable
from hostdev.kernels.shards import get_ids_at, get_multiplier, partition, range_of
from hostdev.pipeline.batch_ids import RowOffsets, RowSubset

LARGE = 10**10


def check_partition(ids, rows, ranks):
    """Each id lies at its position; a rank's ids are in ascending order."""
    local, places, counts = partition(ids, rows, ranks)
    assert (local.dtype, places.dtype, counts.dtype) == (ids.dtype, np.int32, np.int64)
    multiplier, expected = get_multiplier(rows), []
    for rank in range(ranks):
        start, stop = range_of(rows, rank, ranks)
        positions = [(number, int(one) * multiplier % rows) for number, one in enumerate(ids)]
        expected.append([(number, at - start) for number, at in positions if start <= at < stop])
    assert counts.tolist() == [len(mine) for mine in expected]
    flat = [pair for mine in expected for pair in mine]
    assert local.tolist() == [at for _, at in flat]
    assert np.argsort(places).tolist() == [number for number, _ in flat]


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 20), st.sampled_from([np.int32, np.int64]), st.integers(0, 99))
def test_every_id_has_a_place(rows, ranks, dtype, seed):
    rng = np.random.default_rng(seed)
    ids = rng.permutation(rows)[: rng.integers(0, min(rows, 60) + 1)].astype(dtype)
    check_partition(ids, rows, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 9, 1000, 1597, 4096])
def test_the_ids_of_all_ranks_are_all_ids(rows, ranks):
    """Fewer rows than ranks, one row, and one more than there are ranks among them."""
    edges = [range_of(rows, rank, ranks) for rank in range(ranks)]
    held = [get_ids_at(rows, *edge) for edge in edges]
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(rows))
    sizes = [len(ids) for ids in held]
    assert max(sizes) - min(sizes) <= 1
    local, places, counts = partition(np.arange(rows), rows, ranks)
    assert counts.tolist() == sizes
    ids = np.argsort(places)  # in the order in which they lie
    numbers = np.split(local, np.cumsum(counts)[:-1])
    found = [mine[number] for mine, number in zip(held, numbers, strict=True)]
    np.testing.assert_array_equal(np.concatenate(found), ids)


@settings(deadline=None)
@given(st.integers(1, 10**12))
@example(570_250_140_920)  # next to what fits
def test_the_multiplier_is_prime_to_the_rows_and_fits(rows):
    multiplier = get_multiplier(rows)
    assert math.gcd(multiplier, rows) == 1
    assert 0 < multiplier * (rows - 1) + 1 <= 2**63


@pytest.mark.parametrize("rows", [LARGE, LARGE - 33, 2**31 + 1, 2**33])
@pytest.mark.parametrize("ranks", [1, 7, 64])
def test_tables_of_more_rows_than_32_bits(rows, ranks):
    rng = np.random.default_rng(3)
    drawn = rng.integers(0, rows, 50)
    check_partition(np.unique(np.concatenate([np.arange(20), rows - 1 - np.arange(20), drawn])), rows, ranks)


@pytest.mark.parametrize("rows", [LARGE, LARGE - 33, 2**31 + 1])
def test_ids_by_position_in_large_tables(rows):
    for start in (0, 1, rows // 3, rows - 100):
        ids = get_ids_at(rows, start, start + 100)
        assert [int(one) * get_multiplier(rows) % rows for one in ids] == list(range(start, start + 100))


def test_a_place_does_not_depend_on_the_number_of_ranks():
    """A rank's positions are a range, so that those of other numbers of ranks are made of the same rows."""
    halves = np.concatenate([get_ids_at(1001, *range_of(1001, rank, 2)) for rank in range(2)])
    fifths = np.concatenate([get_ids_at(1001, *range_of(1001, rank, 5)) for rank in range(5)])
    np.testing.assert_array_equal(halves, fifths)


def test_popular_ids_are_spread():
    """The first ids of a vocabulary are used most: each rank has as many of them."""
    _, _, counts = partition(np.arange(1000), 185_000, 8)
    assert np.abs(counts - 125).max() <= 12.5, counts


@pytest.mark.parametrize("optimizer", [hostdev.LazyAdam(), hostdev.FTRL(), hostdev.RowWiseAdam(lr=0.1)])
@pytest.mark.parametrize(("rows", "ranks"), [(101, 3), (7, 2), (2, 5), (1, 2)])
@pytest.mark.parametrize("init", [hostdev.Normal(0.3), hostdev.Constant(2.0)])
def test_a_part_has_the_rows_of_the_whole_table(optimizer, rows, ranks, init):
    whole = HostTable(rows, 3, optimizer, name="t", seed=4, init=init)
    seen = []
    for rank in range(ranks):
        part = HostTable(rows, 3, optimizer, name="t", seed=4, init=init, part=(rank, ranks))
        ids = part.ids(0, part.rows)
        assert len(ids) == part.rows
        assert (part.total_rows, part.dim) == (rows, 3)
        np.testing.assert_array_equal(part.weights.view(np.int32), whole.weights[ids].view(np.int32))
        np.testing.assert_array_equal(part.block, whole.block[ids])
        np.testing.assert_array_equal(part.row_slots, whole.row_slots[ids])
        seen += ids.tolist()
    assert sorted(seen) == list(range(rows))
    np.testing.assert_array_equal(whole.ids(0, rows), np.arange(rows))


def test_a_rank_with_more_rows_than_32_bits():
    """Ids that fit into int32 may be rows beyond it among those of their rank."""
    rows = 5 * 10**9
    ids = np.arange(2**31 - 100, 2**31 - 1, dtype=np.int32)
    found, wanted = partition(ids, rows, 2), partition(ids.astype(np.int64), rows, 2)
    assert max(found[0]) > 2**31
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_groups_that_have_more_rows_together_than_32_bits():
    """Their ids may be int32, and are numbered among the rows of all of them."""
    groups = [SimpleNamespace(rows=rows, on_host=True) for rows in (1_500_000_000, 1_000_000_000, 2_000_000_000)]
    ids = [np.array(each, np.int32) for each in ([5, 1_499_999_999], [3, 900_000_000], [1_999_999_999])]
    offsets = RowOffsets(groups)
    joint = offsets.concatenate(ids)
    assert joint.ids.tolist() == [5, 1_499_999_999, 1_500_000_003, 2_400_000_000, 4_499_999_999]
    parts = offsets.split(RowSubset.select(joint.ids, np.arange(len(joint), dtype=np.int32)), joint.starts)
    for found in (parts, joint.all):
        assert [part.ids.tolist() for part in found] == [each.tolist() for each in ids]
