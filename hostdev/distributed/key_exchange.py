"""Exchange of keys between ranks: keys go to their owners, which answer with the rows of these keys.

Shapes: W ranks, U unique keys of a table on this rank, A keys of a table that ranks ask this rank for.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hostdev.distributed.agreement import format_ranks
from hostdev.distributed.channel import Channel
from hostdev.kernels.arrays import AnyIds, RowNumbers
from hostdev.kernels.shards import owners_of, partition_by_owner
from hostdev.kernels.unique import unique

_PAIR = np.dtype([("key", np.int64), ("uses", np.int32)])
END = -1  # sent in place of the number of ids if there is no further batch


class AskedKeys(NamedTuple):
    """A table's keys in a batch: the keys that this rank asks for, and the keys that all ranks ask this rank for."""

    keys: AnyIds  # int64 [A], the distinct keys that any rank asks this rank for
    uses: RowNumbers  # int32 [A], how often the whole batch uses each key
    inverse: RowNumbers  # int32 [any], for each key that a rank asks this rank for, its index in `keys`
    wanted: list[int]  # number of keys that each rank asks this rank for
    owners: RowNumbers  # int32 [U], the owner of each key that this rank asks for
    places: RowNumbers  # int32 [U], the position of each key that this rank asks for, in the order of owners
    counts: list[int]  # number of keys that this rank asks each rank for


class Answer(NamedTuple):
    """The rows of the keys that a rank has asked for."""

    rows: RowNumbers  # int32 [U], the number of each key's row on its owner; negative if it has none
    unknown: RowNumbers  # int32 [any], the numbers of the out-of-vocabulary rows on the first rank


class KeyExchange:
    """Exchanges the keys of each batch; all ranks make the same calls, in the order `ask`, `total`, `answer`.

    Args:
        channel: Connects the ranks.
        tables: T, the number of tables by key.
        count: Called with the least number of bytes that a batch's keys take.
    """

    def __init__(self, channel: Channel, tables: int, count: Callable[[int], None]) -> None:
        self._channel, self._tables, self._count = channel, tables, count

    def ask(self, tables: Sequence[tuple[AnyIds, RowNumbers]]) -> list[AskedKeys]:
        """Ask the owners for keys.

        Args:
            tables: For each table, unique keys [U], and how often this rank's part of the batch uses each, int32 [U].
        """
        W = self._channel.ranks
        owners = [owners_of(keys, W) for keys, _ in tables]
        found = [partition_by_owner(mine, np.arange(len(mine)), W) for mine in owners]
        counts = np.stack([each for _, _, each in found], axis=1)  # [W, T]
        wanted = self._channel.exchange_counts(counts)
        require_all(wanted)
        cut = []
        for table, ((keys, uses), (order, _, _)) in enumerate(zip(tables, found, strict=True)):
            pairs = np.empty(len(keys), _PAIR)
            pairs["key"], pairs["uses"] = keys[order], uses[order]
            cut.append(np.split(pairs, np.cumsum(counts[:, table])[:-1]))
        flat = np.concatenate([cut[table][rank] for rank in range(W) for table in range(len(cut))])
        sums, receive = counts.sum(1).tolist(), wanted.sum(1).tolist()
        received = self._channel.all_to_all(torch.from_numpy(flat.view(np.uint8)), sums, receive, row=_PAIR.itemsize)
        self._count(8 * (len(flat) - sums[self._channel.rank]))
        pieces = np.split(received.numpy().view(_PAIR), np.cumsum(wanted.ravel())[:-1])  # by rank, by table
        asked = []
        for table, (mine, (_, places, each)) in enumerate(zip(owners, found, strict=True)):
            theirs = np.concatenate(pieces[table :: len(tables)])
            keys, inverse = unique(np.ascontiguousarray(theirs["key"]))
            uses = np.bincount(inverse, theirs["uses"], len(keys)).astype(np.int32)  # exact in float64: below 2^53
            asked.append(AskedKeys(keys, uses, inverse, wanted[:, table].tolist(), mine, places, each.tolist()))
        return asked

    def total(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sums over all ranks of arrays of one shape, int64 [any]."""
        found: npt.NDArray[np.int64] = self._channel.exchange_counts(np.tile(counts, (self._channel.ranks, 1))).sum(0)
        return found

    def answer(
        self, asked: Sequence[AskedKeys], rows: Sequence[RowNumbers], unknown: Sequence[RowNumbers]
    ) -> list[Answer]:
        """Send the rows of the keys that other ranks have asked for, and receive those of this rank's keys.

        Args:
            asked: Results of `ask`.
            rows: For each table, the rows of the distinct keys, int32 [A]; negative for a key without a row.
            unknown: For each table, the out-of-vocabulary rows, int32 [any]; the first rank's are sent to all ranks.
        """
        W, rank = self._channel.ranks, self._channel.rank
        cut = [np.split(each[one.inverse], np.cumsum(one.wanted)[:-1]) for each, one in zip(rows, asked, strict=True)]
        first = list(unknown) if rank == 0 else [each[:0] for each in unknown]
        give = [[*first, *(each[other] for each in cut)] for other in range(W)]
        sizes = [[*map(len, unknown)] if other == 0 else [0] * len(unknown) for other in range(W)]
        takes = [[*size, *(one.counts[other] for one in asked)] for other, size in enumerate(sizes)]
        received = self._channel.all_to_all(
            torch.from_numpy(np.concatenate([part for parts in give for part in parts])),
            [sum(map(len, parts)) for parts in give],
            [sum(each) for each in takes],
        )
        pieces = np.split(received.numpy(), np.cumsum([n for each in takes for n in each])[:-1])
        width, T = len(unknown) + len(asked), len(unknown)
        return [
            Answer(np.concatenate(pieces[T + table :: width])[one.places], pieces[table])
            for table, one in enumerate(asked)
        ]

    def end(self) -> None:
        """Announce that this rank has no further batch."""
        counts = np.full((self._channel.ranks, self._tables), END, np.int64)
        require_all(self._channel.exchange_counts(counts), ended=True)


def require_all(wanted: npt.NDArray[np.int64], *, ended: bool = False) -> None:
    """Raise ValueError if only some ranks have more batches, or a rank requests a negative number of rows.

    Args:
        wanted: int64 [W, any], the numbers that each rank has sent.
        ended: Whether this rank has no more batches.
    """
    have_ended = wanted[:, 0] == END
    if (wanted < END).any():
        rank = int(np.flatnonzero((wanted < END).any(1))[0])
        raise ValueError(f"rank {rank} requests a negative number of rows: {wanted[rank].min()}")
    if have_ended.all() if ended else not have_ended.any():
        return
    done, going = np.flatnonzero(have_ended).tolist(), np.flatnonzero(~have_ended).tolist()
    raise ValueError(
        f"{format_ranks(done)} {'has' if len(done) == 1 else 'have'} no more batches, but {format_ranks(going)} "
        f"{'has' if len(going) == 1 else 'have'}; all ranks must take the same number of steps, with empty batches "
        "once their samples run out"
    )
