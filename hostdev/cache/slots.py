"""The device side of a cache: a table's hot rows with their optimizer state, gathered and updated in place.

Shapes: C slots; per row, S optimizer state columns of D values and R state values. A batch has U unique ids: H are
cached, A are admitted, M bypass the cache, and its rows are in this order. E rows are evicted.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hostdev.cache.plan import Plan
from hostdev.core.memory import row_bytes
from hostdev.core.table_dtypes import TableStep
from hostdev.device.ops import get_ops
from hostdev.device.ops.catch_up import Clocks, pack

CachedTable = Any  # a `HostTable`, whose module this package does not import


class Places(NamedTuple):
    """The numbers of a plan's slots, int32; all tables of a cache share them."""

    hit_slots: Tensor  # [H], slots of rows that were cached before the batch
    admitted_slots: Tensor  # [A], slots of admitted rows; the last E hold the evicted rows until the swap
    row_ids: Tensor | None = None  # int32 or int64 [H + A], the rows' ids, or None if not needed

    @classmethod
    def of(cls, plan: Plan, row_ids: Any = None) -> "Places":
        """Wrap a plan's arrays as tensors, which stay in host memory."""
        ids = None if row_ids is None else torch.from_numpy(row_ids)
        return cls(torch.from_numpy(plan.hit_slots), torch.from_numpy(plan.admitted_slots), ids)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are not None, in order."""
        return [tensor for tensor in self if tensor is not None]


class DeviceSlots:
    """One table's slots on the device: block float32 [C, 1 + S, D] and row_slots float32 [C, R].

    The device's current stream orders the work; only one thread at a time may use the slots.
    """

    def __init__(self, capacity: int, table: CachedTable, device: torch.device) -> None:
        self.optimizer = table.optimizer
        slots, row_slots = len(table.optimizer.slots), len(table.optimizer.row_slots)
        self.block = torch.empty((capacity, 1 + slots, table.dim), dtype=torch.float32, device=device)
        self.row_slots = torch.empty((capacity, row_slots), dtype=torch.float32, device=device)
        self._row_bytes = row_bytes([(table.dim, table.optimizer)])[1]
        self._ops, self._clocks = get_ops(self.block.device), Clocks()
        how = table.optimizer.catch_up
        self._moments = None if how is None else how.betas is not None

    def rows(self, at: Places, passed: Tensor, admitted: Tensor, admitted_row_slots: Tensor) -> Tensor:
        """Return a batch's unique rows in a new tensor: weights, or, if each step changes all rows, packed rows.

        Args:
            at: The plan's slots.
            passed: Bypassing rows from the host, float32 [M, D]; or packed by `pack`, [M, W] with W values per row.
            admitted: Admitted rows from the host, float32 [A, 1 + S, D].
            admitted_row_slots: float32 [A, R].

        Returns:
            float32 [U, D] or [U, W].
        """
        if self._moments is not None:
            hits = at.hit_slots
            block = torch.cat([self.block.index_select(0, hits), admitted])
            row_slots = torch.cat([self.row_slots.index_select(0, hits), admitted_row_slots])
            return torch.cat([pack(block, row_slots, self._moments), passed])
        rows: Tensor = self._ops.assemble(self.block, at.hit_slots, admitted, passed)
        return rows

    def rows_bytes(self, at: Places, passed: Tensor, admitted: Tensor, admitted_row_slots: Tensor) -> int:
        """Return the bytes that `rows` reads and writes."""
        return 8 * passed.shape[1] * (len(at.hit_slots) + len(admitted) + len(passed))

    def update(
        self,
        at: Places,
        grads: Tensor,
        admitted: Tensor,
        admitted_row_slots: Tensor,
        step: TableStep,
        skip: Tensor | None = None,
    ) -> None:
        """Take one optimizer step on cached rows in their slots, and on admitted rows in their own memory.

        Values that the host does not store as float32 are then rounded; rounding changes nothing in a skipped step.

        Args:
            at: The plan's slots.
            grads: Summed gradients of the batch's rows, float32 [U, D].
            admitted: float32 [A, 1 + S, D], updated in place.
            admitted_row_slots: float32 [A, R], updated in place.
            step: The arguments of the table's step.
            skip: float32 []. If it is 0, or `skip` is None, the step is taken; otherwise nothing changes.
        """
        if step.clip is not None:
            grads = self._ops.clip_rows(grads, step.clip)
        where = (self.optimizer.primitive, self.block, self.row_slots, at.hit_slots)
        self._ops.update(*where, grads, step.scalars, skip, admitted, admitted_row_slots, step.clock, self._clocks)
        if step.rounding is not None:
            assert at.row_ids is not None
            H = len(at.hit_slots)
            self._ops.round_rows(self.block, at.hit_slots, at.row_ids[:H], *step.rounding)
            self._ops.round_rows(admitted, None, at.row_ids[H:], *step.rounding)

    def update_bytes(self, at: Places, grads: Tensor, admitted: Tensor, *some: Any) -> int:
        """Return the bytes that `update` reads and writes."""
        return (4 * self.block.shape[2] + 2 * self._row_bytes) * (len(at.hit_slots) + len(admitted))

    def passed(self, at: Places, grads: Tensor) -> Tensor:
        """Return the gradients of bypassing rows, float32 [M, D]: a view of the end of `grads`, float32 [U, D]."""
        return grads[len(at.hit_slots) + len(at.admitted_slots) :]

    def exchange(self, at: Places, leaving: int, admitted: Tensor, admitted_row_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Swap the admitted rows in; return block [E, 1 + S, D] and row_slots [E, R] of the E = `leaving` evicted rows.

        The memory of the admitted rows may be overwritten.
        """
        memory = self.block, self.row_slots, at.admitted_slots, leaving, admitted, admitted_row_slots
        left: tuple[Tensor, Tensor] = self._ops.exchange(*memory)
        return left

    def exchange_bytes(self, at: Places, leaving: int, *some: Any) -> int:
        """Return the bytes that `exchange` reads and writes."""
        return 2 * self._row_bytes * (len(at.admitted_slots) + leaving)

    def write(self, slots: Tensor, block: Tensor, row_slots: Tensor) -> None:
        """Overwrite slots int64 [N] with rows: block float32 [N, 1 + S, D] and row_slots float32 [N, R]."""
        self.block.index_copy_(0, slots, block)
        self.row_slots.index_copy_(0, slots, row_slots)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of slots int32 [N]: block float32 [N, 1 + S, D] and row_slots float32 [N, R]."""
        return self.block.index_select(0, slots), self.row_slots.index_select(0, slots)
