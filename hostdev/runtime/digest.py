"""Computes digests (see `core.digest`) of tables and torch modules, in host or device memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from hostdev.core.capabilities import Capabilities
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
from hostdev.distributed.gather import gather_by_rank, gather_in_order
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.world import ALONE_WORLD
from hostdev.ext.parallel.state import DenseState
from hostdev.kernels.pool import host_threads


class _Table(Protocol):
    name: str
    step: int
    capabilities: Capabilities

    @property
    def total_rows(self) -> int: ...

    def columns(self) -> Mapping[str, Any]: ...


def state_sha256(tables: Iterable[_Table], dense: DenseState, ranks: Ranks | None = None) -> str:
    """Return the SHA-256, in hexadecimal, of the tables and the dense state; all ranks must call this function.

    The order is: tables by name, each with its number of steps, its weights, then its optimizer state by name; the
    dense parameters by name, each followed by its optimizer state by name; the network's persistent buffers by name.
    `hostdev.core.digest` has the exact definition. The device and the memory layout of a table do not matter. Ranges of
    rows that were not written since the last full checkpoint are not read, because their digests are known.

    Args:
        tables: The tables.
        dense: The dense parameters, their optimizer state and the buffers; only rank 0's are used.
        ranks: The ranks; None for a single process.
    """
    digest = StateDigest(host_threads())
    for table in sorted(tables, key=lambda table: table.name):
        add_table(digest, table, ranks)
    for name, values, _ in dense_arrays(dense):
        rows = values if values.ndim else values.reshape(1)
        dtype = str(values.dtype).removeprefix("torch.")
        digest.array(name, dtype, values.shape, pieces_of(rows, fetched))
    return str((ranks or ALONE_WORLD).control.share(digest.hexdigest())[0])


def add_table(digest: StateDigest, table: _Table, ranks: Ranks | None = None) -> None:
    """Add a table's weights and optimizer state to a digest; with ranks, all rows are gathered on rank 0."""
    if table.capabilities.by_key:
        _add_keyed(digest, table, ranks)
        return
    found, total = table.columns(), table.total_rows
    length = rows_per_range(found["weights"].shape[1])
    if ranks is None:
        changes = getattr(table, "changes", None)
        known = None if changes is None else changes.known_digests()
        columns = [DigestColumn(name, tuple(rows.shape), _ranges(rows, length)) for name, rows in found.items()]
        digest.table(table.name, table.step, columns, known)
        return
    columns = []
    for name, rows in found.items():
        pieces = partial(gather_in_order, ranks.control, rows, total)
        columns.append(DigestColumn(name, (total, rows.shape[1]), partial(ranges_in_order, pieces, length)))
    if ranks.control.rank == 0:
        digest.table(table.name, table.step, columns)
        return
    _take_part(columns)


def _add_keyed(digest: StateDigest, table: Any, ranks: Ranks | None) -> None:
    """Add a table by key; the keys of all ranks, one rank after the other, are in the order of their hashes."""
    keys, stored, length = table.key_arrays(), table.stored_columns(), rows_per_range(table.dim)
    if ranks is None:
        columns = [DigestColumn(name, rows.shape, _ranges(rows, length)) for name, rows in stored.items()]
        digest.table(table.name, table.step, columns, keys=keys)
        return
    keys = keys.map(ranks.control.gather_first)
    rows = sum(ranks.control.share(len(stored["weights"])))
    columns = []
    for name, each in stored.items():
        pieces = partial(gather_by_rank, ranks.control, each)
        columns.append(DigestColumn(name, (rows, each.shape[1]), partial(ranges_in_order, pieces, length)))
    if ranks.control.rank == 0:
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
