"""The digest (`core.digest`) of tables and torch modules, on the host or the device."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from hostdev.core.digest import Column, StateDigest, pieces_of
from hostdev.distributed.gather import gather_in_order
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.world import ALONE_WORLD
from hostdev.parallel.state import DenseState


class _Table(Protocol):
    name: str
    step: int

    @property
    def total_rows(self) -> int: ...

    def columns(self) -> Mapping[str, Any]: ...


def state_sha256(tables: Iterable[_Table], dense: DenseState, ranks: Ranks | None = None) -> str:
    """Return the SHA-256, in hexadecimal, of the tables and the dense state; all ranks must call it.

    The order is: tables by name, each with its number of steps, its weights, then its optimizer state by name; the
    dense parameters by name, each followed by its optimizer state by name; the network's persistent buffers by name. A
    line with name, dtype and shape precedes each array; arrays are row-major and little-endian. The device and the
    memory layout of a table do not matter.

    Args:
        tables: The tables.
        dense: The dense parameters, their optimizer state and the buffers; only those of rank 0 count.
        ranks: The joined processes; None: this process is alone.
    """
    digest = StateDigest()
    for table in sorted(tables, key=lambda table: table.name):
        weights, *slots = columns_of(table, ranks)
        digest.table(table.name, table.step, weights, slots)
    for name, values, _ in dense_arrays(dense):
        rows = values if values.ndim else values.reshape(1)
        dtype = str(values.dtype).removeprefix("torch.")
        digest.array(name, dtype, values.shape, pieces_of(rows, fetched))
    return str((ranks or ALONE_WORLD).control.share(digest.hexdigest())[0])


def columns_of(table: _Table, ranks: Ranks | None = None) -> list[Column]:
    """Return a table's weights and optimizer state; with ranks, the rows of all ranks, gathered on rank 0."""
    found = table.columns().items()
    if ranks is not None:
        total = table.total_rows
        return [
            Column(name, (total, rows.shape[1]), partial(gather_in_order, ranks.control, rows, total))
            for name, rows in found
        ]
    return [Column(name, tuple(rows.shape), partial(pieces_of, rows, fetched)) for name, rows in found]


def dense_arrays(dense: DenseState) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield each dense array in the digest's order: name, values, and path, such as "model.NAME"."""
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
