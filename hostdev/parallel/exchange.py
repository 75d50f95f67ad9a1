"""A batch's way between ranks: unique ids to those that hold their rows, rows back, and gradients to them.

Each rank looks up the rows of its own samples; each is the owner of a part of every table. A collective is called for
every batch, also where there is nothing to give: none depends on the data.

W ranks, G groups of tables that share ids, U unique ids of a group on this rank.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hostdev.kernels.groups import unique_groups
from hostdev.kernels.lookup import lookup_tasks, store_tasks
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.shards import partition, range_of
from hostdev.parallel.buffers import Mask, make_views, places_of, sizes_of
from hostdev.parallel.gradients import Chosen, Parts, give_gradients
from hostdev.parallel.ranks import Channel, Ranks

Ids = npt.NDArray[Any]
Rows = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]
Places = npt.NDArray[np.int32]
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


class Incoming(NamedTuple):
    """The rows of a batch that are on their way from their owners."""

    rows: list[list[Rows]]  # of each group and table, float32 [U, D]; late ones are missing
    given: list[Mask] | None = None  # of each group which of the rows wanted here have been given; None: all
    come: list[Mask] | None = None  # which of those that this rank asks for have come
    shared: Sequence[Mask] = ()  # which of those that it asked for in the batch before are to be given late here


def _list_positions(counts: Sequence[int], mask: Mask | None) -> list[Places]:
    """Return `places_of` as arrays."""
    return [
        np.arange(at.start, at.stop, dtype=np.int32) if isinstance(at, range) else at for at in places_of(counts, mask)
    ]


class Exchange:
    """What ranks exchange for the batches of one pass after the other.

    ranks  with which
    rows   of each group, those of its tables on all ranks
    dims   of each group, the columns of its tables

    All ranks make theirs in the same order.
    """

    def __init__(self, ranks: Ranks, rows: Sequence[int], dims: Sequence[Sequence[int]]) -> None:
        self.ranks, self._rows, self._dims = ranks, list(rows), [list(each) for each in dims]
        self._here = [stop - start for start, stop in (range_of(each, *ranks.part()) for each in rows)]  # of each group
        self._channels = self._ids, self._values, self._late, self._gradients = [ranks.channel() for _ in range(4)]
        self.least_bytes = 0  # that could have been sent to others, in place of what was: ids, rows and gradients once
        self._counting = threading.Lock()  # several threads exchange
        self._dtype = np.dtype(np.int32 if max(rows) < 2**31 else np.int64)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to others so far."""
        return sum(channel.sent_bytes for channel in self._channels)

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
        flat = np.concatenate(parts).astype(self._dtype, copy=False)
        sums, receive = counts.sum(1).tolist(), wanted.sum(1).tolist()
        come = self._ids.all_to_all(torch.from_numpy(flat), sums, receive).numpy()
        self._count((len(flat) - sums[self.ranks.rank]) * flat.itemsize)
        pieces = np.split(come, np.cumsum(wanted.ravel())[:-1])  # by rank, by group
        self._require_here(come, pieces)
        here = unique_groups([pieces[group :: len(groups)] for group in range(len(groups))])
        return [
            (ids, Asked(places, counts[:, group].tolist(), wanted[:, group].tolist(), inverse))
            for group, ((_, places, _), (ids, inverse)) in enumerate(zip(found, here, strict=True))
        ]

    def _require_here(self, come: Ids, pieces: Sequence[Ids]) -> None:
        """ValueError where another rank asks for rows that this one does not have: kernels do not check them.

        come    all that are asked for; pieces: the same, by rank and by group
        """
        if not len(come) or (come.min() >= 0 and come.max() < min(self._here)):
            return
        for number, ids in enumerate(pieces):
            rank, group = divmod(number, len(self._here))
            if len(ids) and not (ids.min() >= 0 and ids.max() < self._here[group]):
                wrong = ids[(ids < 0) | (ids >= self._here[group])][0]
                raise ValueError(
                    f"rank {rank} asks rank {self.ranks.rank} for row {wrong} of its part of tables with "
                    f"{self._rows[group]:,} rows, which has {self._here[group]:,}; are the tables of both of one size?"
                )

    def end(self) -> None:
        """Tell the others that there is no further batch."""
        counts = np.full((self.ranks.size, len(self._rows)), _END, np.int64)
        self._require_all(self._ids.exchange_counts(counts), ended=True)

    def _require_all(self, wanted: npt.NDArray[np.int64], *, ended: bool = False) -> None:
        """ValueError where the batches of some ranks have ended, and not those of others."""
        have_ended = wanted[:, 0] == _END
        if (wanted < _END).any():
            rank = int(np.flatnonzero((wanted < _END).any(1))[0])
            raise ValueError(f"rank {rank} asks for a negative number of rows: {wanted[rank].min()}")
        if have_ended.all() if ended else not have_ended.any():
            return
        done, going = np.flatnonzero(have_ended).tolist(), np.flatnonzero(~have_ended).tolist()
        raise ValueError(
            f"the batches of the ranks {', '.join(map(str, done))} have ended, and those of "
            f"{', '.join(map(str, going))} go on; all ranks are to have equally many steps, with empty batches where "
            "no samples are left"
        )

    def early_rows(
        self,
        asked: Sequence[Asked],
        values: Sequence[Sequence[Rows] | None],
        early: Sequence[Mask] | None,
        buffer: Callable[[int, int], Rows],
        before: Sequence[Asked] = (),
        shared: Sequence[Mask] = (),
    ) -> "Incoming":
        """Give the others those rows that may be given now, and take theirs; `late_rows` is to follow for the rest.

        values  of each group and table the unique rows here, float32 [any, D]; None for a group of which none are early
        early   of each group which of them, [any]; None: all of every group, and nothing follows
        buffer  makes the memory for rows [U, D] of a table
        before  what was asked for in the batch before, on all ranks or on none
        shared  of each group which of the rows wanted then are to be given late, so that their gradients come first
        """
        incoming = Incoming(
            [[buffer(one.size, dim) for dim in dims] for one, dims in zip(asked, self._dims, strict=True)]
        )
        if early is not None:
            wanted = [mask[one.inverse] for mask, one in zip(early, asked, strict=True)]
            told = self._exchange_masks([*asked, *before], [*wanted, *shared])
            incoming = incoming._replace(given=wanted, come=told[: len(asked)], shared=told[len(asked) :])
        self._move(self._values, asked, values, incoming.given, _list_incoming(asked, incoming.come), incoming.rows)
        return incoming

    def late_rows(
        self,
        incoming: "Incoming",
        asked: Sequence[Asked],
        values: Sequence[Sequence[Rows]],
        buffer: Callable[[int, int], Rows] | None = None,
    ) -> tuple[list[Places], list[list[Rows]]]:
        """Give and take the rows that `early_rows` has left out; return which ones of each group have come, [L].

        buffer  makes the memory for what comes, [L, D], which is returned too; None: it goes to its places among the
                rows that came early
        """
        assert incoming.given is not None and incoming.come is not None
        given, come = [~mask for mask in incoming.given], [~mask for mask in incoming.come]
        if buffer is None:
            out, taking = incoming.rows, _list_incoming(asked, come)
        else:
            numbers = [
                [int(part.sum()) for part in np.split(mask, np.cumsum(one.counts)[:-1])]
                for mask, one in zip(come, asked, strict=True)
            ]
            out = [[buffer(sum(each), dim) for dim in dims] for each, dims in zip(numbers, self._dims, strict=True)]
            taking = [_list_positions(each, None) for each in numbers]
        self._move(self._late, asked, values, given, taking, out)
        return [np.flatnonzero(mask).astype(np.int32) for mask in come], out

    def _exchange_masks(self, asked: Sequence[Asked], wanted: Sequence[Mask]) -> list[Mask]:
        """Tell the others which of the rows that they want come early; return which of those wanted here do."""
        W = self.ranks.size
        cut = [np.split(mask, np.cumsum(one.wanted)[:-1]) for mask, one in zip(wanted, asked, strict=True)]
        bits = [np.packbits(np.concatenate([parts[rank] for parts in cut])) for rank in range(W)]
        sizes = [sum(one.counts[rank] for one in asked) for rank in range(W)]
        flat = torch.from_numpy(np.concatenate(bits))
        come = self._values.all_to_all(flat, [len(each) for each in bits], [-(-size // 8) for size in sizes]).numpy()
        found: list[list[Any]] = [[] for _ in asked]
        at = 0
        for rank, size in enumerate(sizes):
            mine = np.unpackbits(come[at : at + -(-size // 8)], count=size).view(np.bool_)
            at += -(-size // 8)
            for parts, each in zip(
                found, np.split(mine, np.cumsum([one.counts[rank] for one in asked])[:-1]), strict=True
            ):
                parts.append(each)
        return [np.concatenate(parts) for parts in found]

    def _move(
        self,
        channel: Channel,
        asked: Sequence[Asked],
        values: Sequence[Sequence[Rows] | None],
        given: Sequence[Mask] | None,
        taking: Sequence[Sequence[Any]],
        out: Sequence[Sequence[Rows]],
    ) -> None:
        """Give rows of `values`, of those wanted where `given`, and write what is given to `out`, where `taking` says.

        taking  of each group and rank the places
        """
        W, own = self.ranks.size, self.ranks.rank
        giving = [_list_positions(one.wanted, None if given is None else given[g]) for g, one in enumerate(asked)]
        tasks = []
        for group, one in enumerate(asked):  # what stays here need not be copied twice
            for table, block in enumerate(values[group] or ()):
                ids = one.inverse[giving[group][own]]
                tasks += lookup_tasks(block[:, None], ids, out[group][table], taking[group][own])
        counts = [[0 if rank == own else len(each[rank]) for rank in range(W)] for each in giving]
        receive = [[0 if rank == own else len(each[rank]) for rank in range(W)] for each in taking]
        sizes = sizes_of(counts, self._dims)
        buffer = np.empty(sum(sizes), np.float32)
        views = make_views(buffer, counts, self._dims)
        for group, one in enumerate(asked):
            for rank in range(W):
                if counts[group][rank]:
                    ids = one.inverse[giving[group][rank]]
                    for table, block in enumerate(values[group] or ()):
                        tasks += lookup_tasks(block[:, None], ids, views[rank][group][table])
        run_tasks(tasks)
        there = self._give(channel, buffer, sizes, sizes_of(receive, self._dims))
        views, tasks = make_views(there, receive, self._dims), []
        for group in range(len(asked)):
            for rank in range(W):
                for table, rows in enumerate(out[group]) if receive[group][rank] else ():
                    tasks += store_tasks(rows, taking[group][rank], views[rank][group][table])
        run_tasks(tasks)
        self._count(4 * sum(int(n) * sum(dims) for each, dims in zip(counts, self._dims, strict=True) for n in each))

    def gradients(
        self,
        asked: Sequence[Asked],
        grads: Parts,
        micro_batches: int,
        sums: Sequence[Sequence[Rows | None]],
        chosen: Sequence[Chosen] | None = None,
    ) -> None:
        """See `give_gradients`."""
        nodes = self.ranks.mesh.nodes(micro_batches)
        self._count(give_gradients(self._gradients, asked, grads, nodes, sums, chosen))

    def _count(self, least: int) -> None:
        with self._counting:
            self.least_bytes += least

    def _give(self, channel: Channel, values: Rows, counts: Sequence[int], receive: Sequence[int]) -> Rows:
        out: Rows = channel.all_to_all(torch.from_numpy(values), counts, receive).numpy()
        return out


def _list_incoming(asked: Sequence[Asked], come: Sequence[Mask] | None) -> list[list[Any]]:
    """Return of each group, by rank, the places of the rows that come, among those that are asked for."""
    return [_list_positions(one.counts, None if come is None else come[g]) for g, one in enumerate(asked)]
