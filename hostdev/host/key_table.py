"""A table by key: rows for any 64-bit keys, which get a row when they are admitted and lose it when they are evicted.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import check_rows, checked_positions, require_gradients, to_keys
from hostdev.core.errors import UserError
from hostdev.core.history import History
from hostdev.core.initializers import Initializer
from hostdev.core.keys import INITIAL, ZEROS
from hostdev.core.memory import TableShape
from hostdev.core.table_dtypes import TableStep
from hostdev.host.disk.storage import make_storage
from hostdev.host.key_index import KeyIndex
from hostdev.host.key_options import (
    KEY_BYTES,
    KeyRules,
    get_capacity,
    require_addresses,
    require_initializer,
    require_policies,
    require_row_memory,
)
from hostdev.host.key_plan import EvictionReports, GuestRows, KeyCount
from hostdev.host.key_steps import SteppedKeys
from hostdev.host.storage import RowIds
from hostdev.kernels.arrays import Ids, Keys, Positions, Rows
from hostdev.kernels.key_directory import EMPTY, PARTS
from hostdev.kernels.unique import count_occurrences, unique

_INDEX_ADDRESSES = 16  # of each row: its key, last step and uses
_LOCATION_BYTES = 8  # at most, for each key of a table on disk, to know where its row is


class KeyedTable(SteppedKeys):
    """The construction of a table by key, and the methods that programs call with keys; see `host.table.KeyTable`."""

    def _require_arguments(self, rows: Any, dim: int, name: str, part: tuple[int, int] | None, rules: KeyRules) -> None:
        if dim < 1:
            raise ValueError(f"table {name!r} needs at least one column, not {dim}")
        if part is not None and not 0 <= part[0] < part[1] <= PARTS:
            raise UserError(f"table {name!r}: a table by key has {PARTS} parts, so part {part} does not exist")
        require_policies(name, rules)

    def _make_initializer(self, init: Any, rows: Any, dim: int, name: str) -> Initializer:
        return require_initializer(init, dim, name)

    def _make_rows(self, rows: Any, rules: KeyRules) -> None:
        capacity, self.admit, self.evict, self.unknown = rules
        shape = TableShape(self.dim, self.optimizer, self.dtype, self.slots_dtype)
        self.start, self.row_bytes = 0, KEY_BYTES + (_LOCATION_BYTES if self.disk else shape.nbytes(1))
        self.capacity = get_capacity(self.name, capacity, self.row_bytes, self.capabilities.ranks)
        self.has_default_capacity = capacity is None
        self._lock = threading.RLock()  # held while the index is read or changed
        self._noting = threading.Lock()  # held while rows are recorded as changed
        self._reports = EvictionReports()
        self._guests: GuestRows | None = None  # of the last read
        self.key_counts: list[KeyCount] | None = None  # of finished steps, if a list is given
        self.erased = 0  # a checksum of all keys that were given to `erase`, which ranks compare
        self._begin()

    def limit(self, capacity: int) -> None:
        """Lower the capacity to that of other ranks."""
        self.capacity = self.index.capacity = min(self.capacity, capacity)

    def _begin(self) -> None:
        """Begin without keys, in new memory."""
        address_bytes = self.row_bytes - KEY_BYTES + _INDEX_ADDRESSES  # of each row
        with require_addresses(self.name, self.capacity, address_bytes, self.unknown):
            self._reserve()
        self._unknown: dict[str, int] = {}  # rows for keys without a row, by name
        self._first_step = 0  # the table's step count when the index was at step 0
        self.untouched = True
        self.unknown_row()

    def _reserve(self) -> None:
        """Make the index and the storage; raise MemoryError if the system refuses addresses for them."""
        require_memory = partial(require_row_memory, self.name, self.row_bytes)
        self.index = KeyIndex(
            self.name,
            self.capacity,
            self.admit,
            self.evict,
            seed=self.row_format.seed,
            unknown=self.unknown,
            part=self.part,
            require_memory=require_memory,
        )
        self._rows = self.total_rows = self.index.row_space
        self.row_index = RowIds.of_keys(self.index.keys)
        self.storage = make_storage(self.row_format, self._rows, self.row_index, self.disk)

    @property
    def rows(self) -> int:
        """Number of keys that have a row."""
        with self._lock:
            return self.index.committed_size

    def __len__(self) -> int:
        """Return the number of keys that have a row."""
        self._before_read()
        return self.rows

    @property
    def keys(self) -> Keys:
        """The keys that have a row, int64 [K], in the order of their hashes, which depends on nothing else."""
        self._before_read()
        return self.committed().keys

    @property
    def used_rows(self) -> int:
        """One more than the largest row number that the table has used."""
        return self.index.rows

    @property
    def most_rows(self) -> int:
        """See `Owned`."""
        return -(-self.capacity // self.capabilities.ranks)

    def describe_size(self) -> Mapping[str, Any]:  # Any: numbers and texts
        """See `Owned`."""
        rules = {"admit": repr(self.admit), "evict": repr(self.evict), "unknown": self.unknown}
        return {"capacity": self.capacity, **rules, "the number of the keys' steps": self.index.step}

    def begin_load(self) -> None:
        """See `Owned`."""
        if not self.untouched:
            self.reset()

    def rows_at(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:  # Any: integers of 32 or 64 bits
        """Return the rows of the keys at positions [N] in the order of `keys`."""
        rows: npt.NDArray[np.int32] = self.committed().rows[positions]
        return rows

    def find_ids(self, ids: Ids, unknown: Sequence[tuple[int, Sequence[str]]]) -> tuple[Ids, GuestRows | None]:
        """See `Owned.find_ids`; rows of keys without a row are those of the names, which are used in turn."""
        distinct: Any
        distinct, inverse = unique(ids)
        rows, guests = self.find_or_guest(distinct)
        own = [np.array([self.unknown_row(name) for name in names], np.int32) for _, names in unknown]
        others = np.concatenate([np.resize(rows, count) for rows, (count, _) in zip(own, unknown, strict=True)])
        rows = rows[inverse]
        return np.where(rows == EMPTY, others, rows), guests

    def erase(self, ids: npt.ArrayLike) -> None:
        """Forget keys with their rows, optimizer state, and counts of uses; keys that are unknown have no effect.

        With other ranks, all must call this with the same keys; each forgets its own.

        Args:
            ids: Keys, integers of 64 bits [N], duplicates allowed.

        Raises:
            TypeError, ValueError: The keys are not integers, or a loop over the table has a batch without its step.
        """
        keys = self._require_keys(ids, own=False)
        with self._rekeying():
            self.erased = zlib.crc32(np.ascontiguousarray(keys).data, self.erased)
            mine = keys[self.owns(keys)]
            rows = self.index.erase(mine)
            self._write_zeros(rows)
            self._forget(rows)
            if len(mine):  # also for keys whose rows were evicted
                self.storage.taint()
            self.index.keys[rows] = 0
            self.index.release(rows)
            if self.changes is not None:  # earlier checkpoints have the keys, so the next one cannot build on them
                self.changes.await_end()
                self.note_changes(anew=True)

    def write_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Overwrite rows and their state, as `HostTable.write_rows` does; keys without a row get one."""
        keys = self._require_keys(ids)
        positions = checked_positions(positions, len(keys), len(block), self.name)
        self._check_values(keys, block, row_slots, positions)
        if len(np.unique(keys)) < len(keys):
            raise ValueError(f"table {self.name!r}: the keys of write_rows() must be all different")
        with self._rekeying():
            rows = self._add(keys, np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint32))
            self.write_now(rows, block, row_slots, positions)
        self._after_write(rows)

    def apply(self, ids: npt.ArrayLike, grads: Rows) -> None:
        """Take one step with the gradients of each key, as `HostTable.apply` does, with admission and eviction."""
        self._require_alone()
        if self.part is not None:
            raise UserError(f"table {self.name!r}: its keys are divided among ranks, which a Runtime must train")
        keys, grads = self._require_keys(ids), np.ascontiguousarray(grads)
        check_rows("grads", grads, (len(keys), self.dim), self.name)
        require_gradients(self.name, keys, grads, self.optimizer.largest_gradient, summed=False)
        distinct: Any
        distinct, inverse = unique(keys)
        with self._rekeying(), self._one_step(distinct, count_occurrences(inverse, len(distinct))) as rows:
            rows = rows[inverse]
            with self.storage.holding(rows):
                self._note_write(rows)
                self.storage.apply(rows, grads, self.begin_step())
        self._after_write(rows)
        self.report_evictions()

    def update(
        self, ids: npt.ArrayLike, grads: Rows, step: TableStep | None = None, positions: Positions | None = None
    ) -> None:
        """Take one step on distinct keys with their summed gradients; as `HostTable.update`, but always a whole step.

        Raises:
            UserError, TypeError, ValueError: As for `apply`; or `step` is given, or a key repeats or has no row.
        """
        if step is not None:
            raise ValueError(f"table {self.name!r}: a step of a table by key is one call; leave out step")
        keys, grads = self._require_keys(ids), np.ascontiguousarray(grads)
        positions = checked_positions(positions, len(keys), len(grads), self.name)
        if positions is not None:
            check_rows("grads", grads, (len(grads), self.dim), self.name)
            grads = grads[positions]
        if len(np.unique(keys)) < len(keys):
            raise ValueError(f"table {self.name!r}: the keys of update() must be all different; use apply()")
        self.apply(keys, grads)

    @contextmanager
    def _one_step(self, keys: Keys, uses: npt.NDArray[np.int32]) -> Iterator[Positions]:
        """Plan a step for a `with` block that takes it; yield the keys' rows."""
        planned = self.plan(keys, uses, may_read=True)
        try:
            unknown = planned.guests[0] if self.unknown == ZEROS else self.unknown_row()
            yield np.where(planned.rows == EMPTY, np.int32(unknown), planned.rows)
        except BaseException:
            self.rollback()
            raise
        evicted, guests = self.commit()
        self.retire(evicted)
        self.release(guests)

    def _to_edit(self, ids: npt.ArrayLike | None) -> Ids:
        self._before_write()
        if ids is None:
            return self.committed().rows
        keys = self._require_keys(ids)
        rows = self.find_rows(keys)
        if (rows == EMPTY).any():
            key = keys[np.flatnonzero(rows == EMPTY)[0]]
            raise UserError(f"table {self.name!r} has no row for key {key}, so it cannot be edited; use write_rows()")
        return rows

    def reset(self) -> None:
        """Forget all keys, and set the step to 0, as in a new table."""
        with self._rekeying():
            if self.changes is not None:
                self.changes.await_end()
            names = list(self._unknown)
            self.storage.close()
            self._begin()
            for name in names:
                self.unknown_row(name)
            if self.changes is not None:
                self.note_changes(anew=True)
            self.history = self.history.renewed()
            self._step = 0
        self._after_write(None)

    def adopt(self, history: History, *, whole: bool) -> None:
        """See `HostTable.adopt`."""
        del whole  # all rows of a table by key are loaded
        self._before_write()
        self.history = history

    def __getstate__(self) -> NoReturn:
        """Raise TypeError: only address space is reserved for most rows."""
        raise TypeError(f"table {self.name!r} is a table by key, which cannot be copied; save a checkpoint and load it")

    def _checked(self, ids: npt.ArrayLike) -> Ids:
        """Return the rows of keys after all steps so far; the out-of-vocabulary row for a key without a row."""
        keys = self._require_keys(ids)
        self._before_read()
        if self.unknown == INITIAL:
            distinct: Any
            distinct, inverse = unique(keys)
            rows, self._guests = self.find_or_guest(distinct)  # until the next call
            return rows[inverse]
        rows = self.find_rows(keys)
        if not self.is_first and (rows == EMPTY).any():
            raise UserError(
                f"table {self.name!r}: key {keys[rows == EMPTY][0]} has no row, and only rank 0 has the one that such "
                "keys use; use lookup() of the runtime"
            )
        rows[rows == EMPTY] = self.unknown_row()
        return rows

    def _require_keys(self, ids: npt.ArrayLike, *, own: bool = True) -> Keys:
        keys = to_keys(ids, f"table {self.name!r}: keys")
        if keys.ndim != 1:
            raise ValueError(f"table {self.name!r}: keys must have the shape [N], not {list(keys.shape)}")
        if own and not (mine := self.owns(keys)).all():
            raise UserError(
                f"table {self.name!r}: key {keys[~mine][0]} belongs to another rank; select keys by the table's "
                "owns(), or use lookup() of the runtime"
            )
        return keys

    def _note_write(self, ids: Ids) -> None:
        with self._noting:  # the rows of new keys are filled in another thread than updates
            super()._note_write(ids)
