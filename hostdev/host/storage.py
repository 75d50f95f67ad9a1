"""The storage of a table's rows, in host memory or on disk, as tables use it. Reads return float32.

Shapes: V rows; for each row, D weights, S columns of optimizer state with D values each, and R values of per-row state.
Methods take N ids, int32 or int64, which must be in [0, V); this is not checked.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.initializers import Initializer
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.rounding import initial_slots, plane_formats, rounding_key
from hostdev.core.table_dtypes import TableStep
from hostdev.kernels import catch_up
from hostdev.kernels.apply import apply_occurrences, apply_tasks
from hostdev.kernels.arrays import AnyIds, Keys, LongIds, Positions, Rows, Values, identity
from hostdev.kernels.bfloat16 import round_rows
from hostdev.kernels.bits import gather_rows
from hostdev.kernels.clock import Clock
from hostdev.kernels.lookup import lookup_tasks, store_tasks
from hostdev.kernels.norm import partial_squares
from hostdev.kernels.plane_formats import BFLOAT16
from hostdev.kernels.pool import Task
from hostdev.kernels.shards import get_ids_at, ids_of

COPIED_BYTES = 1 << 26  # bytes of rows that are copied at a time


class RowIds(NamedTuple):
    """The ids in the whole table, or the keys, of the rows that a process stores.

    Attributes:
        first: The position of the first of these rows among all `total` rows.
        total: Rows of the table over all ranks.
        is_part: Whether the rows are only one rank's part of the table (`kernels.shards`).
        keys: For a table by key, the key of each row, int64 [V]. Its memory is only reserved, and an entry is written
            when its row gets a key. None for other tables.
    """

    first: int
    total: int
    is_part: bool = False
    keys: Keys | None = None

    @classmethod
    def of_keys(cls, keys: Keys) -> "RowIds":
        """Return the ids of rows that have these keys [V]."""
        return cls(0, len(keys), keys=keys)

    def of(self, rows: AnyIds) -> AnyIds:
        """Return the ids or keys of rows [N]."""
        if self.keys is not None:
            return self.keys[rows]
        return ids_of(rows.astype(np.int64) + self.first, self.total) if self.is_part else rows

    def between(self, start: int, stop: int) -> LongIds:
        """Return the ids or keys of the rows [start, stop)."""
        if self.keys is not None:
            return self.keys[start:stop]
        if not self.is_part:
            return np.arange(start, stop)
        found: LongIds = get_ids_at(self.total, self.first + start, self.first + stop)
        return found


@dataclass(frozen=True, eq=False)
class RowFormat:
    """How the rows of a table are stored, and what they are initially.

    Args:
        name: The table's name.
        dim: D.
        optimizer: Defines the optimizer state.
        dtype: How weights are stored.
        slots_dtype: How state columns are stored.
        seed: Seed of the initial values, and of their rounding.
        init: The initializer of the weights.
    """

    name: str
    dim: int
    optimizer: SparseOptimizer
    dtype: str
    slots_dtype: str
    seed: int
    init: Initializer

    @cached_property
    def slots(self) -> Values:
        """The initial values of the state columns, float32 [S]."""
        found: Values = initial_slots(self.optimizer, self.slots_dtype)
        return found

    @cached_property
    def row_slots(self) -> Values:
        """The initial per-row state, float32 [R]."""
        return np.array(list(self.optimizer.row_slots.values()), np.float32)

    @cached_property
    def planes(self) -> tuple[int, ...] | None:
        """The format of each plane, the weights first; None if all are float32."""
        return plane_formats(self.dtype, self.slots_dtype, self.optimizer)

    def initial(self, ids: AnyIds) -> Iterator[tuple[slice, Rows, Rows]]:
        """Yield the initial values of rows with these ids or keys [N], part by part.

        For each part: the slice of the ids, block [n, 1 + S, D], and row_slots [n, R].
        """
        step = max(1, COPIED_BYTES // (4 * (1 + len(self.slots)) * self.dim))
        for start in range(0, len(ids), step):
            part = ids[start : start + step].astype(np.int64, copy=False)
            block = np.empty((len(part), 1 + len(self.slots), self.dim), np.float32)
            is_rounded = self.planes is not None and self.planes[0] == BFLOAT16
            fill_initial(block, part, self.init, self.seed, self.name, self.slots, is_rounded=is_rounded)
            yield slice(start, start + step), block, np.tile(self.row_slots, (len(part), 1))


def fill_initial(
    block: Rows, ids: AnyIds, init: Initializer, seed: int, name: str, slots: Values, *, is_rounded: bool
) -> None:
    """Write the initial values of ids or keys [N] to block [N, 1 + S, D]; `is_rounded`: round weights to bfloat16."""
    init.fill(block, seed, name, slots, ids=ids)
    if is_rounded:
        round_rows(block, identity(len(ids)), ids, rounding_key(seed, name, 0), (BFLOAT16,))


class Storage:
    """Base class of the storage of rows, with defaults for memory. Arguments mean the same as in `HostTable` methods.

    Methods that take ids need the rows of these ids in memory. For a table on disk, `sources` yields storages in memory
    from which rows can be read. Rows can be written while `held` or `holding` keeps them in memory, or while the
    pipeline has pinned them.
    """

    row_slots: Rows  # per-row state, [V, R]
    format: RowFormat
    window = 0  # number of batches that loops read ahead, to know which rows to keep in memory

    @property
    def _stored(self) -> tuple[Any, ...]:
        """All arrays of rows, each [V, ...]."""
        raise NotImplementedError

    @property
    def _weights(self) -> Any:
        """The stored weights, in the first plane of [V, any, D]."""
        raise NotImplementedError

    def _rows_at(self, key: int) -> Any:
        """Return the rows for the optimizers' kernels; `key` is the key of the random numbers for rounding."""
        raise NotImplementedError

    @property
    def planes(self) -> list[Any]:
        """The arrays of rows, each [V, ...], that have at least one byte per row."""
        return [values for values in self._stored if values[:1].nbytes]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a block of all rows: V, 1 + S, D."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns: the weights, state columns, and per-row state."""
        optimizer = self.format.optimizer
        return "weights", *optimizer.slots, *optimizer.row_slots

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""
        return sum(values.nbytes for values in self._stored)

    def fill(self) -> None:
        """Write the initial values of all rows."""
        raise NotImplementedError

    def plane(self, number: int) -> Any:
        """Return the weights (number 0) or state column `number - 1`; indexing by slices or row ids yields float32."""
        raise NotImplementedError

    def column(self, number: int) -> Any:
        """Return the result of `plane`; for numbers from 1 + S on, a column of per-row state, [V, 1]."""
        at = number - self.shape[1]
        return self.plane(number) if at < 0 else self.row_slots[:, at : at + 1]

    def lookup_tasks(
        self, ids: AnyIds, out: Rows, positions: Positions | None, clock: Clock | None = None
    ) -> list[Task]:
        """Return tasks that copy weights to out [N, D]; with a clock, copies include the steps that rows missed."""
        if clock is None:
            return lookup_tasks(self._weights, ids, out, positions)
        return catch_up.look_up_tasks(self._rows_at(0), self.row_slots, ids, clock, out, positions)

    def fetch_tasks(self, ids: AnyIds, out: Rows, positions: Positions | None, planes: int) -> list[Task]:
        """Return tasks that copy weights to out; if `planes` is not 0, packed rows (`kernels.catch_up.pack_tasks`)."""
        if not planes:
            return lookup_tasks(self._weights, ids, out, positions)
        return catch_up.pack_tasks(self._rows_at(0), self.row_slots, ids, out, positions, planes)

    def read_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that copy rows to block [N, 1 + S, D] and row_slots [N, R]; here only those for row_slots."""
        held = self.row_slots
        return lookup_tasks(held[:, None], ids, row_slots, positions) if held.shape[1] else []

    def write_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """Return tasks that overwrite rows with values that `require_exact` accepts; here only those for row_slots."""
        return store_tasks(self.row_slots, ids, row_slots, positions) if self.row_slots.shape[1] else []

    def require_exact(self, plane: int, values: Rows) -> None:
        """Raise ValueError unless values [N, D] of a plane (0: weights) can be stored exactly, as all can here."""

    def update_tasks(self, ids: AnyIds, grads: Rows, step: TableStep, positions: Positions | None) -> list[Task]:
        """Return tasks that take an optimizer step on unique rows."""
        table = self.format.optimizer.primitive, self._rows_at(step.key), self.row_slots
        return apply_tasks(*table, ids, grads, step.scalars, positions, step.clip, step.clock)

    def apply(self, ids: AnyIds, grads: Rows, step: TableStep) -> None:
        """Sum the gradients of each id, and take an optimizer step on its row."""
        table = self.format.optimizer.primitive, self._rows_at(step.key), self.row_slots
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
        """Yield for each part of the ids: a storage with its rows in memory, their numbers in it, and `positions`."""
        yield self, ids, positions

    def held(
        self, ids: AnyIds, positions: Positions | None = None, *, read: bool = False
    ) -> Iterator[tuple[AnyIds, Positions | None]]:
        """Yield distinct ids, with `positions`, part by part; a part's rows are in memory until the next part.

        Unless `read` is True, the rows' values are undefined, so the caller must write all of them.
        """
        yield ids, positions

    def holding(self, ids: AnyIds) -> AbstractContextManager[None]:
        """Return a context in which the rows of all ids, which may repeat, are in memory."""
        return nullcontext()

    # Any, in the methods below: the table's `host.rows.Changes`, or None if it does not track changes

    def forget(self, ids: AnyIds, changes: Any) -> None:
        """Free the memory and the disk space of unused rows of a table on disk; without effect on other tables."""

    def taint(self, changes: Any = None) -> None:
        """Record that checkpoints must not hold the records that are on disk now, since some are of erased rows."""

    def close(self, changes: Any = None) -> None:
        """Remove the files of a table on disk, whose rows are then lost; without effect on other tables."""


def taken(values: Rows, ids: AnyIds) -> Rows:
    """Return values[ids], where `values` is float32 [any, ...], without holding the GIL."""
    out = np.empty((len(ids), *values.shape[1:]), np.float32)
    if out.size:
        width = out.size // len(ids)
        gather_rows(values.reshape(len(values), width), ids, out.reshape(len(ids), width))
    return out


class ReadColumn:
    """A column of V rows, float32 [V, width], whose values are computed when a slice or row ids index it.

    Args:
        rows: V.
        width: Number of values of a row.
        get: Called with a slice or row ids [N]; returns the values, float32 [N, width].
    """

    def __init__(self, rows: int, width: int, get: Callable[[Any], Rows]) -> None:
        self.shape, self._get = (rows, width), get

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Rows:
        return self._get(rows)
