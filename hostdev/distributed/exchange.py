"""Exchange of embedding rows between ranks: ids go to the rows' owners, rows come back, and gradients go to the owners.

Each rank requests the rows of its own samples, and owns a part of every table. All ranks call the same collectives for
every batch, even if they have nothing to send.

Shapes: W ranks, G groups of tables that share ids, U unique ids of a group on this rank.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hostdev.distributed.channel import Channel
from hostdev.distributed.gradients import Parts, SelectedRows, count_values, find_positions, give_gradients, make_views
from hostdev.distributed.key_exchange import END, KeyExchange, require_all
from hostdev.distributed.world import World
from hostdev.kernels.arrays import AnyIds, Mask, Positions, Rows
from hostdev.kernels.groups import unique_groups
from hostdev.kernels.lookup import lookup_tasks, store_tasks
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.shards import partition, partition_by_owner, range_of


class OwnedRows(NamedTuple):
    """Distinct rows of a table by key."""

    owners: Positions  # int32 [U], the rank that has each row
    rows: Positions  # int32 [U], the row's number on that rank


class Asked(NamedTuple):
    """A group's rows in a batch: the rows that this rank requests, and the rows that all ranks request from it."""

    places: Positions  # int32 [U], position of each unique id's row among the rows sorted by owner
    counts: list[int]  # number of rows that this rank requests from each rank
    wanted: list[int]  # number of rows that each rank requests from this rank
    inverse: Positions  # int32 [sum(wanted)], index of each wanted row among the distinct wanted rows

    @property
    def size(self) -> int:
        """U, the number of rows that this rank requests."""
        return len(self.places)


class Incoming(NamedTuple):
    """A batch's rows in transit from their owners."""

    rows: list[list[Rows]]  # by group and table, float32 [U, D]; rows to be sent late are not yet written
    given: list[Mask] | None = None  # by group, which rows requested from this rank have been sent; None if all
    received: list[Mask] | None = None  # by group, which rows that this rank requested have arrived
    shared: Sequence[Mask] = ()  # by group, mask of the previous batch's rows: True for rows that this batch gets late


def _list_positions(counts: Sequence[int], mask: Mask | None) -> list[Positions]:
    """Return the result of `find_positions` as arrays."""
    return [
        np.arange(at.start, at.stop, dtype=np.int32) if isinstance(at, range) else at
        for at in find_positions(counts, mask)
    ]


class Exchange:
    """All-to-all exchanges for the batches of one pass over data. All ranks must make the exchanges in the same order.

    Args:
        ranks: The ranks of this run.
        rows: For each group, the number of rows of each of its tables, over all ranks.
        dims: For each group, D of each of its tables.
        keyed: For each group, whether it is a table by key; `rows` is then the maximum number of rows on this rank.
    """

    def __init__(
        self, ranks: World, rows: Sequence[int], dims: Sequence[Sequence[int]], keyed: Sequence[bool] = ()
    ) -> None:
        self.ranks, self._rows, self._dims = ranks, list(rows), [list(each) for each in dims]
        by_key = list(keyed) or [False] * len(rows)
        ends = [
            (0, each) if has_keys else range_of(each, ranks.rank, ranks.size)
            for each, has_keys in zip(rows, by_key, strict=True)
        ]
        self._here = [stop - start for start, stop in ends]  # by group, the number of rows that this rank owns
        self._channels = self._ids, self._values, self._late, self._gradients = [ranks.channel() for _ in range(4)]
        self.keys = KeyExchange(self._ids, by_key.count(True), self._count) if any(by_key) else None
        self.least_bytes = 0  # lower bound of the bytes sent: each id, row and gradient once
        self._counting = threading.Lock()  # guards `least_bytes`: several threads exchange
        self._dtype = np.dtype(np.int32 if max(rows) < 2**31 else np.int64)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks so far."""
        return sum(channel.sent_bytes for channel in self._channels)

    @property
    def network_bytes(self) -> int:
        """Bytes sent to other hosts so far; a part of `sent_bytes`."""
        return sum(channel.network_bytes for channel in self._channels)

    def ids(self, groups: Sequence[AnyIds | OwnedRows]) -> list[tuple[AnyIds, Asked]]:
        """Request rows from their owners; return, by group, the distinct rows requested from this rank and an `Asked`.

        Args:
            groups: Unique ids [U] of each group; `OwnedRows` for a table by key.
        """
        found = [
            partition_by_owner(*ids, self.ranks.size)
            if isinstance(ids, OwnedRows)
            else partition(ids, rows, self.ranks.size)
            for ids, rows in zip(groups, self._rows, strict=True)
        ]
        counts = np.stack([counts for _, _, counts in found], axis=1)  # [W, G]
        wanted = self._ids.exchange_counts(counts)
        require_all(wanted)
        ends = [np.concatenate([[0], np.cumsum(counts)]) for _, _, counts in found]
        parts = [
            local[end[rank] : end[rank + 1]]
            for rank in range(self.ranks.size)
            for (local, _, _), end in zip(found, ends, strict=True)
        ]
        flat = np.concatenate(parts).astype(self._dtype, copy=False)
        sums, receive = counts.sum(1).tolist(), wanted.sum(1).tolist()
        received = self._ids.all_to_all(torch.from_numpy(flat), sums, receive).numpy()
        self._count((len(flat) - sums[self.ranks.rank]) * flat.itemsize)
        pieces = np.split(received, np.cumsum(wanted.ravel())[:-1])  # by rank, by group
        self._require_here(received, pieces)
        here = unique_groups([pieces[group :: len(groups)] for group in range(len(groups))])
        return [
            (ids, Asked(places, counts[:, group].tolist(), wanted[:, group].tolist(), inverse))
            for group, ((_, places, _), (ids, inverse)) in enumerate(zip(found, here, strict=True))
        ]

    def _require_here(self, received: AnyIds, pieces: Sequence[AnyIds]) -> None:
        """Raise ValueError if a rank requests rows that this rank does not have; the kernels would not check that.

        Args:
            received: All requested ids.
            pieces: The same ids by rank and group.
        """
        if not len(received) or (received.min() >= 0 and received.max() < min(self._here)):
            return
        for number, ids in enumerate(pieces):
            rank, group = divmod(number, len(self._here))
            if len(ids) and not (ids.min() >= 0 and ids.max() < self._here[group]):
                wrong = ids[(ids < 0) | (ids >= self._here[group])][0]
                raise ValueError(
                    f"rank {rank} requests local row {wrong} from rank {self.ranks.rank}, which has only "
                    f"{self._here[group]:,} of the tables' {self._rows[group]:,} rows; give both ranks tables with "
                    "equal numbers of rows"
                )

    def end(self) -> None:
        """Announce that this rank has no further batch."""
        if self.keys is not None:
            self.keys.end()
            return
        counts = np.full((self.ranks.size, len(self._rows)), END, np.int64)
        require_all(self._ids.exchange_counts(counts), ended=True)

    def early_rows(
        self,
        asked: Sequence[Asked],
        values: Sequence[Sequence[Rows] | None],
        early: Sequence[Mask] | None,
        buffer: Callable[[int, int], Rows],
        before: Sequence[Asked] = (),
        shared: Sequence[Mask] = (),
    ) -> "Incoming":
        """Send the rows that are ready, and receive the rows that other ranks have ready.

        If `early` is given, the caller must then call `late_rows` for the remaining rows.

        Args:
            asked: Result of `ids`, by group.
            values: The distinct rows requested from this rank, by group and table, float32 [any, D]; None for a group
                without early rows.
            early: By group, a mask of the rows that are ready, [any]. None means all rows of all groups, and no call of
                `late_rows`.
            buffer: Called with (U, D); allocates rows [U, D] of a table.
            before: `Asked` of the previous batch, by group; empty on all ranks or on none.
            shared: By group, a mask of the rows requested from this rank in `before`, [any]: True for rows that are
                sent late in this batch. The previous batch's gradients of these rows are exchanged first.
        """
        incoming = Incoming(
            [[buffer(one.size, dim) for dim in dims] for one, dims in zip(asked, self._dims, strict=True)]
        )
        if early is not None:
            wanted = [mask[one.inverse] for mask, one in zip(early, asked, strict=True)]
            masks = self._exchange_masks([*asked, *before], [*wanted, *shared])
            incoming = incoming._replace(given=wanted, received=masks[: len(asked)], shared=masks[len(asked) :])
        self._move(self._values, asked, values, incoming.given, _list_incoming(asked, incoming.received), incoming.rows)
        return incoming

    def late_rows(
        self,
        incoming: "Incoming",
        asked: Sequence[Asked],
        values: Sequence[Sequence[Rows]],
        buffer: Callable[[int, int], Rows] | None = None,
    ) -> tuple[list[Positions], list[list[Rows]]]:
        """Exchange the rows that `early_rows` left out; return their positions in each group, [L], and the rows.

        `buffer` is called with (L, D) and allocates the received rows. If it is None, the received rows are written to
        `incoming.rows`.
        """
        assert incoming.given is not None and incoming.received is not None
        given, received = [~mask for mask in incoming.given], [~mask for mask in incoming.received]
        if buffer is None:
            out, taking = incoming.rows, _list_incoming(asked, received)
        else:
            numbers = [
                [int(part.sum()) for part in np.split(mask, np.cumsum(one.counts)[:-1])]
                for mask, one in zip(received, asked, strict=True)
            ]
            out = [[buffer(sum(each), dim) for dim in dims] for each, dims in zip(numbers, self._dims, strict=True)]
            taking = [_list_positions(each, None) for each in numbers]
        self._move(self._late, asked, values, given, taking, out)
        return [np.flatnonzero(mask).astype(np.int32) for mask in received], out

    def _exchange_masks(self, asked: Sequence[Asked], wanted: Sequence[Mask]) -> list[Mask]:
        """Send each rank the masks of the rows that it requested from this rank.

        Returns the masks of the rows that this rank requested.
        """
        W = self.ranks.size
        cut = [np.split(mask, np.cumsum(one.wanted)[:-1]) for mask, one in zip(wanted, asked, strict=True)]
        bits = [np.packbits(np.concatenate([parts[rank] for parts in cut])) for rank in range(W)]
        sizes = [sum(one.counts[rank] for one in asked) for rank in range(W)]
        flat = torch.from_numpy(np.concatenate(bits))
        received = self._values.all_to_all(
            flat, [len(each) for each in bits], [-(-size // 8) for size in sizes]
        ).numpy()
        found: list[list[Any]] = [[] for _ in asked]
        at = 0
        for rank, size in enumerate(sizes):
            mine = np.unpackbits(received[at : at + -(-size // 8)], count=size).view(np.bool_)
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
        """Send the `given` rows of `values` that are requested, and write received rows to `out` at positions `taking`.

        `given` has a mask of the requested rows of each group; None means all rows. `taking` has positions by group and
        sending rank.
        """
        W, own = self.ranks.size, self.ranks.rank
        giving = [_list_positions(one.wanted, None if given is None else given[g]) for g, one in enumerate(asked)]
        tasks = []
        for group, one in enumerate(asked):  # rows that stay on this rank are copied once
            for table, block in enumerate(values[group] or ()):
                ids = one.inverse[giving[group][own]]
                tasks += lookup_tasks(block[:, None], ids, out[group][table], taking[group][own])
        counts = [[0 if rank == own else len(each[rank]) for rank in range(W)] for each in giving]
        receive = [[0 if rank == own else len(each[rank]) for rank in range(W)] for each in taking]
        sizes = count_values(counts, self._dims)
        buffer = np.empty(sum(sizes), np.float32)
        views = make_views(buffer, counts, self._dims)
        for group, one in enumerate(asked):
            for rank in range(W):
                if counts[group][rank]:
                    ids = one.inverse[giving[group][rank]]
                    for table, block in enumerate(values[group] or ()):
                        tasks += lookup_tasks(block[:, None], ids, views[rank][group][table])
        run_tasks(tasks)
        there = self._give(channel, buffer, sizes, count_values(receive, self._dims))
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
        chosen: Sequence[SelectedRows] | None = None,
    ) -> None:
        """Send gradients to the rows' owners, which sum them: see `give_gradients`."""
        nodes = self.ranks.mesh.nodes(micro_batches)
        self._count(give_gradients(self._gradients, asked, grads, nodes, sums, chosen))

    def _count(self, least: int) -> None:
        with self._counting:
            self.least_bytes += least

    def _give(self, channel: Channel, values: Rows, counts: Sequence[int], receive: Sequence[int]) -> Rows:
        out: Rows = channel.all_to_all(torch.from_numpy(values), counts, receive).numpy()
        return out


def _list_incoming(asked: Sequence[Asked], received: Sequence[Mask] | None) -> list[list[Any]]:
    """Return, by group and sending rank, the positions of the arriving rows among the requested rows."""
    return [_list_positions(one.counts, None if received is None else received[g]) for g, one in enumerate(asked)]


def make_exchanges(
    world: World, rows: Sequence[int], dims: Sequence[Sequence[int]], keyed: Sequence[bool]
) -> dict[bool, Exchange]:
    """Return the exchanges with other ranks, by whether a pass updates the tables; {} for a single process.

    For the arguments, see `Exchange`.
    """
    return {update: Exchange(world, rows, dims, keyed) for update in (True, False)} if world.size > 1 else {}
