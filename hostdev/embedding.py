"""A table and the ops that work on it, wherever it is placed, and one batch's rows on their way through them."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.device.staging import Staging
from hostdev.device.table import DeviceTable
from hostdev.host.server import ParameterServer
from hostdev.host.table import HostTable
from hostdev.optimizers import SparseOptimizer
from hostdev.primitive import UPDATES, EmbeddingLookup, OpLog

Positions = npt.NDArray[np.int32]


class Embedding:
    """A named table with its lookup and its update.

    With target "CPU" the table belongs to the parameter server and its ops run on the host; with "DEVICE" all of it is
    on the device.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        dim: int,
        optimizer: SparseOptimizer,
        *,
        target: str,
        device: torch.device,
        seed: int,
        log: OpLog,
        server: ParameterServer,
    ) -> None:
        self.name = name
        self.target = target
        self.table: HostTable | DeviceTable
        if target == "CPU":
            self.table = server.add(HostTable(rows, dim, optimizer, name=name, seed=seed))
        else:
            self.table = DeviceTable(rows, dim, optimizer, device, name=name, seed=seed)
        self.lookup = EmbeddingLookup(scope=name, log=log).add_prim_attr("primitive_target", target)
        self.update = UPDATES[optimizer.primitive](scope=name, log=log).add_prim_attr("primitive_target", target)


class Part(NamedTuple):
    """Rows of a batch."""

    ids: npt.NDArray[Any]  # int32 or int64 [any], unique
    positions: Positions | None  # [any], of the ids in the batch's unique ids; None: all of these

    @classmethod
    def of(cls, ids: npt.NDArray[Any], positions: Positions | None) -> "Part":
        """Rows of the batch with these unique ids."""
        return cls(ids if positions is None else ids[positions], positions)

    def __len__(self) -> int:
        return len(self.ids)


class BatchRows:
    """One batch's unique rows of a host table: fetched in parts, sent to the device, updated in parts.

    rows  U, the number of its unique ids
    """

    def __init__(self, embedding: Embedding, rows: int, staging: Staging) -> None:
        assert isinstance(embedding.table, HostTable)
        self._table = embedding.table
        self._staging = staging
        self._lookup, self._update = embedding.lookup.in_parts(), embedding.update.in_parts()
        self._host = staging.buffer(rows, self._table.dim)
        self._scalars: tuple[Any, ...] | None = None
        self._rows = self._host  # float32 [U, D] on the device
        self._sent: list[Any] = []  # marks in the staging's stream

    def fetch(self, part: Part) -> None:
        """Look rows up and send them; others, and those that may have changed since, are to follow by `fetch_late`."""
        self._lookup(self._table, part.ids, self._host.numpy(), part.positions)
        [self._rows], mark = self._staging.send([self._host])
        self._sent.append(mark)

    def fetch_late(self, part: Part) -> None:
        """Look up and send rows that had to wait; after `fetch`."""
        if not self._staging.copies:
            self._lookup(self._table, part.ids, self._host.numpy(), part.positions)
            return
        assert part.positions is not None
        late = self._staging.buffer(len(part), self._table.dim)
        self._lookup(self._table, part.ids, late.numpy(), None)
        self._sent.append(self._staging.patch(self._rows, part.positions, late))

    def arrived(self) -> Tensor:
        """Return the rows, float32 [U, D] on the device, whose current stream waits for them; nothing is to follow."""
        self._lookup.end()
        for mark in self._sent:
            self._staging.await_sent(mark, [self._rows])
        return self._rows

    def update(self, grads: Tensor, part: Part) -> None:
        """Update a part of the rows with the batch's gradients, float32 [U, D] on the host; all parts are one step."""
        if self._scalars is None:
            self._scalars = self._table.begin_step()
        self._update(self._table, part.ids, grads.numpy(), self._scalars, part.positions)

    def updated(self) -> None:
        """Report the update's time."""
        self._update.end()
