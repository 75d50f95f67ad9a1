"""An embedding table and its optimizer rows in host memory."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.ids import checked_ids
from hostdev.core.initializers import Initializer, Normal
from hostdev.core.memory import available_bytes, require_table
from hostdev.core.optimizers import SparseOptimizer, require_optimizer
from hostdev.host.changes import Changes
from hostdev.kernels.apply import apply_tasks, apply_uses
from hostdev.kernels.buffers import aligned_empty
from hostdev.kernels.lookup import lookup_tasks, store_tasks
from hostdev.kernels.norm import partial_squares, total
from hostdev.kernels.numa import interleave
from hostdev.kernels.pool import Task, run_tasks
from hostdev.kernels.shards import ids_at, range_of

Rows = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]
_FILLED = 1 << 20  # rows of a part at a time


class HostTable:
    """Weights float32 [rows, dim] and the optimizer's slots of the same shape.

    Initial weights depend on (seed, name, row, column) only. Memory: rows x dim x (1 + slots) x 4 bytes; a row's
    weights and slots lie in one stretch. Lookups may run in several threads at once; an update of rows that
    another thread reads or updates must be kept apart by the caller.

    What is done to rows comes as methods that check their ids and do it, and as `*_tasks`, which return the same work
    for one `run_tasks` of several tables; ids given to these are trusted: C-contiguous int32 or int64, in [0, V).

    rows, dim  at least 1
    optimizer  LazyAdam, FTRL, SGD, Adagrad or RowWiseAdagrad
    name       of the table, in errors and in the key of its initial values
    seed       of the initial values
    init       Normal(std) or Constant(value)
    part       (rank, ranks): hold only the rows of that rank, at its positions (`kernels.shards`); ids given to its
               methods are then numbers of rows among those. None: all rows

    Raises UserError, before it allocates, where the table cannot fit in the available memory, and TypeError for what is
    no optimizer of a table.
    """

    primitive_target = "CPU"

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: SparseOptimizer,
        *,
        name: str,
        seed: int = 0,
        init: Initializer = Normal(0.01),
        part: tuple[int, int] | None = None,
    ) -> None:
        if rows < 1 or dim < 1:
            raise ValueError(f"table {name!r} needs at least one row and one column, not {rows} x {dim}")
        require_optimizer(optimizer, name)
        self.part, self.total_rows = part, rows
        self.start, stop = (0, rows) if part is None else range_of(rows, *part)
        rows = stop - self.start
        require_table(name, rows, dim, optimizer, available_bytes(), "host")
        self.name = name
        self.optimizer = optimizer
        self.step = 0
        self.block: Rows = interleave(aligned_empty((rows, 1 + len(optimizer.slots), dim)))
        slots = np.array(list(optimizer.slots.values()), np.float32)
        if part is None:
            init.fill(self.block, seed, name, slots)
        else:
            for first in range(0, rows, _FILLED):
                init.fill(self.block[first : first + _FILLED], seed, name, slots, ids=self.ids(first, first + _FILLED))
        self.row_slots = np.tile(np.array(list(optimizer.row_slots.values()), np.float32), (rows, 1))
        self.changes: Changes | None = None  # noted from the first checkpoint on
        self.lent = False  # `weights` or `slots` were handed out: what is written there is not noted

    @property
    def rows(self) -> int:
        """Number of rows here, V; of a part fewer than `total_rows`."""
        return int(self.block.shape[0])

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the ids of the rows [start, stop) here."""
        stop = min(stop, self.rows)
        if self.part is None:
            return np.arange(start, stop)
        return ids_at(self.total_rows, self.start + start, self.start + stop)

    @property
    def dim(self) -> int:
        """Number of columns, D."""
        return int(self.block.shape[2])

    @property
    def weights(self) -> Rows:
        """A writable view of the weights, float32 [V, D]; waits for a checkpoint that is being saved."""
        self._lend()
        return self.block[:, 0]

    @property
    def slots(self) -> Mapping[str, Rows]:
        """Writable views of the optimizer's slots by name, each float32 [V, D], or [V, 1] for one value a row."""
        self._lend()
        slots = {name: self.block[:, 1 + i] for i, name in enumerate(self.optimizer.slots)}
        row_slots = {name: self.row_slots[:, i : i + 1] for i, name in enumerate(self.optimizer.row_slots)}
        return MappingProxyType(slots | row_slots)

    def lookup(self, ids: npt.ArrayLike, out: Rows | None = None, positions: Positions | None = None) -> Rows:
        """Return the weights rows of `ids`.

        ids        int32 or int64 [N], each in [0, V), duplicates allowed
        out        float32 [N, D], C-contiguous, to write into; a new array if None
        positions  int32 [N], rows of `out`, which may have more: where each row goes; all different (not checked)
        returns    float32 [N, D], a copy, or `out`

        Raises UserError for an id outside the table, TypeError or ValueError for a wrong dtype or shape.
        """
        ids = self._checked(ids)
        if out is None:
            out = np.empty((len(ids), self.dim), np.float32)
        run_tasks(self.lookup_tasks(ids, out, positions))
        return out

    def lookup_tasks(self, ids: npt.NDArray[Any], out: Rows, positions: Positions | None = None) -> list[Task]:
        """Return the tasks of `lookup`."""
        _check_rows("out", out, (len(ids if positions is None else out), self.dim), self.name)
        return lookup_tasks(self.block, ids, out, positions)

    def apply(self, ids: npt.ArrayLike, grads: Rows) -> None:
        """Sum the gradients of each id in order of occurrence, then take one optimizer step on its row.

        ids    int32 or int64 [N], each in [0, V), duplicates allowed
        grads  float32 [N, D]

        Raises as `lookup` does; nothing is written then. A call counts as one step of the table even if N is 0.
        """
        ids = self._checked(ids)
        grads = np.ascontiguousarray(grads)
        _check_rows("grads", grads, (len(ids), self.dim), self.name)
        self._before_write(ids)
        scalars = self.begin_step()
        apply_uses(self.optimizer.primitive, self.block, self.row_slots, ids, grads, scalars)

    def begin_step(self) -> tuple[Any, ...]:
        """Count one step of the table, and return the optimizer's scalars at it, for `update`."""
        self.step += 1
        return self.optimizer.scalars(self.step, self.dim)

    def update(
        self,
        ids: npt.ArrayLike,
        grads: Rows,
        scalars: tuple[Any, ...] | None = None,
        positions: Positions | None = None,
    ) -> None:
        """Take one optimizer step on unique rows whose gradients are summed already: `apply` without its first half.

        ids        int32 or int64 [U], each in [0, V), **unique** (not checked)
        grads      float32 [U, D]
        scalars    from `begin_step`, where several calls make one step; None for a step of its own
        positions  int32 [U], rows of `grads`, which may have more of them: where each gradient is (not checked)
        """
        run_tasks(self.update_tasks(self._checked(ids), np.ascontiguousarray(grads), scalars, positions))

    def update_tasks(
        self,
        ids: npt.NDArray[Any],
        grads: Rows,
        scalars: tuple[Any, ...] | None = None,
        positions: Positions | None = None,
    ) -> list[Task]:
        """Return the tasks of `update`; its step is counted now."""
        _check_rows("grads", grads, (len(ids if positions is None else grads), self.dim), self.name)
        scalars = scalars or self.begin_step()
        self._before_write(ids)
        return apply_tasks(self.optimizer.primitive, self.block, self.row_slots, ids, grads, scalars, positions)

    def read_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Copy rows with their slots.

        ids        int32 or int64 [N], each in [0, V)
        block      float32 [N, 1 + S, D], C-contiguous, written: weights and slots of D values
        row_slots  float32 [N, R], C-contiguous, written: slots of one value a row
        positions  int32 [N], rows of both, which may have more, as in `lookup`
        """
        run_tasks(self.read_rows_tasks(self._checked(ids), block, row_slots, positions))

    def read_rows_tasks(
        self, ids: npt.NDArray[Any], block: Rows, row_slots: Rows, positions: Positions | None = None
    ) -> list[Task]:
        """Return the tasks of `read_rows`."""
        tasks: list[Task] = []
        for values, out in zip(_flat(self.block, self.row_slots), _flat(block, row_slots), strict=True):
            if values.shape[1]:
                tasks += lookup_tasks(values[:, None], ids, out, positions)
        return tasks

    def write_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Overwrite rows with their slots: the way back from `read_rows`; ids must be unique (not checked)."""
        run_tasks(self.write_rows_tasks(self._checked(ids), block, row_slots, positions))

    def write_rows_tasks(
        self, ids: npt.NDArray[Any], block: Rows, row_slots: Rows, positions: Positions | None = None
    ) -> list[Task]:
        """Return the tasks of `write_rows`."""
        self._before_write(ids)
        tasks: list[Task] = []
        for rows, values in zip(_flat(self.block, self.row_slots), _flat(block, row_slots), strict=True):
            if rows.shape[1]:
                tasks += store_tasks(rows, ids, values, positions)
        return tasks

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """Return the sums of squares of the weights by part and column, [P, D]; the order is in `kernels.norm`."""
        return partial_squares(self.block)

    def sum_of_squares(self) -> float:
        """Return the sum of squares of all weights, in float64, in the order of `kernels.norm`."""
        return total(self.partial_squares())

    def _before_write(self, ids: npt.NDArray[Any]) -> None:
        """Note which rows are about to be written; a checkpoint that is being saved gets them first."""
        if self.changes is not None:
            self.changes.before_write(ids)

    def _lend(self) -> None:
        """Hand out memory: what is written there is not noted, and must not be while a checkpoint reads it."""
        self.lent = True
        if self.changes is not None:
            self.changes.await_end()

    def note_changes(self, *, anew: bool = False) -> Changes:
        """Note from now on which rows are written; return the notes, `anew` without those so far."""
        if self.changes is None or anew:
            self.changes = Changes(self.block, self.row_slots)
        return self.changes

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[Any]:
        return checked_ids(ids, self.rows, self.name)


def _flat(block: Rows, row_slots: Rows) -> tuple[Rows, Rows]:
    return block.reshape(len(block), block.shape[1] * block.shape[2]), row_slots


def _check_rows(what: str, array: Rows, shape: tuple[int, int], table: str) -> None:
    if array.dtype != np.float32:
        raise TypeError(f"table {table!r}: {what} must be float32, not {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"table {table!r}: {what} must have shape {shape}, not {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"table {table!r}: {what} must be C-contiguous")
