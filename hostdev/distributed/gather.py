"""Gathers rows and arrays from all ranks on rank 0."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostdev.distributed.channel import Channel
from hostdev.kernels.shards import partition, range_of

_PIECE_BYTES = 1 << 24


def gather_in_order(channel: Channel, rows: npt.NDArray[Any], total: int) -> Iterator[npt.NDArray[Any]]:
    """Yield all rows of a table on rank 0 in the order of their ids, in chunks.

    The other ranks must also iterate; each of them gets chunks of its own rows only.

    Args:
        channel: Connects all ranks.
        rows: This rank's rows, float32 [any, D].
        total: V, the number of rows on all ranks.
    """
    width, W = rows.shape[1], channel.ranks
    step = max(1, _PIECE_BYTES // (4 * width))
    start, stop = range_of(total, channel.rank, W)
    assert len(rows) == stop - start
    for first in range(0, total, step):
        local, places, counts = partition(np.arange(first, min(first + step, total)), total, W)
        begin = int(counts[: channel.rank].sum())
        mine = np.ascontiguousarray(rows[local[begin : begin + counts[channel.rank]]])
        give = [len(mine) if rank == 0 else 0 for rank in range(W)]
        take = counts.tolist() if channel.rank == 0 else [0] * W
        received = channel.all_to_all(torch.from_numpy(mine).view(-1), give, take, row=width).numpy().reshape(-1, width)
        yield received[places] if channel.rank == 0 else mine


def gather_by_rank(channel: Channel, rows: Any) -> Iterator[npt.NDArray[Any]]:
    """Yield the rows of all ranks on rank 0, one rank after the other, in chunks; the other ranks must also iterate.

    Args:
        channel: Connects all ranks.
        rows: This rank's rows [any, D]; slices of it are float32.
    """
    width = rows.shape[1]
    step = max(1, _PIECE_BYTES // (4 * width))
    for rank, count in enumerate(channel.share(len(rows))):
        for first in range(0, count, step):
            last = min(first + step, count)
            mine = np.ascontiguousarray(rows[first:last] if rank == channel.rank else rows[:0])
            if rank == 0:
                if channel.rank == 0:
                    yield mine
                continue
            give = [len(mine) if other == 0 else 0 for other in range(channel.ranks)]
            take = [last - first if channel.rank == 0 and other == rank else 0 for other in range(channel.ranks)]
            received = channel.all_to_all(torch.from_numpy(mine).view(-1), give, take, row=width)
            if channel.rank == 0:
                yield received.numpy().reshape(-1, width)
