"""A table and the ops that work on it, wherever it is placed; what crosses to the device and back."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

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
        self._device = device
        self.table: HostTable | DeviceTable
        if target == "CPU":
            self.table = server.add(HostTable(rows, dim, optimizer, name=name, seed=seed))
        else:
            self.table = DeviceTable(rows, dim, optimizer, device, name=name, seed=seed)
        self.lookup = EmbeddingLookup(scope=name, log=log).add_prim_attr("primitive_target", target)
        self.update = UPDATES[optimizer.primitive](scope=name, log=log).add_prim_attr("primitive_target", target)
        self._to_device = Primitive("HostToDevice", self._copy_to_device, scope=name, log=log)
        self._to_host = Primitive("DeviceToHost", lambda grads: grads.cpu(), scope=name, log=log)

    def pull(self, ids: npt.NDArray[Any]) -> Tensor:
        """Return the rows of unique ids [U], float32 [U, D] on the device."""
        if self.target == "DEVICE":
            rows: Tensor = self.lookup(self.table, torch.from_numpy(ids).to(self._device))
            return rows
        host_rows = torch.from_numpy(self.lookup(self.table, ids))
        return host_rows if self._device.type == "cpu" else self._to_device(host_rows)

    def push(self, ids: npt.NDArray[Any], grads: Tensor) -> None:
        """Update the rows of unique ids [U] with their summed gradients, float32 [U, D] on the device."""
        if self.target == "DEVICE":
            self.update(self.table, torch.from_numpy(ids).to(self._device), grads)
            return
        host_grads = grads if self._device.type == "cpu" else self._to_host(grads)
        self.update(self.table, ids, host_grads.numpy())

    def _copy_to_device(self, rows: Tensor) -> Tensor:
        return rows.to(self._device)
