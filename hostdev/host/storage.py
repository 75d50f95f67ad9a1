"""What tables need of the storage of their rows, in host memory or on disk. Reads return float32.

Shapes: V rows; for each row, D weights, S columns of optimizer state with D values each, and R values of per-row state.
N ids, int32 or int64, which must be in [0, V); this is not checked.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.initializers import Initializer
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.rounding import initial_slots
from hostdev.core.table_dtypes import FP32, TableStep
from hostdev.kernels import catch_up
from hostdev.kernels.apply import apply_occurrences, apply_tasks
from hostdev.kernels.arrays import AnyIds, Positions, Rows, aligned_empty, interleave, reserved
from hostdev.kernels.bits import gather_rows
from hostdev.kernels.clock import Clock
from hostdev.kernels.init import fill_constant
from hostdev.kernels.lookup import lookup_tasks, store_tasks
from hostdev.kernels.norm import partial_squares
from hostdev.kernels.pool import Task


class Shape:
    """The dimensions of a table's storage.

    Args:
        rows: V, the number of rows stored here.
        dim: D.
        optimizer: Defines the optimizer state.
        first: The position of the first row among all `total` rows.
        total: Rows of the table over all ranks.
        is_part: Whether the rows are only one rank's part of the table (`kernels.shards`).
        ids: Called with (start, stop); returns the ids, in the whole table, of the local rows [start, stop).
        slots_dtype: How the optimizer state columns are stored.
        keys: int64 [V] for a table by key: the key of each row, which takes the place of its id. The memory is then
            only reserved, and rows are filled when they get a key. None for other tables.

    Attributes:
        slots: The initial values of the state columns, float32 [S].
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: SparseOptimizer,
        first: int,
        total: int,
        is_part: bool,
        ids: Callable[[int, int], npt.NDArray[np.int64]],
        slots_dtype: str = FP32,
        keys: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.rows, self.dim, self.optimizer, self.keys = rows, dim, optimizer, keys
        self.first, self.total, self.is_part, self.ids = first, total, is_part, ids
        self.slots = initial_slots(optimizer, slots_dtype)

    def row_slots(self) -> Rows:
        """Return uninitialized memory for the per-row state, float32 [V, R]."""
        found: Rows = self.allocate((self.rows, len(self.optimizer.row_slots)))
        return found

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Return uninitialized memory for values of all rows; for a table by key, the memory is only reserved."""
        found: npt.NDArray[Any] = aligned_empty(shape, dtype) if self.keys is None else reserved(shape, dtype)
        return interleave(found)

    def fill_row_slots(self, row_slots: Rows) -> None:
        """Write the initial per-row state."""
        values = np.array(list(self.optimizer.row_slots.values()), np.float32)
        if len(values):
            fill_constant(row_slots[:, :, None], values[0], values[1:])


class Storage:
    """Storage of a table's rows, here in memory. Arguments mean the same as in the corresponding `HostTable` methods.

    Methods that take ids need rows that are in memory: those that `sources` yields for reads, `held` holds for writes,
    or the pipeline has pinned.
    """

    row_slots: Rows  # per-row state, [V, R]
    window = 0  # number of batches that loops read ahead, to know which rows to keep in memory
    _optimizer: SparseOptimizer

    @property
    def _stored(self) -> tuple[Any, ...]:
        """All arrays of rows, each [V, ...]."""
        raise NotImplementedError

    @property
    def _weights(self) -> Any:
        """The stored weights, in the first plane of [V, any, D]."""
        raise NotImplementedError

    def _rows_at(self, key: int) -> Any:
        """Return the rows for the optimizers' kernels, which round with this key of random numbers."""
        raise NotImplementedError

    @property
    def planes(self) -> list[Any]:
        """All that is stored of the rows, each [V, any]."""
        return [values for values in self._stored if values[:1].nbytes]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a block of all rows: V, 1 + S, D."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""
        return sum(values.nbytes for values in self._stored)

    def fill(self, shape: Shape, seed: int, init: Initializer) -> None:
        """Write the initial values of all rows."""
        raise NotImplementedError

    def initial(self, shape: Shape, seed: int, init: Initializer, ids: npt.NDArray[np.int64], block: Rows) -> None:
        """Write the initial values of rows to block [N, 1 + S, D]; ids [N] are the rows' ids in the whole table."""
        raise NotImplementedError

    def column(self, number: int) -> Any:
        """Return the weights (number 0) or state column `number - 1`; indexing by slices or row ids yields float32."""
        raise NotImplementedError

    def lookup_tasks(self, ids: AnyIds, out: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that copy weights to out [N, D]."""
        return lookup_tasks(self._weights, ids, out, positions)

    def pack_tasks(self, ids: AnyIds, out: Rows, positions: Positions | None, planes: int) -> list[Task]:
        """Return tasks that copy rows to `out` in packed form, as `kernels.catch_up.pack_tasks` does."""
        return catch_up.pack_tasks(self._rows_at(0), self.row_slots, ids, out, positions, planes)

    def current_tasks(self, ids: AnyIds, clock: Clock, out: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that write up-to-date weights to out, as `kernels.catch_up.look_up_tasks` does."""
        return catch_up.look_up_tasks(self._rows_at(0), self.row_slots, ids, clock, out, positions)

    def read_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that copy rows to block [N, 1 + S, D] and row_slots [N, R]."""
        held = self.row_slots
        return lookup_tasks(held[:, None], ids, row_slots, positions) if held.shape[1] else []

    def write_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that overwrite rows; `require_exact` must accept all values."""
        return store_tasks(self.row_slots, ids, row_slots, positions) if self.row_slots.shape[1] else []

    def require_exact(self, plane: int, values: Rows) -> None:
        """Raise ValueError unless values [N, D] of a plane (0 for the weights) can be stored without rounding."""

    def update_tasks(self, ids: AnyIds, grads: Rows, step: TableStep, positions: Positions | None) -> list[Task]:
        """Return tasks that take an optimizer step on unique rows."""
        table = self._optimizer.primitive, self._rows_at(step.key), self.row_slots
        return apply_tasks(*table, ids, grads, step.scalars, positions, step.clip, step.clock)

    def apply(self, ids: AnyIds, grads: Rows, step: TableStep) -> None:
        """Sum the gradients of each id, and take an optimizer step on its row."""
        table = self._optimizer.primitive, self._rows_at(step.key), self.row_slots
        apply_occurrences(*table, ids, grads, step.scalars, step.clip, step.clock)

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """Return the sums of squares of the weights, as `kernels.norm.partial_squares` does."""
        return partial_squares(self._weights)

    def copy_to_columns(self, start: int, stop: int, first: int, ids: AnyIds | None, columns: Rows) -> None:
        """Copy rows to columns [1 + S, N, D], as `kernels.bits.copy_to_columns` does."""
        raise NotImplementedError

    def taken(self, ids: AnyIds) -> Rows:
        """Return copies of rows, [N, 1 + S, D], without holding the GIL."""
        raise NotImplementedError

    def taken_row_slots(self, ids: AnyIds) -> Rows:
        """Return copies of the per-row state of rows, [N, R], without holding the GIL."""
        return taken(self.row_slots, ids)

    def sources(
        self, ids: AnyIds, positions: Positions | None = None
    ) -> "Iterator[tuple[Storage, AnyIds, Positions | None]]":
        """Yield, for some ids after the other: storage with their rows in memory, their numbers there, `positions`."""
        yield self, ids, positions

    def held(
        self, ids: AnyIds, positions: Positions | None = None, *, read: bool = False
    ) -> Iterator[tuple[AnyIds, Positions | None]]:
        """Yield some distinct ids, with `positions`, after the other; their rows are in memory until the next ones.

        Unless `read`, the rows have no values, and all must be written.
        """
        yield ids, positions

    def holding(self, ids: AnyIds) -> AbstractContextManager[None]:
        """Return a context in which the rows of all ids, which may repeat, are in memory."""
        return nullcontext()

    # Any, below: the table's `host.writes.Changes`, if it tracks changes

    def forget(self, ids: AnyIds, changes: Any) -> None:
        """Free the memory and the disk that rows take which nothing uses any more."""

    def taint(self, changes: Any = None) -> None:
        """Note that checkpoints must not hold what is stored now, since some of it is of erased rows."""

    def close(self, changes: Any = None) -> None:
        """Remove files of rows, which are then lost; without effect on rows in memory."""


def taken(values: Rows, ids: AnyIds) -> Rows:
    """Return values[ids], where `values` is float32 [any, ...], without holding the GIL."""
    out = np.empty((len(ids), *values.shape[1:]), np.float32)
    if out.size:
        width = out.size // len(ids)
        gather_rows(values.reshape(len(values), width), ids, out.reshape(len(ids), width))
    return out
