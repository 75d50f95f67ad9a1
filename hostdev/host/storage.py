"""What tables need of the storage of their rows, in host memory or on disk. Reads return float32.

Shapes: V rows; for each row, D weights, S columns of optimizer state with D values each, and R values of per-row state.
N ids, int32 or int64, which must be in [0, V); this is not checked.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hostdev.core.initializers import Initializer
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.rounding import initial_slots
from hostdev.core.table_dtypes import FP32, TableStep
from hostdev.kernels.bits import gather_rows
from hostdev.kernels.buffers import aligned_empty, reserved
from hostdev.kernels.clock import Clock
from hostdev.kernels.init import fill_constant
from hostdev.kernels.numa import interleave
from hostdev.kernels.pool import Task

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[Any]
Positions = npt.NDArray[np.int32]


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


class Storage(Protocol):
    """Storage of a table's rows. Arguments mean the same as in the corresponding `HostTable` methods."""

    row_slots: Rows  # per-row state, [V, R]
    window: int  # number of batches that loops read ahead, to know which rows to keep in memory

    def initial(self, shape: Shape, seed: int, init: Initializer, ids: npt.NDArray[np.int64], block: Rows) -> None:
        """Write the initial values of rows to block [N, 1 + S, D]; ids [N] are the rows' ids in the whole table."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a block of all rows: V, 1 + S, D."""

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""

    def fill(self, shape: Shape, seed: int, init: Initializer) -> None:
        """Write the initial values of all rows."""

    def column(self, number: int) -> Any:
        """Return the weights (number 0) or state column `number - 1`; indexing by slices or row ids yields float32."""

    def lookup_tasks(self, ids: Ids, out: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that copy weights to out [N, D]."""

    def pack_tasks(self, ids: Ids, out: Rows, positions: Positions | None, planes: int) -> list[Task]:
        """Return tasks that copy rows to `out` in packed form, as `kernels.catch_up.pack_tasks` does."""

    def current_tasks(self, ids: Ids, clock: Clock, out: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that write up-to-date weights to out, as `kernels.catch_up.look_up_tasks` does."""

    def read_tasks(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that copy rows to block [N, 1 + S, D] and row_slots [N, R]."""

    def write_tasks(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that overwrite rows; `require_exact` must accept all values."""

    def require_exact(self, plane: int, values: Rows) -> None:
        """Raise ValueError unless values [N, D] of a plane (0 for the weights) can be stored without rounding."""

    def update_tasks(self, ids: Ids, grads: Rows, step: TableStep, positions: Positions | None) -> list[Task]:
        """Return tasks that take an optimizer step on unique rows."""

    def apply(self, ids: Ids, grads: Rows, step: TableStep) -> None:
        """Sum the gradients of each id, and take an optimizer step on its row."""

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """Return the sums of squares of the weights, as `kernels.norm.partial_squares` does."""

    def copy_to_columns(self, start: int, stop: int, first: int, ids: Ids | None, columns: Rows) -> None:
        """Copy rows to columns [1 + S, N, D], as `kernels.bits.copy_to_columns` does."""

    def taken(self, ids: Ids) -> Rows:
        """Return copies of rows, [N, 1 + S, D], without holding the GIL."""

    def taken_row_slots(self, ids: Ids) -> Rows:
        """Return copies of the per-row state of rows, [N, R], without holding the GIL."""

    def sources(
        self, ids: Ids, positions: Positions | None = None
    ) -> "Iterator[tuple[Storage, Ids, Positions | None]]":
        """Yield, for some ids after the other: storage that has their rows in memory, their numbers there, `positions`.

        The other methods that take ids need rows that are in memory: those that this yields for reads, `held` holds for
        writes, or the pipeline has pinned.
        """

    def held(
        self, ids: Ids, positions: Positions | None = None, *, read: bool = False
    ) -> Iterator[tuple[Ids, Positions | None]]:
        """Yield some distinct ids, with `positions`, after the other; their rows are in memory until the next ones.

        Unless `read`, the rows have no values, and all must be written.
        """

    def holding(self, ids: Ids) -> AbstractContextManager[None]:
        """Return a context in which the rows of all ids, which may repeat, are in memory."""

    # Any, below: the table's `host.changes.Changes`, if it tracks changes

    def forget(self, ids: Ids, changes: Any) -> None:
        """Free the memory and the disk that rows take which nothing uses any more."""

    def taint(self, changes: Any = None) -> None:
        """Note that checkpoints must not hold what is stored now, since some of it is of erased rows."""

    def close(self, changes: Any = None) -> None:
        """Remove files of rows, which are then lost; without effect on rows in memory."""


class InMemory:
    """Storage that has all rows in memory."""

    row_slots: Rows
    window = 0

    def sources(self, ids: Ids, positions: Positions | None = None) -> Iterator[tuple[Any, Ids, Positions | None]]:
        """See `Storage`."""
        yield self, ids, positions

    def held(
        self, ids: Ids, positions: Positions | None = None, *, read: bool = False
    ) -> Iterator[tuple[Ids, Positions | None]]:
        """See `Storage`."""
        del read
        yield ids, positions

    def holding(self, ids: Ids) -> AbstractContextManager[None]:
        """See `Storage`."""
        del ids
        return nullcontext()

    def forget(self, ids: Ids, changes: Any) -> None:
        """See `Storage`; here without effect."""

    def taint(self, changes: Any = None) -> None:
        """See `Storage`; here without effect."""

    def close(self, changes: Any = None) -> None:
        """See `Storage`; here without effect."""

    def taken_row_slots(self, ids: Ids) -> Rows:
        """See `Storage`."""
        return taken(self.row_slots, ids)


def taken(values: Rows, ids: Ids) -> Rows:
    """Return values[ids], where `values` is float32 [any, ...], without holding the GIL."""
    out = np.empty((len(ids), *values.shape[1:]), np.float32)
    if out.size:
        width = out.size // len(ids)
        gather_rows(values.reshape(len(values), width), ids, out.reshape(len(ids), width))
    return out
