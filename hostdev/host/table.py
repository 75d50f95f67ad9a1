"""An embedding table and its optimizer state in host memory, by row or by key; and a parameter server that holds
tables."""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import check_rows, checked_positions, require_gradients, require_size
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.history import History
from hostdev.core.initializers import Given, Initializer, Normal, initializer
from hostdev.core.key_rules import Admission, Eviction
from hostdev.core.optimizers import SparseOptimizer, require_optimizer
from hostdev.core.table_dtypes import FP32, TableStep, require_slots_dtype, require_table_dtype
from hostdev.core.tables import initial_seed
from hostdev.host.disk.storage import make_filled
from hostdev.host.key_options import KeyRules
from hostdev.host.rows import TableRows
from hostdev.host.storage import RowFormat, RowIds
from hostdev.host.writes import WritableTable
from hostdev.kernels.arrays import Ids, Positions, Rows
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.shards import range_of

_AT_ONCE = 1 << 16  # rows that are rewritten at a time


class HostTable(WritableTable):
    """An embedding table in host memory: weights float32 [rows, dim], and optimizer state.

    Initial weights depend only on (seed, name, row, column). Memory: rows x (dim x (1 + S) + R) x 4 bytes, for S
    optimizer state columns and R values of per-row state. With dtype="bfloat16", a weight takes 2 bytes. A value of a
    state column takes 2 bytes with slots="bfloat16". With slots="8bit", it takes 1 byte, and each row and state column
    takes 4 more bytes for a scale (`kernels.eight_bits`). Reads return float32. Each update rounds new values of fewer
    than 32 bits stochastically to one of the two nearest values that can be stored, with a random number that depends
    only on (seed, name, step of the table, row, column, weight or state).

    With an optimizer that changes all rows in each step (`Adam`, or any with weight_decay), the steps that did not use
    a row are applied when the row is next read or updated. Reads return rows as they are after the last step, except
    `row_slots` and `columns`, which return rows as they are stored.

    Several threads may look up rows at once. While an update writes rows, no other thread may read or write these rows.

    While a `Runtime.train` loop is open, the loop's body may read and write the table. A read sees all steps so far. If
    the body reads after it has taken the step of its batch, the read ends the batch: the batch's rows accept no more
    gradients. A write takes effect from the next batch on. Access from another thread, or from the loader, `ids` or
    `send`, raises ValueError.

    Methods check their ids. For many methods there is a `*_tasks` method, which returns the same work as tasks, so that
    one `run_tasks` can serve several tables. `*_tasks` methods do not check their ids, which must be C-contiguous int32
    or int64, in [0, V).

    Args:
        rows: Number of rows, at least 1; or None for a table by key, whose ids are any 64-bit integers: a key gets a
            row when it is first used, or as `admit` says, and `evict` says when it loses its row.
        dim: Number of columns, at least 1.
        optimizer: LazyAdam, Adam, RowWiseAdam, FTRL, SGD, Momentum, Adagrad or RowWiseAdagrad.
        name: The table's name, used in error messages and to derive the initial values.
        seed: Seed of the initial values. None takes the seed given to `torch.manual_seed`, or 0 if there is none.
        init: The initial weights: Normal(std), Uniform(low, high), Constant(value), or an array [rows, dim]. The table
            keeps the array for `erase` and `reset`, so its values must not be changed. With dtype="bfloat16", initial
            weights are rounded like updates.
        part: (rank, ranks) to hold only the rows of this rank (`kernels.shards`), or None to hold all rows. With a
            part, ids are local row numbers, but rows and `init` are those of the whole table.
        dtype: How weights are stored: "fp32" or "bfloat16".
        slots: How the optimizer's state columns are stored: "fp32", "bfloat16" or "8bit". Per-row state is always
            float32. If dim is 1, "8bit" also stores state columns as float32, since a scale would take 4 bytes anyway.
        storage: None for memory; or a `Disk`, which has the rows that do not fit in its memory. Results are the same.
        capacity: For a table by key: the maximum number of keys with a row, or the memory for all keys, such as
            "24GiB". None for what the free memory allows. Memory is taken as keys come.
        admit: For a table by key: `MinCount`, `Probability`, or an `Admission` of your own; None to give each key a row
            at once.
        evict: For a table by key: `Unused`, `LeastRecent`, `LeastFrequent`, `SmallestNorm`, or an `Eviction` of your
            own; None to keep all keys.
        unknown: For a table by key, what keys without a row read: "shared", the out-of-vocabulary row of their feature,
            which is trained; "zeros"; or "initial", each its own initial values, untrained until the key has a row.

    Raises:
        UserError: The table does not fit in the available memory; raised before allocation.
        TypeError: `optimizer` is not a table optimizer.
    """

    primitive_target = "CPU"

    _keyed: "type[HostTable]"  # the class of tables by key

    def __init_subclass__(cls, *, by_key: bool = False, **_: Any) -> None:
        """Note the class of tables by key."""
        if by_key:
            HostTable._keyed = cls

    def __new__(cls, rows: int | None = 0, *_: Any, **__: Any) -> "HostTable":
        """Return a table by key if `rows` is None."""
        return super().__new__(HostTable._keyed if rows is None and cls is HostTable else cls)

    def __init__(
        self,
        rows: int | None,
        dim: int,
        optimizer: SparseOptimizer,
        *,
        name: str,
        seed: int | None = None,
        init: Initializer | npt.ArrayLike = Normal(0.01),
        part: tuple[int, int] | None = None,
        dtype: str = FP32,
        slots: str = FP32,
        storage: Disk | None = None,
        capacity: int | str | None = None,
        admit: Admission | None = None,
        evict: Eviction | None = None,
        unknown: str = "shared",
    ) -> None:
        rules = KeyRules(capacity, admit, evict, unknown)
        self._require_arguments(name, rows, dim, part, rules)
        require_optimizer(optimizer, name)
        dtypes = require_table_dtype(dtype, name), require_slots_dtype(slots, name, dim)
        initial = initial_seed(seed), self._make_initializer(init, rows, dim, name)
        how = RowFormat(name, dim, optimizer, *dtypes, *initial)
        self._begin_table(how, part, storage, by_key=isinstance(self, HostTable._keyed))
        self.may_train = part is not None
        self._make_rows(how, rows, rules)
        self.fetched_width = self.history.get_width(dim)

    @classmethod
    def _require_arguments(cls, name: str, rows: Any, dim: int, part: tuple[int, int] | None, rules: KeyRules) -> None:
        if rows is None:
            raise TypeError(f"table {name!r}: {cls.__name__} needs a number of rows; HostTable makes tables by key")
        if rules != KeyRules():
            raise ValueError(
                f"table {name!r}: capacity, admit, evict and unknown need a table by key: give None for rows"
            )
        require_size(rows, dim, name)
        if part is not None and not 0 <= part[0] < part[1]:
            raise ValueError(f"table {name!r}: part must be (rank, ranks) with a rank in 0..ranks - 1, not {part}")

    @staticmethod
    def _make_initializer(init: Any, rows: Any, dim: int, name: str) -> Initializer:
        return initializer(init, rows, dim, name)

    def _make_rows(self, form: RowFormat, rows: Any, rules: KeyRules) -> None:
        """Make the rows of a new table, with their initial values."""
        self.total_rows, self.capacity = rows, rows
        self.start, stop = (0, rows) if self.part is None else range_of(rows, *self.part)
        self.writes = int(isinstance(form.init, Given))  # an array of initial weights counts as a write
        ids = RowIds(self.start, rows, self.part is not None)
        self.stored = TableRows(form, ids, make_filled(form, stop - self.start, ids, self.disk))

    def erase(self, ids: npt.ArrayLike) -> None:
        """Reset weights and optimizer state of rows to their initial values; the table's step does not change.

        Args:
            ids: int32 or int64 [N], each in [0, V), duplicates allowed.

        Raises:
            UserError, TypeError, ValueError: As for `lookup`.
        """
        ids = np.unique(self._checked(ids))
        self._before_write()
        for part, block, row_slots in self.stored.format.initial(self.row_ids(ids)):
            self.history.stamp(row_slots)
            self.stored.write(ids[part], block, row_slots)
        self.storage.taint(self.stored.changes)
        self._after_write(ids)

    def apply(self, ids: npt.ArrayLike, grads: Rows) -> None:
        """Sum the gradients of each id in order of occurrence, then take one optimizer step on its row.

        A call counts as one step of the table even if N is 0.

        Args:
            ids: int32 or int64 [N], each in [0, V), duplicates allowed.
            grads: float32 [N, D].

        Raises:
            UserError: An id is outside the table, or this is one of several processes, and the table is not divided
                among them by `part` (see `hostdev.alone`).
            TypeError, ValueError: A dtype or shape is wrong, or a gradient or an id's sum of gradients is not finite or
                above `optimizer.largest_gradient`. In these cases, nothing is written.
        """
        self._require_alone()
        ids = self._checked(ids)
        grads = np.ascontiguousarray(grads)
        check_rows("grads", grads, (len(ids), self.dim), self.name)
        require_gradients(self.name, ids, grads, self.optimizer.largest_gradient, summed=False)
        self._before_write()
        self._apply(ids, grads)
        self._after_write(ids)

    def _apply(self, rows: Ids, grads: Rows) -> None:
        stored = self.stored
        with stored.storage.holding(rows):
            stored.note_write(rows)
            stored.storage.apply(rows, grads, self.begin_step())

    def update(
        self, ids: npt.ArrayLike, grads: Rows, step: TableStep | None = None, positions: Positions | None = None
    ) -> None:
        """Take one optimizer step on unique rows whose gradients are already summed.

        Args:
            ids: int32 or int64 [U], each in [0, V), **unique** (not checked).
            grads: float32 [U, D].
            step: If several calls make up one step, the result of `begin_step`; None to begin a new step.
            positions: int32 [U]: for each id, the row of `grads` that has its gradient. `grads` may then have more than
                U rows.

        Raises:
            UserError, TypeError, ValueError: As for `apply`.
        """
        self._require_alone()
        ids, grads = self._checked(ids), np.ascontiguousarray(grads)
        positions = checked_positions(positions, len(ids), len(grads), self.name)
        check_rows("grads", grads, (len(ids if positions is None else grads), self.dim), self.name)
        mine = grads if positions is None else grads[positions]
        require_gradients(self.name, ids, mine, self.optimizer.largest_gradient, summed=True)
        self._before_write()
        step = step or self.begin_step()
        for some, at in self.storage.held(ids, positions, read=True):
            run_tasks(self.update_tasks(some, grads, step, at))
        self._after_write(ids)

    def __getstate__(self) -> Mapping[str, Any]:
        """Return the state for a copy, which does not track changes; raise TypeError for a table on disk."""
        if self.capabilities.on_disk:
            raise TypeError(f"table {self.name!r} is on disk and cannot be copied; save a checkpoint and load it")
        stored = copy(self.stored)
        stored.changes = None
        return {**super().__getstate__(), "stored": stored}

    def reset(self) -> None:
        """Reset all rows to their initial values, and the step to 0.

        If a snapshot is in progress, this waits until it has ended. No other thread may use the table meanwhile.
        """
        self._before_write()
        self._forget_all()
        self.stored.history = self.history.renewed()
        self._step, self.stored.untouched = 0, True
        self._after_write(None)

    def forget_rows(self) -> None:
        """Give all rows their initial values, before a checkpoint's rows are loaded; see `reset`."""
        self._before_write()
        self._forget_all()
        self.stored.untouched = False
        self._after_write(None)

    def _forget_all(self) -> None:
        self.stored.forget_changes()
        self.storage.fill()

    def adopt(self, history: History, *, whole: bool) -> None:
        """Replace the table's step history with that of a checkpoint, before the checkpoint's rows are loaded.

        Args:
            history: The step history of the checkpoint, recorded with an equal optimizer.
            whole: Whether all rows will be loaded. If not, the steps that the table's rows have missed are applied to
                them first.
        """
        self._before_write()
        if not whole:
            for start in range(0, self.rows, _AT_ONCE):
                ids = np.arange(start, min(self.rows, start + _AT_ONCE))
                block, row_slots = self.stored.read(ids, self.capabilities.formats)
                row_slots[:, -1] = history.steps
                self.stored.write(ids, block, row_slots)
        self.stored.history = history
        self._after_write(None)


class ParameterServer:
    """Host tables by name: `pull` looks up rows of a table, and `push` applies gradients to them."""

    def __init__(self) -> None:
        self._tables: dict[str, HostTable] = {}

    def add(self, table: HostTable) -> HostTable:
        """Add a table under its name, and return the table; raise ValueError if there is already one of this name."""
        if table.name in self._tables:
            raise ValueError(f"there is already a table {table.name!r}; give one of the two tables another name")
        self._tables[table.name] = table
        return table

    def __getitem__(self, name: str) -> HostTable:
        """Return a table by name; raise UserError if there is none."""
        try:
            return self._tables[name]
        except KeyError:
            raise UserError(f"no table {name!r}; the tables are {sorted(self._tables)}") from None

    def __contains__(self, name: object) -> bool:
        """Return whether there is a table of this name."""
        return name in self._tables

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tables' names, in alphabetical order."""
        return iter(sorted(self._tables))

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._tables)

    def pull(self, name: str, ids: npt.ArrayLike) -> Rows:
        """Return rows, float32 [N, D], of the table `name`, as `HostTable.lookup` does."""
        return self[name].lookup(ids)

    def push(self, name: str, ids: npt.ArrayLike, grads: Rows) -> None:
        """Apply gradients, float32 [N, D], to rows of the table `name`, as `HostTable.apply` does; ids may repeat."""
        self[name].apply(ids, grads)
