"""An embedding table and its optimizer rows in the device's memory: the host table's twin."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.initializers import Initializer, Normal
from hostdev.core.memory import require_table
from hostdev.core.optimizers import SparseOptimizer, require_optimizer
from hostdev.core.table_dtypes import BF16, FP32, TableStep, require_table_dtype, rounding_key
from hostdev.device.backend import free_bytes
from hostdev.device.ops import ops_for
from hostdev.kernels.buffers import identity
from hostdev.kernels.norm import PART, partial_squares, total
from hostdev.kernels.rounding import require_bfloat16, round_rows

Rows = npt.NDArray[np.float32]

_FILL_BYTES = 1 << 26
_FOLD_BYTES = 1 << 28  # of squares at once


class DeviceTable:
    """Weights float32 [rows, dim] and slots on `device`, with the initial values of a `HostTable` of the same name.

    Ids must be in range and unique: the caller has checked and deduplicated them on the host. With dtype="bf16" its
    values are those of such a host table, which bfloat16 can represent; here they take 4 bytes each.
    """

    primitive_target = "DEVICE"

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: SparseOptimizer,
        device: torch.device,
        *,
        name: str,
        seed: int = 0,
        init: Initializer = Normal(0.01),
        dtype: str = FP32,
    ) -> None:
        require_optimizer(optimizer, name)
        self.dtype = require_table_dtype(dtype, name)
        free = free_bytes(device)
        if free is not None:
            require_table(name, rows, dim, optimizer, free, "device")
        self.name, self.seed = name, seed
        self.optimizer = optimizer
        self.step = 0
        self.block = torch.empty((rows, 1 + len(optimizer.slots), dim), dtype=torch.float32, device=device)
        self._fill(init, seed)
        row_slots = torch.tensor(list(optimizer.row_slots.values()), dtype=torch.float32, device=device)
        self.row_slots = row_slots.repeat(rows, 1)
        self._ops = ops_for(self.block.device)

    def _fill(self, init: Initializer, seed: int) -> None:
        slots = np.array(list(self.optimizer.slots.values()), np.float32)
        if self.block.device.type == "cpu" and self.dtype == FP32:
            init.fill(self.block.numpy(), seed, self.name, slots)
            return
        rows, width, dim = self.block.shape
        step = min(rows, max(1, _FILL_BYTES // (width * dim * 4)))
        staging = np.empty((step, width, dim), np.float32)
        for first in range(0, rows, step):
            part = staging[: min(step, rows - first)]
            init.fill(part, seed, self.name, slots, first_row=first)
            if self.dtype == BF16:
                ids = np.arange(first, first + len(part))
                round_rows(part, identity(len(part)), ids, rounding_key(seed, self.name, 0))
            self.block[first : first + len(part)] = torch.from_numpy(part)

    @property
    def total_rows(self) -> int:
        """Number of rows, V: all are here."""
        return self.rows

    @property
    def rows(self) -> int:
        """Number of rows, V."""
        return self.block.shape[0]

    @property
    def dim(self) -> int:
        """Number of columns, D."""
        return self.block.shape[2]

    @property
    def weights(self) -> Tensor:
        """A view of the weights, float32 [V, D]."""
        return self.block[:, 0]

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """Views of the optimizer's slots by name, each float32 [V, D], or [V, 1] for one value a row."""
        slots = {name: self.block[:, 1 + i] for i, name in enumerate(self.optimizer.slots)}
        row_slots = {name: self.row_slots[:, i : i + 1] for i, name in enumerate(self.optimizer.row_slots)}
        return MappingProxyType(slots | row_slots)

    def columns(self) -> dict[str, Tensor]:
        """Return the weights and the slots by name, as `HostTable.columns`."""
        return {"weights": self.weights, **self.slots}

    def where(self, ids: Any) -> tuple[Tensor, Any]:
        """Return the memory of rows and their slots, float32 [V, 1 + S, D], and where those of these ids are in it."""
        return self.block, ids

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights rows of ids int32 or int64 [U], a copy float32 [U, D]."""
        return self._ops.lookup(self.block, ids)

    def update(self, ids: Tensor, grads: Tensor, skip: Tensor | None = None) -> None:
        """Take one optimizer step on unique rows: ids [U], their summed gradients float32 [U, D].

        skip  float32 []: nothing changes unless it is 0; None for 0
        """
        step = self.begin_step()
        self._ops.update(self.optimizer.primitive, self.block, self.row_slots, ids, grads, step.scalars, skip)
        if step.rounding is not None:  # where nothing has changed it changes nothing
            self._ops.round_rows(self.block, ids, ids, step.rounding)

    def begin_step(self) -> TableStep:
        """Count one step, and return what its updates need to know of it."""
        self.step += 1
        key = rounding_key(self.seed, self.name, self.step) if self.dtype == BF16 else None
        return TableStep(self.optimizer.scalars(self.step, self.dim), key)

    def write_rows(self, ids: npt.NDArray[Any], block: Rows, row_slots: Rows) -> None:
        """Overwrite rows with their slots: ids [N], float32 [N, 1 + S, D] and [N, R], from host memory.

        ValueError, with nothing written, for weights that the table's dtype cannot represent.
        """
        if self.dtype == BF16:
            require_bfloat16(block, self.name)
        at = torch.from_numpy(ids).to(self.block.device)
        self.block.index_copy_(0, at, torch.from_numpy(block).to(self.block.device))
        self.row_slots.index_copy_(0, at, torch.from_numpy(row_slots).to(self.block.device))

    def partial_squares(self) -> Tensor:
        """Return the sums of squares of the weights by part and column, float64 [P, D] on the device.

        The order is in `kernels.norm`; the bits are the host table's.
        """
        if self.block.device.type == "cpu":
            return torch.from_numpy(partial_squares(self.block.numpy()))
        return partial_squares_with_torch(self.weights)

    def sum_of_squares(self) -> float:
        """Return the sum of squares of all weights, in float64, in the order of `kernels.norm`."""
        return total(self.partial_squares().cpu().numpy())


def partial_squares_with_torch(weights: Tensor) -> Tensor:
    """Do `kernels.norm.partial_squares` of weights float32 [V, D] in torch's elementwise operations, in chunks."""
    rows, dim = weights.shape
    out = torch.empty((-(-rows // PART), dim), dtype=torch.float64, device=weights.device)
    step = max(1, _FOLD_BYTES // (PART * dim * 8))
    for first in range(0, len(out), step):
        x = weights[first * PART : (first + step) * PART].double().square_()
        if len(x) % PART:
            x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % PART))
        x = x.view(-1, PART, dim)
        while x.shape[1] > 1:
            low, high = x.chunk(2, 1)
            x = low + high
        out[first : first + step] = x[:, 0]
    return out
