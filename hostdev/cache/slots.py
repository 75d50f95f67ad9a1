"""The device's side of a cache: a table's hot rows with their optimizer slots, gathered and updated in place.

C slots, S optimizer slots of D values a row, R of one value; U unique ids of a batch, of which H are cached, A are
admitted and M pass by; E rows leave. On the CPU the host's kernels work on the tensors' memory.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hostdev.cache.planner import Plan
from hostdev.device.optimizers import update_rows
from hostdev.kernels.buffers import identity
from hostdev.kernels.lookup import lookup, store
from hostdev.optimizers import SparseOptimizer


class CachedTable(Protocol):
    """What a cache needs to know of a table in host memory; `hostdev.HostTable` is one."""

    name: str
    optimizer: SparseOptimizer

    @property
    def rows(self) -> int:
        """Number of rows, V."""

    @property
    def dim(self) -> int:
        """Number of columns, D."""

    def read_rows(self, ids: Any, block: Any, row_slots: Any, positions: Any = None) -> None:
        """Copy rows with their slots, as `HostTable.read_rows`."""

    def write_rows(self, ids: Any, block: Any, row_slots: Any, positions: Any = None) -> None:
        """Overwrite rows with their slots, as `HostTable.write_rows`."""


class Places(NamedTuple):
    """A plan's positions and slots on the device, int32; all tables of a cache share them."""

    hits: Tensor  # [H]
    hit_slots: Tensor  # [H]
    admitted: Tensor  # [A]
    admitted_slots: Tensor  # [A]
    passed: Tensor  # [M]
    evicted_slots: Tensor  # [E]

    @classmethod
    def of(cls, plan: Plan) -> "Places":
        """Wrap a plan's arrays, still in host memory."""
        return cls(*(torch.from_numpy(getattr(plan, name)) for name in cls._fields))


class DeviceSlots:
    """The slots of one table: block float32 [C, 1 + S, D] and row_slots float32 [C, R] on the device.

    Work is ordered by the device's current stream; one thread at a time may call.
    """

    def __init__(self, capacity: int, table: CachedTable, device: torch.device) -> None:
        self.optimizer = table.optimizer
        self.block = torch.empty((capacity, 1 + len(table.optimizer.slots), table.dim), device=device)
        self.row_slots = torch.empty((capacity, len(table.optimizer.row_slots)), device=device)

    def rows(self, at: Places, passed: Tensor, admitted: Tensor) -> Tensor:
        """Return the weights of a batch's unique rows, float32 [U, D], a new tensor.

        passed    float32 [M, D], from the host
        admitted  float32 [A, 1 + S, D], from the host
        """
        out = passed.new_empty((len(at.hits) + len(at.admitted) + len(at.passed), self.block.shape[2]))
        _place(self.block, at.hit_slots, out, at.hits)
        _place(admitted, None, out, at.admitted)
        _place(passed.unsqueeze(1), None, out, at.passed)
        return out

    def update(
        self, at: Places, grads: Tensor, admitted: Tensor, admitted_row_slots: Tensor, scalars: tuple[Any, ...]
    ) -> None:
        """Take one optimizer step on the rows that are cached, and on the admitted ones where they still lie.

        grads     float32 [U, D], the summed gradients of the batch's rows
        admitted  float32 [A, 1 + S, D], admitted_row_slots float32 [A, R]: updated in place
        """
        name = self.optimizer.primitive
        update_rows(name, self.block, self.row_slots, at.hit_slots, grads, scalars, at.hits)
        here = torch.arange(len(admitted), dtype=torch.int32, device=admitted.device)
        update_rows(name, admitted, admitted_row_slots, here, grads, scalars, at.admitted)

    def passed(self, at: Places, grads: Tensor) -> Tensor:
        """Return the gradients of the rows that pass by, float32 [M, D], of all grads float32 [U, D]."""
        return _select(grads, at.passed)

    def exchange(self, at: Places, admitted: Tensor, admitted_row_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Take out the rows that leave and put in the admitted ones; return the former, [E, 1 + S, D] and [E, R]."""
        out = self.read(at.evicted_slots)
        for slots, values in zip(self._flat(), (admitted.flatten(1), admitted_row_slots), strict=True):
            _overwrite(slots, at.admitted_slots, values)
        return out

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of slots int32 [N]: float32 [N, 1 + S, D] and [N, R]."""
        block, row_slots = (_select(values, slots) for values in self._flat())
        return block.view(-1, *self.block.shape[1:]), row_slots

    def _flat(self) -> tuple[Tensor, Tensor]:
        return self.block.flatten(1), self.row_slots


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _select(values: Tensor, at: Tensor) -> Tensor:
    if not (_on_host(values) and values.shape[1]):
        return values.index_select(0, at)
    out = torch.empty((len(at), values.shape[1]))
    lookup(values.detach().numpy()[:, None], at.numpy(), out.numpy())
    return out


def _place(block: Tensor, source: Tensor | None, out: Tensor, at: Tensor) -> None:
    """out[at[i]] = block[source[i], 0], or block[i, 0]."""
    if not _on_host(out):
        weights = block[:, 0]
        out.index_copy_(0, at.long(), weights if source is None else weights.index_select(0, source))
        return
    ids = identity(len(at)) if source is None else source.numpy()
    lookup(block.numpy(), ids, out.numpy(), at.numpy())


def _overwrite(rows: Tensor, at: Tensor, values: Tensor) -> None:
    """rows[at] = values, in place."""
    if not _on_host(rows):
        rows.index_copy_(0, at.long(), values)
    elif rows.shape[1]:
        store(rows.numpy(), at.numpy(), values.numpy())
