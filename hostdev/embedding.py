"""A table and the ops that work on it, wherever it is placed; what crosses to the device and back."""

from typing import Any

import torch
from torch import Tensor

from hostdev.device.backend import is_accelerator
from hostdev.device.table import DeviceTable
from hostdev.host.server import ParameterServer
from hostdev.host.table import HostTable
from hostdev.optimizers import SparseOptimizer
from hostdev.primitive import UPDATES, EmbeddingLookup, OpLog, Primitive


class Embedding:
    """A named table with its lookup and its update.

    With target "CPU" the table belongs to the parameter server and its ops run on the host: unique rows cross to
    the device, and their gradients come back. With "DEVICE" all of it is on the device. On the CPU device nothing
    is copied.
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
        self._staged = target == "CPU" and is_accelerator(device)
        self._to_device = Primitive("HostToDevice", lambda rows: rows.to(device), scope=name, log=log)
        self._to_host = Primitive("DeviceToHost", lambda grads: grads.cpu(), scope=name, log=log)

    def pull(self, ids: Any) -> Tensor:
        """Return the rows of unique ids, float32 [U, D] on the device.

        ids  int32 or int64 [U], where the table is: numpy with target "CPU", else a tensor on the device
        """
        rows = self.lookup(self.table, ids)
        if self.target == "CPU":
            rows = torch.from_numpy(rows)
        pulled: Tensor = self._to_device(rows) if self._staged else rows
        return pulled

    def push(self, ids: Any, grads: Tensor) -> None:
        """Update the rows of unique ids, as in `pull`, with their summed gradients, float32 [U, D] on the device."""
        if self._staged:
            grads = self._to_host(grads)
        self.update(self.table, ids, grads.numpy() if self.target == "CPU" else grads)
