"""Gradients sent to the rows' owners: some rows first gives the same sums as all at once."""

import numpy as np
import pytest

from hostdev.core.micro_batches import get_nodes
from hostdev.distributed.exchange import Exchange
from hostdev.distributed.gradients import SelectedRows
from hostdev.kernels.shards import ids_of, range_of
from tests.distributed.threads import with_ranks

ROWS, DIMS = [90, 7], [[3], [1, 5]]  # two groups, the second with two tables


@pytest.mark.parametrize("count", [1, 2, 3, 5])  # micro-batches of a rank: with one node, and with more
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_some_rows_first(ranks, count, share):
    def work(one):
        rng = np.random.default_rng(10 * ranks + one.rank)
        exchange = Exchange(one, ROWS, DIMS)
        ids = [rng.permutation(rows)[: rng.integers(0, rows + 1)] for rows in ROWS]
        found = exchange.ids(ids)
        asked, sizes = [each for _, each in found], [len(rows) for rows, _ in found]
        nodes = len(get_nodes(one.rank * count, (one.rank + 1) * count))
        grads = [
            [[rng.standard_normal((len(mine), dim), np.float32) for _ in range(nodes)] for dim in dims]
            for mine, dims in zip(ids, DIMS, strict=True)
        ]
        grads[1][0] = None  # of a table none has come to any rank
        if share == 0.3 and ranks == 2:
            grads[0][0] = None
        told = [np.random.default_rng(group).random(rows) < share for group, rows in enumerate(ROWS)]  # by id

        def sums():
            return [
                [
                    None if grad is None else np.full((n, dim), np.nan, np.float32)
                    for grad, dim in zip(mine, dims, strict=True)
                ]
                for mine, n, dims in zip(grads, sizes, DIMS, strict=True)
            ]

        whole, parts = sums(), sums()
        exchange.gradients(asked, grads, count, whole)
        first = []
        for (part, mine), rows, own, by_id in zip(found, ROWS, ids, told, strict=True):
            at = np.empty(len(own), np.int64)
            at[mine.places] = own  # what is asked for lies by owner
            here = by_id[ids_of(part + range_of(rows, one.rank, ranks)[0], rows)]
            first.append(SelectedRows(by_id[at], here[mine.inverse], here))
        exchange.gradients(asked, grads, count, parts, first)
        for group, each in enumerate(parts):
            for total, wanted in zip(each, whole[group], strict=True):
                if total is not None:
                    mask = first[group].rows
                    assert total[mask].tobytes() == wanted[mask].tobytes()
                    assert np.isnan(total[~mask]).all()
        exchange.gradients(asked, grads, count, parts, [each.others() for each in first])
        return whole, parts

    for result in with_ranks(ranks, work):
        assert not isinstance(result, Exception), result
        for whole, parts in zip(*result, strict=True):
            for wanted, total in zip(whole, parts, strict=True):
                assert (wanted is None) == (total is None)
                if wanted is not None:
                    assert not np.isnan(wanted).any()
                    assert total.tobytes() == wanted.tobytes()
