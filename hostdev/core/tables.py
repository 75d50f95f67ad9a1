"""Common parts of host and device tables: steps, seed, the loops that use them, and writable copies of their columns.

`Capabilities` are the only questions that code outside of a table asks about its kind.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hostdev.core.history import History, NoHistory
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.rounding import rounding_key
from hostdev.core.table_dtypes import Rounding, TableStep
from hostdev.kernels.clock import Clock


class Capabilities(NamedTuple):
    """The properties of a table that decide how other code uses it."""

    by_key: bool = False  # ids are keys, any integers of 64 bits, which get rows and lose them
    on_disk: bool = False  # rows may be on disk: tasks need rows that are pinned in memory
    late: bool = False  # rows miss steps that do not use them; the next read or update applies the missed steps
    formats: tuple[int, ...] | None = None  # how each plane of a row is stored; None if all are float32
    ranks: int = 1  # number of ranks that each have a part of the rows

    @property
    def in_place(self) -> bool:
        """Whether the rows' own memory has their current values, in float32."""
        return not (self.on_disk or self.late or self.formats)


class Owner(Protocol):
    """An open loop that uses a table; it may have unfinished steps, cached rows, and prefetched rows."""

    def before_read(self, table: Any) -> None:
        """Apply all steps so far to the table; raise ValueError if it cannot be read now."""

    def before_write(self, table: Any) -> None:
        """Apply all steps so far to the table; raise ValueError if it cannot be written now."""

    def before_rekey(self, table: Any) -> None:
        """After `before_write`, undo the plans of later batches for a table by key; raise ValueError within a step.

        With other ranks, all must make this call in the same step.
        """

    def after_write(self, table: Any, ids: Any) -> None:
        """Refresh prefetched copies of written rows: the local rows `ids`, int32 or int64 [N], or all rows if None."""


class Owned:
    """Base class of tables; it notifies the open loops that use a table when the table is read or written.

    Public methods call `_before_read`, or `_before_write` and `_after_write`. A loop's own threads use other methods,
    which notify no loop.
    """

    name: str
    seed: int
    optimizer: SparseOptimizer
    dtype: str  # of stored weights: "fp32" or "bf16"
    slots_dtype: str  # of stored optimizer state: "fp32", "bf16" or "8bit"
    capabilities: Capabilities
    history: NoHistory | History  # the steps so far, if they also change unused rows; see `kernels.catch_up`
    fetched_width: int  # number of values that a loop fetches for each row
    total_rows: int  # number of rows over all ranks
    capacity: int  # the most rows that the table can have over all ranks
    part: tuple[int, int] | None = None  # (rank, ranks) if this rank has only a part of the rows
    stored: Any = None  # the rows of a host table, `host.rows.TableRows`
    key_rows: Any = None  # the keys of a table by key, `host.table_keys.TableKeys`
    window = 0  # number of batches that a table on disk looks ahead
    erased = 0  # a checksum of the keys that were given to `erase`, which ranks compare
    has_default_capacity = False  # whether no capacity was given, so that ranks use the smallest of their defaults
    _owners: tuple[Owner, ...] = ()
    _step = 0
    _is_writing = False  # whether a `with table.writing()` block is open
    writes = 0  # number of writes by the program, such as a restore; a loop's updates are not counted

    @property
    def step(self) -> int:
        """Number of optimizer steps so far; may be set to 0 or more, for example to match moments from elsewhere.

        With `Adam`, set it before training: a later change is exact only for rows that were written or used in the
        previous step, and approximate for the movement of all other rows by their moments.

        In the body of a loop over `Runtime.train`, the step of the current batch is counted when the loop continues, or
        when a table is read or written before that.
        """
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int | np.integer):
            raise TypeError(f"table {self.name!r}: step, the number of steps, must be an integer, not {step!r}")
        if step < 0:
            raise ValueError(f"table {self.name!r}: step, the number of steps, must be 0 or more, not {step}")
        self._before_read()  # a pending step counts from the previous number
        self._step = int(step)

    @property
    def rows(self) -> int:
        """Number of rows on this rank, V."""
        raise NotImplementedError

    @property
    def dim(self) -> int:
        """Number of columns, D."""
        raise NotImplementedError

    @property
    def most_rows(self) -> int:
        """The most rows that this rank can have; for a table by key on several ranks, an approximate number."""
        return self.rows

    def describe_size(self) -> Mapping[str, Any]:  # Any: numbers and texts
        """Return, by name, the properties that determine which rows the table has; they must be equal on all ranks."""
        return {"the number of rows": self.total_rows}

    def begin_load(self) -> None:
        """Prepare for all rows of a checkpoint: a table by key forgets its own keys."""

    def rows_at(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:  # Any: integers of 32 or 64 bits
        """Return the row numbers at positions [N] among the `rows` rows in use; for a table by id, the positions."""
        return positions

    def find_ids(self, ids: Any, unknown: Any) -> tuple[Any, Any]:  # Any: each kind of table has its own types
        """Return the local row numbers of ids [N] and the keeper of temporary rows; for a table by id, ids and None.

        For a table by key, `unknown` has for each feature in order its number of ids and the names of its
        out-of-vocabulary rows. The second value keeps the temporary rows until it is deleted, or is None.
        """
        del unknown
        return ids, None

    def begin_step(self) -> TableStep:
        """Count one step, and return the arguments that all its updates share."""
        self._require_no_writing()
        step, optimizer, dim = self._step + 1, self.optimizer, self.dim
        formats = self.capabilities.formats
        rounding = None if formats is None else Rounding(rounding_key(self.seed, self.name, step), formats)
        clock = self.history.record(optimizer.lr, step, self.name)
        self._step = step
        return TableStep(optimizer.scalars(step, dim), rounding, optimizer.clip_limit(dim), clock)

    def clock(self) -> Clock | None:
        """Return the step history, to apply steps that rows have missed; None if a step changes only a batch's rows."""
        return self.history.clock()

    def uncount_steps(self, steps: int) -> None:
        """Subtract steps that were counted but whose updates failed."""
        self._step = max(0, self._step - steps)
        self.history.forget(steps)

    def add_owner(self, owner: Owner) -> None:
        """Notify `owner` of reads and writes from now on."""
        self._owners = (*self._owners, owner)

    def remove_owner(self, owner: Owner) -> None:
        """Undo `add_owner`."""
        self._owners = tuple(one for one in self._owners if one is not owner)

    def _before_read(self) -> None:
        for owner in self._owners:
            owner.before_read(self)

    def _require_no_writing(self) -> None:
        if self._is_writing:
            raise ValueError(
                f"table {self.name!r}: a `with table.writing()` block is open; end the block first, or change the "
                "copies that it yields"
            )

    def _before_write(self) -> None:
        self._require_no_writing()
        for owner in self._owners:
            owner.before_write(self)
        self.writes += 1

    def _after_write(self, ids: Any) -> None:
        for owner in self._owners:
            owner.after_write(self, ids)

    def __getstate__(self) -> Mapping[str, Any]:
        """Return the state for a copy of the table that has all current rows and belongs to no loop."""
        self._before_read()
        return self.__dict__ | {"_owners": (), "_is_writing": False}


def initial_seed(seed: int | None) -> int:
    """Return a table's seed: `seed` if given, else the seed set with `torch.manual_seed`, else 0.

    If torch was not seeded, its own seed is random and is not used.
    """
    if seed is not None:
        return seed
    torch: Any = sys.modules.get("torch")
    found = int(torch.initial_seed()) if hasattr(torch, "initial_seed") else 0
    return found if _was_set(torch, found) else 0


def _was_set(torch: Any, seed: int) -> bool:
    """Return whether the program has set torch's seed; if not, torch has chosen a random seed of 64 bits."""
    if seed < 1 << 32:
        return True
    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)  # holds the call until CUDA is initialized
    if getattr(tracker, "manual_seed_all_cb", None) is not None:
        return True
    return bool(torch.cuda.is_initialized()) and int(torch.cuda.initial_seed()) == seed


class Slots(Mapping[str, Any]):
    """Writable copies of the slots by name, each made on first access; `slots[name] = values` overwrites a slot."""

    def __init__(self, copies: "ColumnCopies") -> None:
        self._copies = copies

    def __getitem__(self, name: str) -> Any:
        if name not in self._copies.names[1:]:
            names = ", ".join(self._copies.names[1:]) or "none"
            raise KeyError(f"table {self._copies.table!r}: no slot {name!r}; available slots: {names}")
        return self._copies.column(name)

    def __setitem__(self, name: str, values: Any) -> None:
        self[name][...] = values

    def __iter__(self) -> Iterator[str]:
        return iter(self._copies.names[1:])

    def __len__(self) -> int:
        return len(self._copies.names) - 1


class ColumnCopies:
    """Writable copies of a table's columns, each made on first access and usable until the `with` block ends.

    Args:
        table: The table's name, for messages.
        names: Names of the columns: the weights, then the slots.
    """

    def __init__(self, table: str, names: Iterable[str]) -> None:
        self.table, self.names = table, list(names)
        self._held: dict[str, Any] = {}
        self._is_over = False

    def _copied(self, name: str) -> Any:
        raise NotImplementedError

    @property
    def weights(self) -> Any:
        """The writable weights, float32: [V, D] for all rows or [N, D] for N rows."""
        return self.column("weights")

    @weights.setter
    def weights(self, values: Any) -> None:
        self.column("weights")[...] = values  # `w.weights *= 2` also calls this setter

    @property
    def slots(self) -> Slots:
        """The writable slots by name, shaped like the weights; a slot of one value per row has one column."""
        return Slots(self)

    def column(self, name: str) -> Any:
        """Return the copy of a column; raise ValueError after the end of the `with` block."""
        if self._is_over:
            raise ValueError(
                f"table {self.table!r}: the `with table.writing()` block has ended; use its copies only in the block"
            )
        if name not in self._held:
            self._held[name] = self._copied(name)
        return self._held[name]

    def end(self) -> None:
        """Refuse further access to the copies."""
        self._is_over = True
