"""Computes digests (see `core.digest`) of tables and torch modules, in host or device memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hostdev.core.digest import (
    DigestColumn,
    Fetch,
    StateDigest,
    in_order,
    pieces_of,
    ranges_in_order,
    ranges_of,
    rows_per_range,
)
from hostdev.core.tables import Capabilities
from hostdev.distributed.channel import Channel
from hostdev.distributed.dense import DenseState
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.kernels.pool import host_threads
from hostdev.kernels.shards import partition, range_of

_CHUNK_BYTES = 1 << 24  # of rows that a rank sends at once


class _Table(Protocol):
    name: str
    step: int
    capabilities: Capabilities

    @property
    def total_rows(self) -> int: ...

    def columns(self) -> Mapping[str, Any]: ...


def state_sha256(tables: Iterable[_Table], dense: DenseState, world: World = ALONE_WORLD) -> str:
    """Return the SHA-256, in hexadecimal, of the tables and the dense state; all ranks must call this function.

    The order is: tables by name, each with its number of steps, its weights, then its optimizer state by name; the
    dense parameters by name, each followed by its optimizer state by name; the network's persistent buffers by name.
    `hostdev.core.digest` has the exact definition. The device and the memory layout of a table do not matter. In a
    single process, ranges of rows that were not written since a checkpoint are not read if their digests are known.

    Args:
        tables: The tables.
        dense: The dense parameters, their optimizer state and the buffers; only rank 0's are used.
        world: The ranks.
    """
    digest = StateDigest(host_threads())
    for table in sorted(tables, key=lambda table: table.name):
        add_table(digest, table, world)
    for name, values, _ in dense_arrays(dense):
        rows = values if values.ndim else values.reshape(1)
        dtype = str(values.dtype).removeprefix("torch.")
        digest.array(name, dtype, values.shape, pieces_of(rows, fetched))
    return str(world.control.share(digest.hexdigest())[0])


def add_table(digest: StateDigest, table: _Table, world: World = ALONE_WORLD) -> None:
    """Add a table's weights and optimizer state to a digest; all rows of several ranks are gathered on rank 0."""
    known = keys = None
    if table.capabilities.by_key:
        # the keys of all ranks, one rank after the other, are in the order of their hashes
        by_key: Any = table
        keys, stored = by_key.key_arrays().map(world.control.gather_first), by_key.stored_columns()
        length, total = rows_per_range(by_key.dim), sum(world.control.share(len(stored["weights"])))
        gather = _gather_by_rank
    else:
        stored, total = table.columns(), table.total_rows
        length, gather = rows_per_range(stored["weights"].shape[1]), partial(_gather_in_order, total=total)
        if (changes := getattr(table, "changes", None)) is not None:
            known = changes.known_digests()
    if world.size == 1:
        columns = [DigestColumn(name, tuple(rows.shape), _ranges(rows, length)) for name, rows in stored.items()]
        digest.table(table.name, table.step, columns, known, keys=keys)
        return
    columns = []
    for name, rows in stored.items():
        pieces = partial(gather, world.control, rows)
        columns.append(DigestColumn(name, (total, rows.shape[1]), partial(ranges_in_order, pieces, length)))
    if world.rank == 0:
        digest.table(table.name, table.step, columns, keys=keys)
        return
    _take_part(columns)


def _take_part(columns: Sequence[DigestColumn]) -> None:
    """Take part in rank 0's gathering of columns."""
    for column in in_order(columns):
        deque(column.ranges(()), maxlen=0)


def _ranges(rows: Any, length: int) -> Callable[[Sequence[int]], Iterable[Fetch]]:
    """Return a function that takes indices of ranges, and yields these ranges of the rows of an array or a tensor."""
    return partial(_device_ranges if isinstance(rows, torch.Tensor) else ranges_of, rows, length)


def _device_ranges(rows: torch.Tensor, length: int, numbers: Sequence[int]) -> Iterator[Fetch]:
    """Yield ranges of a tensor's rows; this thread copies each range to the host."""
    for number in numbers:
        yield partial(np.asarray, fetched(rows[number * length : (number + 1) * length]))


def dense_arrays(dense: DenseState) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the name, values, and path (such as "model.NAME") of each dense array, in the digest's order."""
    numbers = {name: number for number, name in enumerate(dense.names)}
    for name in sorted(dense.names):
        yield name, dense.model[name].detach(), f"model.{name}"
        state = dense.optimizer["state"].get(numbers[name], {})
        for key in sorted(state):
            yield f"{name}/{key}", torch.as_tensor(state[key]), f"optimizer.state.{numbers[name]}.{key}"
    for name in sorted(dense.buffers):
        yield name, dense.model[name], f"model.{name}"


def fetched(rows: Any) -> Any:
    """Return rows as a C-contiguous NumPy array; bfloat16 becomes uint16 with the same bits."""
    if isinstance(rows, torch.Tensor):
        rows = rows.cpu()
        if rows.dtype == torch.bfloat16:
            rows = rows.view(torch.uint16)
        rows = rows.numpy()
    return np.ascontiguousarray(rows)


def names_in_checkpoint(dense: DenseState) -> list[tuple[str, str]]:
    """Return the name and the path of each array that `dense_arrays` yields."""
    return [(name, place) for name, _, place in dense_arrays(dense)]


def _gather_in_order(channel: Channel, rows: npt.NDArray[Any], total: int) -> Iterator[npt.NDArray[Any]]:
    """Yield all rows of a table on rank 0 in the order of their ids, in chunks.

    The other ranks must also iterate; each of them gets chunks of its own rows only.

    Args:
        channel: Connects all ranks.
        rows: This rank's rows, float32 [any, D].
        total: V, the number of rows on all ranks.
    """
    width, W = rows.shape[1], channel.ranks
    step = max(1, _CHUNK_BYTES // (4 * width))
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


def _gather_by_rank(channel: Channel, rows: Any) -> Iterator[npt.NDArray[Any]]:
    """Yield the rows of all ranks on rank 0, one rank after the other, in chunks; the other ranks must also iterate.

    Args:
        channel: Connects all ranks.
        rows: This rank's rows [any, D]; slices of it are float32.
    """
    width = rows.shape[1]
    step = max(1, _CHUNK_BYTES // (4 * width))
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
