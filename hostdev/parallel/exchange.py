"""A batch's way between ranks: unique ids to those that hold their rows, rows back, and gradients to them.

Each rank looks up the rows of its own samples; each is the owner of a part of every table. A collective is called for
every batch, also where there is nothing to give: none depends on the data.

W ranks, G groups of tables that share ids, U unique ids of a group on this rank.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hostdev.core.micro_batches import nodes_of
from hostdev.kernels.groups import unique_groups
from hostdev.kernels.lookup import lookup_tasks
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.shards import partition
from hostdev.kernels.tree import tree_sums
from hostdev.parallel.ranks import Channel, Ranks

Ids = npt.NDArray[Any]
Rows = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]
_END = -1  # in place of a number of ids: there is no further batch


class Asked(NamedTuple):
    """What a rank asks for of a group's rows in a batch, and what all ask for of those here."""

    places: Positions  # int32 [U], where the row of each unique id comes to lie: by owner
    counts: list[int]  # of the rows asked for, by rank
    wanted: list[int]  # of the rows here, by the rank that asks
    inverse: Positions  # int32 [sum(wanted)], each among the unique rows here

    @property
    def size(self) -> int:
        """U."""
        return len(self.places)


class Exchange:
    """What ranks exchange for the batches of one pass after the other.

    ranks  with which
    rows   of each group, those of its tables on all ranks
    dims   of each group, the columns of its tables
    kind   "" in training, or "predict ": with channels of its own
    """

    def __init__(self, ranks: Ranks, rows: Sequence[int], dims: Sequence[Sequence[int]], kind: str = "") -> None:
        self.ranks, self._rows, self._dims = ranks, list(rows), [list(each) for each in dims]
        self._ids, self._values = ranks[f"{kind}ids"], ranks[f"{kind}rows"]
        self._gradients = ranks["gradients"]
        self._dtype = np.dtype(np.int32 if max(rows) < 2**31 else np.int64)

    def ids(self, groups: Sequence[Ids]) -> list[tuple[Ids, Asked]]:
        """Ask the owners for rows; return of each group the unique rows that are asked for here, and who asks.

        groups  unique ids [U] of each
        """
        found = [partition(ids, rows, self.ranks.size) for ids, rows in zip(groups, self._rows, strict=True)]
        counts = np.stack([counts for _, _, counts in found], axis=1)  # [W, G]
        wanted = self._ids.exchange_counts(counts)
        self._require_all(wanted)
        ends = [np.concatenate([[0], np.cumsum(counts)]) for _, _, counts in found]
        parts = [
            local[end[rank] : end[rank + 1]]
            for rank in range(self.ranks.size)
            for (local, _, _), end in zip(found, ends, strict=True)
        ]
        flat = np.concatenate(parts, dtype=self._dtype, casting="same_kind") if self._dtype == np.int64 else (
            np.concatenate(parts).astype(self._dtype, copy=False)
        )  # fmt: skip
        sums, receive = counts.sum(1).tolist(), wanted.sum(1).tolist()
        come = self._ids.all_to_all(torch.from_numpy(flat), sums, receive).numpy()
        pieces = np.split(come, np.cumsum(wanted.ravel())[:-1])  # by rank, by group
        here = unique_groups([pieces[group :: len(groups)] for group in range(len(groups))])
        return [
            (ids, Asked(places, counts[:, group].tolist(), wanted[:, group].tolist(), inverse))
            for group, ((_, places, _), (ids, inverse)) in enumerate(zip(found, here, strict=True))
        ]

    def end(self) -> None:
        """Tell the others that there is no further batch."""
        counts = np.full((self.ranks.size, len(self._rows)), _END, np.int64)
        self._require_all(self._ids.exchange_counts(counts), ended=True)

    def _require_all(self, wanted: npt.NDArray[np.int64], *, ended: bool = False) -> None:
        """ValueError where the batches of some ranks have ended, and not those of others."""
        have_ended = wanted[:, 0] == _END
        if have_ended.all() if ended else not have_ended.any():
            return
        done, going = np.flatnonzero(have_ended).tolist(), np.flatnonzero(~have_ended).tolist()
        raise ValueError(
            f"the batches of the ranks {', '.join(map(str, done))} have ended, and those of {', '.join(map(str, going))}"
            " go on; all ranks are to have equally many steps, with batches of no samples where there are none left"
        )

    def rows(self, asked: Sequence[Asked], values: Sequence[Sequence[Rows]]) -> list[list[Rows]]:
        """Give the others the rows that they ask for; return those asked for, by owner: [U, D] of each table.

        values  of each group and table the unique rows here, float32 [any, D]
        """
        sizes = self._sizes([one.wanted for one in asked])
        buffer, tasks = np.empty(sum(sizes), np.float32), []
        views = self._views(buffer, [one.wanted for one in asked])
        for group, one in enumerate(asked):
            ends = [0, *accumulate(one.wanted)]
            for rank in range(self.ranks.size):
                ids = one.inverse[ends[rank] : ends[rank + 1]]
                for table, block in enumerate(values[group]):
                    tasks += lookup_tasks(block[:, None], ids, views[rank][group][table])
        run_tasks(tasks)
        come = self._give(self._values, buffer, sizes, self._sizes([one.counts for one in asked]))
        views = self._views(come, [one.counts for one in asked])
        return [
            [np.concatenate([views[rank][group][table] for rank in range(self.ranks.size)])
             for table in range(len(dims))]
            for group, dims in enumerate(self._dims)
        ]  # fmt: skip

    def gradients(
        self,
        asked: Sequence[Asked],
        sizes: Sequence[int],
        grads: Sequence[Sequence[Sequence[Rows] | None]],
        parts: int,
    ) -> list[list[Rows | None]]:
        """Give the owners the gradients of the rows that they gave; return the sums of those here, [any, D].

        sizes  how many unique rows of each group are here
        grads  of each group and table those of this rank's nodes (`core.micro_batches`), float32 [U, D]; None where
               none has come. None is returned where none has come to any rank
        parts  micro-batches of a step on each rank
        """
        W, mine = self.ranks.size, self.ranks.rank
        nodes = [nodes_of(rank * parts, (rank + 1) * parts) for rank in range(W)]
        has = np.array([[grad is not None for group in grads for grad in group]], np.int64)
        given = self._gradients.exchange_counts(np.repeat(has, W, axis=0)).any(0).tolist()
        wanted = [[one.wanted[rank] * len(nodes[rank]) for rank in range(W)] for one in asked]
        counts = [[n * len(nodes[mine]) for n in one.counts] for one in asked]
        dims, left = [], iter(given)
        for each in self._dims:
            dims.append([dim if next(left) else 0 for dim in each])
        buffer = np.empty(sum(self._sizes(counts, dims)), np.float32)
        views = self._views(buffer, counts, dims)
        for group, one in enumerate(asked):
            ends = [0, *accumulate(one.counts)]
            for table, dim in enumerate(dims[group]):
                own = grads[group][table]
                for rank in range(W) if dim else ():
                    n, out = one.counts[rank], views[rank][group][table]
                    for number in range(len(nodes[mine])):
                        part = 0.0 if own is None else own[number][ends[rank] : ends[rank + 1]]
                        out[number * n : (number + 1) * n] = part
        receive = self._sizes(wanted, dims)
        come = self._give(self._gradients, buffer, self._sizes(counts, dims), receive)
        return self._sums(come, asked, sizes, dims, nodes)

    def _sums(
        self, come: Rows, asked: Sequence[Asked], sizes: Sequence[int], dims: Sequence[Sequence[int]],
        nodes: Sequence[Sequence[tuple[int, int]]],
    ) -> list[list[Rows | None]]:  # fmt: skip
        firsts = [[start for start, _ in each] for each in nodes]
        sums: list[list[Rows | None]] = [[None] * len(each) for each in dims]
        begins: dict[tuple[int, int], list[list[int]]] = {}
        at = 0
        for rank in range(self.ranks.size):  # as `_views` has it
            for group, one in enumerate(asked):
                for table, dim in enumerate(dims[group]):
                    each = one.wanted[rank] * dim
                    places = [at + number * each for number in range(len(firsts[rank]))]
                    begins.setdefault((group, table), []).append(places)
                    at += each * len(places)
        for (group, table), places_of in begins.items():
            if dims[group][table]:
                out = np.empty((sizes[group], dims[group][table]), np.float32)
                one = asked[group]
                tree_sums(come, one.inverse, one.wanted, firsts, places_of, out)
                sums[group][table] = out
        return sums

    def _sizes(self, counts: Sequence[Sequence[int]], dims: Sequence[Sequence[int]] | None = None) -> list[int]:
        """Return how many values go to, or come from, each rank."""
        widths = [sum(each) for each in dims or self._dims]
        return [sum(n[rank] * width for n, width in zip(counts, widths, strict=True)) for rank in range(self.ranks.size)]

    def _views(
        self, flat: Rows, counts: Sequence[Sequence[int]], dims: Sequence[Sequence[int]] | None = None
    ) -> list[list[list[Rows]]]:
        """Return the parts of a buffer: by rank, group and table, each [counts[group][rank], D]."""
        at, views = 0, []
        for rank in range(self.ranks.size):
            of_rank = []
            for n, each in zip(counts, dims or self._dims, strict=True):
                tables = []
                for dim in each:
                    tables.append(flat[at : at + n[rank] * dim].reshape(n[rank], dim))
                    at += n[rank] * dim
                of_rank.append(tables)
            views.append(of_rank)
        return views

    def _give(self, channel: Channel, values: Rows, counts: Sequence[int], receive: Sequence[int]) -> Rows:
        out: Rows = channel.all_to_all(torch.from_numpy(values), counts, receive).numpy()
        return out
