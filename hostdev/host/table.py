"""An embedding table and its optimizer rows in host memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import check_rows, require_finite, require_gradients
from hostdev.core.errors import UserError
from hostdev.core.ids import checked_ids, checked_positions
from hostdev.core.initializers import Initializer, Normal, initializer
from hostdev.core.launched import require_alone
from hostdev.core.memory import available_bytes, gib, require_table
from hostdev.core.optimizers import SparseOptimizer, require_optimizer
from hostdev.core.rounding import rounding_key
from hostdev.core.table_dtypes import BF16, FP32, TableStep, require_table_dtype
from hostdev.core.tables import Owned, initial_seed
from hostdev.host.changes import Changes
from hostdev.host.storage import STORAGES, Float32, Shape, Storage
from hostdev.host.writing import Writing
from hostdev.kernels.norm import total
from hostdev.kernels.pool import Task, run_tasks
from hostdev.kernels.shards import ids_at, ids_of, range_of

Rows = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]

_ERASED = 1 << 16  # rows at a time


class HostTable(Owned):
    """Weights float32 [rows, dim] and the optimizer's slots of the same shape.

    Initial weights depend on (seed, name, row, column) only. Memory: rows x dim x (1 + slots) x 4 bytes; a row's
    weights and slots lie in one stretch. With dtype="bf16" a weight takes 2 bytes: all values are those that bfloat16
    can represent, in float32 wherever they are read, and a new one is rounded stochastically to one of its two
    neighbours, by a random number that depends on (seed, name, step of the table, row, column) only.

    Lookups may run in several threads at once; an update of rows that another thread reads or updates must be kept
    apart by the caller.

    While a loop over `Runtime.train` is open, its thread may read and write the table in the loop's body. A read sees
    all steps so far, that of the body's batch too once an optimizer has taken it, which ends that batch: no gradient
    can come to its rows any more. What is written counts from the next batch on. ValueError in another thread, and in
    the loader, `ids` or `send`, which run ahead of the loop.

    What is done to rows comes as methods that check their ids and do it, and as `*_tasks`, which return the same work
    for one `run_tasks` of several tables; ids given to these are trusted: C-contiguous int32 or int64, in [0, V).

    rows, dim  at least 1
    optimizer  LazyAdam, FTRL, SGD, Adagrad or RowWiseAdagrad
    name       of the table, in errors and in the key of its initial values
    seed       of the initial values. None: the seed given to `torch.manual_seed`, or 0 where there is none
    init       Normal(std), Uniform(low, high), Constant(value), or an array [rows, dim] of numbers, also where `part`
               holds fewer; it is kept for `erase` and must not be changed. With dtype="bf16" rounded as updates are
    part       (rank, ranks): hold only the rows of that rank, at its positions (`kernels.shards`); ids given to its
               methods are then numbers of rows among those. None: all rows
    dtype      of the weights as they are stored: "fp32" or "bf16"; slots are float32

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
        seed: int | None = None,
        init: Initializer | npt.ArrayLike = Normal(0.01),
        part: tuple[int, int] | None = None,
        dtype: str = FP32,
    ) -> None:
        if rows < 1 or dim < 1:
            raise ValueError(f"table {name!r} needs at least one row and one column, not {rows} x {dim}")
        require_optimizer(optimizer, name)
        if part is not None and not 0 <= part[0] < part[1]:
            raise ValueError(f"table {name!r}: part must be (rank, ranks) with a rank in 0..ranks - 1, not {part}")
        self.part, self.total_rows = part, rows
        self.start, stop = (0, rows) if part is None else range_of(rows, *part)
        rows = stop - self.start
        require_table(name, rows, dim, optimizer, available_bytes(), "host", require_table_dtype(dtype, name))
        self.name, self.seed = name, initial_seed(seed)
        self.optimizer = optimizer
        self._rows = rows
        self._initial = (self.seed, initializer(init, self.total_rows, dim, name))
        shape = self._shape(dim)
        self.storage: Storage = STORAGES[dtype](name, shape)
        self.storage.fill(shape, *self._initial)
        self.changes: Changes | None = None  # noted from the first checkpoint on
        self.untouched = True  # all rows have their initial values
        self.may_train = part is not None  # or known to be meant, where several processes were started

    @property
    def rows(self) -> int:
        """Number of rows here, V; of a part fewer than `total_rows`."""
        return self._rows

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the ids of the rows [start, stop) here."""
        stop = min(stop, self.rows)
        if self.part is None:
            return np.arange(start, stop)
        return ids_at(self.total_rows, self.start + start, self.start + stop)

    def row_ids(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the ids, among all rows, of rows by their numbers here."""
        return ids if self.part is None else ids_of(ids.astype(np.int64) + self.start, self.total_rows)

    @property
    def dim(self) -> int:
        """Number of columns, D."""
        return self.storage.shape[2]

    @property
    def init(self) -> Initializer:
        """What the weights started as."""
        return self._initial[1]

    @property
    def dtype(self) -> str:
        """What the weights are stored as."""
        return self.storage.dtype

    @property
    def block(self) -> Rows:
        """A read-only view of all rows, float32 [V, 1 + S, D]; TypeError where weights are bfloat16, and lie apart."""
        if not isinstance(self.storage, Float32):
            raise TypeError(f"table {self.name!r} stores weights as bfloat16, apart from its slots; use read_rows")
        self._before_read()
        return _read_only(self.storage.block)

    @property
    def row_slots(self) -> Rows:
        """A read-only view of the slots of one value a row, float32 [V, R]."""
        self._before_read()
        return _read_only(self.storage.row_slots)

    @property
    def weights(self) -> Rows:
        """A read-only view of the weights, float32 [V, D]; `writing` and `write_rows` write them.

        The view is of the memory: while a loop is open, take it anew where you read it. One that was kept from an
        earlier batch lags behind by steps that are not finished and rows that are in a cache.

        With dtype="bf16" a copy in float32. UserError where there is no memory for it.
        """
        self._before_read()
        if self.dtype == BF16:
            needed, free = 4 * self.rows * self.dim, available_bytes()
            if needed > free:
                raise UserError(
                    f"table {self.name!r}: a float32 copy of its weights needs {gib(needed)}, but {gib(free)} of host "
                    "memory are free; look up the rows that you need"
                )
        return _read_only(self.storage.weights())

    @property
    def slots(self) -> Mapping[str, Rows]:
        """Read-only views of the optimizer's slots by name, each float32 [V, D], or [V, 1] for one value a row.

        As `weights`: take them anew where you read them.
        """
        self._before_read()
        slots = {name: self.storage.slot(i) for i, name in enumerate(self.optimizer.slots)}
        row_slots = {name: self.storage.row_slots[:, i : i + 1] for i, name in enumerate(self.optimizer.row_slots)}
        return MappingProxyType({name: _read_only(values) for name, values in (slots | row_slots).items()})

    @contextmanager
    def writing(self, ids: npt.ArrayLike | None = None) -> Iterator[Writing]:
        """Change weights and slots as arrays; at the end of the `with` the rows that differ are written.

        ::

            with table.writing() as w:  # all rows; or writing(ids), for large tables
                w.weights *= 0.5
                w.slots["m"][:] = 0

        `w.weights` is float32 [V, D], and `w.slots[name]` [V, D], or [V, 1] for one value a row; with `ids` [N, ...]
        in the order of these. They are copies, made when they are first asked for. Where the `with` ends with an
        error, or what is to be written cannot be, the table stays as it is.

        ids  int32 or int64 [N], each in [0, V), all different; None for all rows

        ValueError for values that are not finite or that the table's dtype cannot represent, for ids that repeat, and
        for another write of this table within the `with`; UserError for an id outside the table, or where there is no
        memory for the copies.
        """
        chosen = None if ids is None else self._checked(ids)
        if chosen is not None and len(np.unique(chosen)) < len(chosen):
            raise ValueError(f"table {self.name!r}: the ids of writing() must be all different")
        self._before_write()
        one = Writing(self.name, self._columns(), chosen, self.rows)
        self._is_writing = True
        try:
            yield one
            changed = one.changed()
            if self.dtype == BF16:
                one.require_exact(changed, self.storage.require_exact)
        finally:
            one.end()
            self._is_writing = False
        if len(changed):
            self._write_changed(one, changed)
            self._after_write(changed if chosen is None else chosen[changed])

    def _write_changed(self, one: Writing, changed: npt.NDArray[np.int64]) -> None:
        _, planes, D = self.storage.shape
        for numbers, ids in one.parts(changed):
            block = np.empty((len(ids), planes, D), np.float32)
            row_slots = np.empty((len(ids), self.storage.row_slots.shape[1]), np.float32)
            run_tasks(self.read_rows_tasks(ids, block, row_slots))
            for number, name in enumerate(("weights", *self.optimizer.slots)):
                one.put(name, numbers, block[:, number])
            for number, name in enumerate(self.optimizer.row_slots):
                one.put(name, numbers, row_slots[:, number : number + 1])
            run_tasks(self.write_rows_tasks(ids, block, row_slots))

    def erase(self, ids: npt.ArrayLike) -> None:
        """Give rows their initial values again, weights and slots; the table's step stays.

        ids  int32 or int64 [N], each in [0, V), duplicates allowed

        Raises as `lookup` does.
        """
        ids = np.unique(self._checked(ids))
        self._before_write()
        _, planes, D = self.storage.shape
        for start in range(0, len(ids), _ERASED):
            part = ids[start : start + _ERASED]
            block = np.empty((len(part), planes, D), np.float32)
            self.storage.initial(self._shape(D), *self._initial, self.row_ids(part).astype(np.int64), block)
            row_slots = np.empty((len(part), self.storage.row_slots.shape[1]), np.float32)
            row_slots[:] = list(self.optimizer.row_slots.values())
            run_tasks(self.write_rows_tasks(part, block, row_slots))
        self._after_write(ids)

    def lookup(self, ids: npt.ArrayLike, out: Rows | None = None, positions: Positions | None = None) -> Rows:
        """Return the weights rows of `ids`.

        ids        int32 or int64 [N], each in [0, V), duplicates allowed
        out        float32 [N, D], C-contiguous, to write into; a new array if None
        positions  int32 [N], rows of `out`, which may have more: where each row goes; all different
                   (that is not checked)
        returns    float32 [N, D], a copy, or `out`

        Raises UserError for an id outside the table, TypeError or ValueError for a wrong dtype or shape.
        """
        ids = self._checked(ids)
        self._before_read()
        if out is None:
            out = np.empty((len(ids), self.dim), np.float32)
        run_tasks(self.lookup_tasks(ids, out, checked_positions(positions, len(ids), len(out), self.name)))
        return out

    def lookup_tasks(self, ids: npt.NDArray[Any], out: Rows, positions: Positions | None = None) -> list[Task]:
        """Return the tasks of `lookup`."""
        check_rows("out", out, (len(ids if positions is None else out), self.dim), self.name)
        return self.storage.lookup_tasks(ids, out, positions)

    def apply(self, ids: npt.ArrayLike, grads: Rows) -> None:
        """Sum the gradients of each id in order of occurrence, then take one optimizer step on its row.

        ids    int32 or int64 [N], each in [0, V), duplicates allowed
        grads  float32 [N, D]

        Raises as `lookup` does, and ValueError for gradients that are not finite, or so large that their squares are
        not (`optimizer.largest_gradient`); nothing is written then. A call counts as one step of the table even if N
        is 0. Raises UserError in one of several processes, where the table is no part of one that they share
        (`hostdev.alone`).
        """
        self._require_alone()
        ids = self._checked(ids)
        grads = np.ascontiguousarray(grads)
        check_rows("grads", grads, (len(ids), self.dim), self.name)
        require_gradients(self.name, ids, grads, self.optimizer.largest_gradient, summed=False)
        self._before_write()
        self._note_write(ids)
        self.storage.apply(ids, grads, self.begin_step())
        self._after_write(ids)

    def begin_step(self) -> TableStep:
        """Count one step of the table, and return what its updates need to know of it, for `update`."""
        self._require_no_writing()
        self._step += 1
        key = rounding_key(self.seed, self.name, self._step) if self.dtype == BF16 else None
        return TableStep(self.optimizer.scalars(self._step, self.dim), key)

    def update(
        self,
        ids: npt.ArrayLike,
        grads: Rows,
        step: TableStep | None = None,
        positions: Positions | None = None,
    ) -> None:
        """Take one optimizer step on unique rows whose gradients are summed already: `apply` without its first half.

        ids        int32 or int64 [U], each in [0, V), **unique** (not checked)
        grads      float32 [U, D]
        step       from `begin_step`, where several calls make one step; None for a step of its own
        positions  int32 [U], rows of `grads`, which may have more of them: where each gradient is

        Raises as `apply` does.
        """
        self._require_alone()
        ids, grads = self._checked(ids), np.ascontiguousarray(grads)
        positions = checked_positions(positions, len(ids), len(grads), self.name)
        check_rows("grads", grads, (len(ids if positions is None else grads), self.dim), self.name)
        mine = grads if positions is None else grads[positions]
        require_gradients(self.name, ids, mine, self.optimizer.largest_gradient, summed=True)
        self._before_write()
        run_tasks(self.update_tasks(ids, grads, step, positions))
        self._after_write(ids)

    def update_tasks(
        self,
        ids: npt.NDArray[Any],
        grads: Rows,
        step: TableStep | None = None,
        positions: Positions | None = None,
    ) -> list[Task]:
        """Return the tasks of `update`; its step is counted now."""
        check_rows("grads", grads, (len(ids if positions is None else grads), self.dim), self.name)
        step = step or self.begin_step()
        self._note_write(ids)
        return self.storage.update_tasks(ids, grads, step, positions)

    def read_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Copy rows with their slots.

        ids        int32 or int64 [N], each in [0, V)
        block      float32 [N, 1 + S, D], C-contiguous, written: weights and slots of D values
        row_slots  float32 [N, R], C-contiguous, written: slots of one value a row
        positions  int32 [N], rows of both, which may have more, as in `lookup`

        Raises as `lookup` does.
        """
        ids = self._checked(ids)
        positions = checked_positions(positions, len(ids), len(block), self.name)
        self._before_read()
        run_tasks(self.read_rows_tasks(ids, block, row_slots, positions))

    def read_rows_tasks(
        self, ids: npt.NDArray[Any], block: Rows, row_slots: Rows, positions: Positions | None = None
    ) -> list[Task]:
        """Return the tasks of `read_rows`."""
        self._check_whole(ids, block, row_slots, positions)
        return self.storage.read_tasks(ids, block, row_slots, positions)

    def write_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Overwrite rows with their slots: the way back from `read_rows`; ids must be unique (not checked).

        Raises as `lookup` does, and ValueError for values that are not finite and for weights that the table's dtype
        cannot represent; nothing is written then.
        """
        ids = self._checked(ids)
        positions = checked_positions(positions, len(ids), len(block), self.name)
        self._check_whole(ids, block, row_slots, positions)
        mine = (block, row_slots) if positions is None else (block[positions], row_slots[positions])
        require_finite(self.name, ids, *mine)
        self.storage.require_exact(mine[0])
        self._before_write()
        run_tasks(self.write_rows_tasks(ids, block, row_slots, positions))
        self._after_write(ids)

    def write_rows_tasks(
        self, ids: npt.NDArray[Any], block: Rows, row_slots: Rows, positions: Positions | None = None
    ) -> list[Task]:
        """Return the tasks of `write_rows`; that the table's dtype can represent the weights is trusted."""
        self._check_whole(ids, block, row_slots, positions)
        tasks = self.storage.write_tasks(ids, block, row_slots, positions)
        self._note_write(ids)
        return tasks

    def columns(self) -> dict[str, Any]:
        """Return the weights and the slots by name, of which slices and rows by id are read, float32; for digests."""
        self._before_read()
        return self._columns()

    def _columns(self) -> dict[str, Any]:
        found = {"weights": self.storage.column(0)}
        found |= {name: self.storage.column(1 + i) for i, name in enumerate(self.optimizer.slots)}
        row_slots = self.storage.row_slots
        return found | {name: row_slots[:, i : i + 1] for i, name in enumerate(self.optimizer.row_slots)}

    def where(self, ids: Any) -> tuple[Rows, Any]:
        """Return memory with rows and their slots, float32 [any, 1 + S, D], and where those of these ids are in it."""
        if isinstance(self.storage, Float32):
            return self.storage.block, ids
        return self.storage.taken(ids), np.arange(len(ids))

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """Return the sums of squares of the weights by part and column, [P, D]; the order is in `kernels.norm`."""
        self._before_read()
        return self.storage.partial_squares()

    def sum_of_squares(self) -> float:
        """Return the sum of squares of all weights, in float64, in the order of `kernels.norm`."""
        return total(self.partial_squares())

    def _require_alone(self) -> None:
        """Raise UserError where other processes train copies of this table that would drift apart."""
        if not self.may_train:
            require_alone(
                f"the training of table {self.name!r}", "give HostTable part=ranks.part(), and a Runtime ranks"
            )
            self.may_train = True

    def _note_write(self, ids: npt.NDArray[Any]) -> None:
        """Note which rows are about to be written; a checkpoint that is being saved gets them first."""
        self.untouched = False
        if self.changes is not None:
            self.changes.before_write(ids)

    def __getstate__(self) -> Mapping[str, Any]:
        """See `Owned`; which rows a checkpoint lacks is not known of a copy."""
        return {**super().__getstate__(), "changes": None}

    def reset(self) -> None:
        """Write the initial values of all rows, and count no step.

        Nobody reads or writes the table meanwhile. Waits for a checkpoint that is being saved.
        """
        self._before_write()
        if self.changes is not None:
            self.changes.await_end()
            self.note_changes(anew=True)  # since no checkpoint: the next one is whole
        self.storage.fill(self._shape(self.dim), *self._initial)
        self._step, self.untouched = 0, True
        self._after_write(None)

    def _shape(self, dim: int) -> Shape:
        return Shape(self.rows, dim, self.optimizer, self.start, self.total_rows, self.part is not None, self.ids)

    def note_changes(self, *, anew: bool = False) -> Changes:
        """Note from now on which rows are written; return the notes, `anew` without those so far."""
        if self.changes is None or anew:
            self.changes = Changes(self.storage)
        return self.changes

    def _check_whole(self, ids: npt.NDArray[Any], block: Rows, row_slots: Rows, positions: Positions | None) -> None:
        """Raise unless these are rows with their slots."""
        _, planes, D = self.storage.shape
        n, R = len(ids if positions is None else block), self.storage.row_slots.shape[1]
        check_rows("block", block, (n, planes, D), self.name)
        check_rows("row_slots", row_slots, (n, R), self.name)

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[Any]:
        return checked_ids(ids, self.rows, self.name)


def _read_only(values: Rows) -> Rows:
    found = values.view()
    found.flags.writeable = False
    return found
