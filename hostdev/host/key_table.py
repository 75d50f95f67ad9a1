"""A table by key: rows for any 64-bit keys, which get a row when they are admitted and lose it when they are evicted.

It is a table whose ids are keys (`host.table_keys`); checkpoints read and load its columns in the order of the keys'
hashes.

S and R: number of optimizer state columns with D values per row, and with one value per row.
"""

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import check_rows, checked_positions, require_gradients, to_keys
from hostdev.core.errors import UserError
from hostdev.core.history import History
from hostdev.core.initializers import Initializer
from hostdev.core.keys import INITIAL, ZEROS, KeyArrays, KeyColumns
from hostdev.core.memory import TableShape
from hostdev.core.table_dtypes import TableStep
from hostdev.host.committed_keys import KeySnapshot
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
from hostdev.host.key_plan import GuestRows
from hostdev.host.rows import TableRows
from hostdev.host.snapshot import Budget, Copies
from hostdev.host.storage import ReadColumn, RowFormat, RowIds, Storage
from hostdev.host.table import HostTable
from hostdev.host.table_keys import TableKeys
from hostdev.kernels.arrays import Ids, Keys, Positions, Rows
from hostdev.kernels.key_directory import EMPTY, PARTS
from hostdev.kernels.norm import partial_squares
from hostdev.kernels.unique import count_occurrences, unique

_INDEX_ADDRESSES = 16  # bytes of addresses for each row: its key, last step and uses
_LOCATION_BYTES = 8  # for a table on disk: upper limit of the bytes per key that record where its row is


class KeyTable(HostTable, by_key=True):
    """A `HostTable` whose ids are keys; `HostTable(None, ...)` creates it.

    Public methods take keys. Methods that return tasks, and the pipeline, take row numbers, which are private: a key's
    row depends on which rows were free.

    Args:
        rows: None.
        dim: As for `HostTable`, like `optimizer`, `name`, `seed`, `dtype` and `slots`.
        optimizer: See `dim`.
        name: See `dim`.
        seed: See `dim`; it also seeds `Probability`.
        init: The initial weights: Normal, Uniform or Constant.
        part: None for a table with all keys; or (rank, ranks), at most 256 ranks, for the keys that a rank owns, see
            `owns`. Methods then take and return this rank's keys only.
        dtype: See `dim`.
        slots: See `dim`.
        storage: See `dim`; keys take memory in addition to that of a `Disk`.
        capacity: Maximum number of keys with a row, or the memory for all keys, such as "24GiB"; None for what the free
            memory allows. With `part`, this is the capacity of all ranks together.
        admit: When a key gets a row; None for at once.
        evict: When a key loses its row; None for never.
        unknown: What keys without a row read: "shared", the out-of-vocabulary row of their feature, which is trained;
            "zeros"; or "initial", each its own initial values, which are not trained before the key has a row.

    Raises:
        UserError: `capacity` exceeds the available memory, or `part` does not exist.
        TypeError, ValueError: An argument is wrong, or two contradict each other.
    """

    key_rows: TableKeys

    @classmethod
    def _require_arguments(cls, name: str, rows: Any, dim: int, part: tuple[int, int] | None, rules: KeyRules) -> None:
        if dim < 1:
            raise ValueError(f"table {name!r} needs at least one column, not {dim}")
        if part is not None and not 0 <= part[0] < part[1] <= PARTS:
            raise UserError(f"table {name!r}: a table by key has {PARTS} parts, so part {part} does not exist")
        require_policies(name, rules)

    @staticmethod
    def _make_initializer(init: Any, rows: Any, dim: int, name: str) -> Initializer:
        return require_initializer(init, dim, name)

    def _make_rows(self, form: RowFormat, rows: Any, rules: KeyRules) -> None:
        capacity, self.admit, self.evict, self.unknown = rules
        shape = TableShape(form.dim, self.optimizer, self.dtype, self.slots_dtype)
        self.start, self.row_bytes = 0, KEY_BYTES + (_LOCATION_BYTES if self.disk else shape.nbytes(1))
        self.capacity = get_capacity(self.name, capacity, self.row_bytes, self.capabilities.ranks)
        self.has_default_capacity = capacity is None
        self._guests: GuestRows | None = None  # keeps the temporary rows of the last read
        index, ids, storage = self._reserve(form)
        self.stored = TableRows(form, ids, storage)
        self.stored.noting = threading.Lock()  # rows of new keys are filled in another thread than updates
        self.total_rows = index.row_space
        self.key_rows = TableKeys(self.stored, index, self.unknown, self.part)

    def _reserve(self, form: RowFormat) -> tuple[KeyIndex, RowIds, Storage]:
        """Return an index without keys, the keys of its rows, and storage for them, in new memory."""
        address_bytes = self.row_bytes - KEY_BYTES + _INDEX_ADDRESSES  # for each row
        rules, seed = (self.name, self.capacity, self.admit, self.evict), form.seed
        require_memory = partial(require_row_memory, self.name, self.row_bytes)
        with require_addresses(self.name, self.capacity, address_bytes, self.unknown):
            how = {"seed": seed, "unknown": self.unknown, "part": self.part}
            index = KeyIndex(*rules, **how, require_memory=require_memory)
            ids = RowIds.of_keys(index.keys)
            return index, ids, make_storage(form, index.row_space, ids, self.disk)

    def limit(self, capacity: int) -> None:
        """Lower the capacity to at most `capacity`, the least of all ranks."""
        self.capacity = self.key_rows.index.capacity = min(self.capacity, capacity)

    @contextmanager
    def _rekeying(self) -> Iterator[None]:
        """Undo the steps that open loops have planned ahead, and lock the keys for a `with` block that changes keys.

        Raises ValueError if a loop has a batch without its step.
        """
        self._before_write()
        for owner in self._owners:
            owner.before_rekey(self)
        with self.key_rows.lock:
            if self.key_rows.index.unfinished:
                raise ValueError(
                    f"table {self.name!r}: a loop has a batch without its step; change keys after the batch's step, "
                    "or between loops"
                )
            self.stored.untouched = False
            yield

    @property
    def rows(self) -> int:
        """Number of keys that have a row."""
        with self.key_rows.lock:
            return self.key_rows.index.committed_size

    def __len__(self) -> int:
        """Return the number of keys that have a row."""
        self._before_read()
        return self.rows

    @property
    def keys(self) -> Keys:
        """The keys that have a row, int64 [K], in the order of their hashes."""
        self._before_read()
        return self.key_rows.committed().keys

    @property
    def used_rows(self) -> int:
        """One more than the largest row number that the table has used."""
        return self.key_rows.index.rows

    @property
    def most_rows(self) -> int:
        """See `Owned`."""
        return -(-self.capacity // self.capabilities.ranks)

    def describe_size(self) -> Mapping[str, Any]:  # Any: numbers and texts
        """See `Owned`."""
        rules = {"admit": repr(self.admit), "evict": repr(self.evict), "unknown": self.unknown}
        return {"capacity": self.capacity, **rules, "the number of the keys' steps": self.key_rows.index.step}

    def owns(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which keys, int64 [N], this rank owns, bool [N]; a key's owner depends only on the number of ranks."""
        return self.key_rows.owns(keys)

    @property
    def unknown_rows(self) -> Mapping[str, int]:
        """The out-of-vocabulary rows by name, in the order of the names."""
        return self.key_rows.unknown_rows

    def on_evict(self, listener: Callable[[Keys, Rows], object]) -> None:
        """From now on, call a function with the keys that each step evicts, and with their weights.

        It is called with int64 [E], in the order of `keys`, and float32 [E, D], once for each step that evicts keys and
        in the order of the steps: in a loop, by the loop's thread some batches later, and at the latest when the loop
        ends. It may read the table. Erased keys are not reported. Each rank reports its own keys.
        """
        self.key_rows.reports.listeners.append(listener)

    def report_evictions(self) -> None:
        """Call the functions of `on_evict` for evictions that were not reported yet."""
        self.key_rows.reports.send()

    def begin_load(self) -> None:
        """See `Owned`."""
        if not self.stored.untouched:
            self.reset()

    def rows_at(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:  # Any: integers of 32 or 64 bits
        """Return the rows of the keys at positions [N] in the order of `keys`."""
        rows: npt.NDArray[np.int32] = self.key_rows.committed().rows[positions]
        return rows

    def find_ids(self, ids: Ids, unknown: Sequence[tuple[int, Sequence[str]]]) -> tuple[Ids, GuestRows | None]:
        """See `Owned.find_ids`; a feature's keys without a row use its out-of-vocabulary rows in turn."""
        distinct: Any
        distinct, inverse = unique(ids)
        rows, guests = self.key_rows.find_or_guest(distinct)
        own = [np.array([self.key_rows.unknown_row(name) for name in names], np.int32) for _, names in unknown]
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
            self.key_rows.erase(keys[self.owns(keys)])
            self.stored.forget_changes()  # earlier checkpoints have the keys, so the next checkpoint must be full

    def write_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows, positions: Positions | None = None) -> None:
        """Overwrite rows and their state, as `HostTable.write_rows` does; keys without a row get one."""
        keys = self._require_keys(ids)
        positions = checked_positions(positions, len(keys), len(block), self.name)
        self._check_values(keys, block, row_slots, positions)
        if len(np.unique(keys)) < len(keys):
            raise ValueError(f"table {self.name!r}: the keys of write_rows() must be all different")
        with self._rekeying():
            rows = self.key_rows.place(keys, np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint32))
            self.stored.write(rows, block, row_slots, positions)
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
            self._apply(rows, grads)
        self._after_write(rows)
        self.report_evictions()

    def update(
        self, ids: npt.ArrayLike, grads: Rows, step: TableStep | None = None, positions: Positions | None = None
    ) -> None:
        """Take one step on distinct keys with their summed gradients; as `HostTable.update`, but always a whole step.

        Raises:
            UserError, TypeError, ValueError: As for `apply`; or `step` is given, or a key repeats.
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
        """Plan a step, yield the keys' rows to a `with` block that takes it, and commit it; undo it after an error."""
        planned = self.key_rows.plan(keys, uses, may_read=True)
        try:
            unknown = planned.guests[0] if self.unknown == ZEROS else self.key_rows.unknown_row()
            yield np.where(planned.rows == EMPTY, np.int32(unknown), planned.rows)
        except BaseException:
            self.key_rows.rollback()
            raise
        evicted, guests = self.key_rows.commit()
        self.key_rows.retire(evicted)
        self.key_rows.release(guests)

    def _to_edit(self, ids: npt.ArrayLike | None) -> Ids:
        self._before_write()
        if ids is None:
            return self.key_rows.committed().rows
        keys = self._require_keys(ids)
        rows = self.key_rows.find_rows(keys)
        if (rows == EMPTY).any():
            key = keys[np.flatnonzero(rows == EMPTY)[0]]
            raise UserError(f"table {self.name!r} has no row for key {key}, so it cannot be edited; use write_rows()")
        return rows

    def reset(self) -> None:
        """Forget all keys, and set the step to 0, as in a new table."""
        with self._rekeying():
            if self.stored.changes is not None:
                self.stored.changes.await_end()
            self.storage.close()
            index, self.stored.ids, self.stored.storage = self._reserve(self.stored.format)
            self.stored.untouched = True
            self.key_rows.begin(index)
            self.stored.forget_changes()
            self.stored.history = self.history.renewed()
            self._step = 0
        self._after_write(None)

    def adopt(self, history: History, *, whole: bool) -> None:
        """See `HostTable.adopt`."""
        del whole  # all rows of a table by key are loaded
        self._before_write()
        self.stored.history = history

    def __getstate__(self) -> NoReturn:
        """Raise TypeError: a copy would take memory for all rows that the table can have, not only for those in use."""
        raise TypeError(f"table {self.name!r} is a table by key, which cannot be copied; save a checkpoint and load it")

    def _checked(self, ids: npt.ArrayLike) -> Ids:
        """Return the rows of keys after all steps so far.

        A key without a row gets the out-of-vocabulary row or, with unknown="initial", a row for this read alone.
        """
        keys = self._require_keys(ids)
        self._before_read()
        if self.unknown == INITIAL:
            distinct: Any
            distinct, inverse = unique(keys)
            rows, self._guests = self.key_rows.find_or_guest(distinct)  # temporary rows, kept until the next call
            return rows[inverse]
        rows = self.key_rows.find_rows(keys)
        if not self.key_rows.is_first and (rows == EMPTY).any():
            raise UserError(
                f"table {self.name!r}: key {keys[rows == EMPTY][0]} has no row, and only rank 0 has the one that such "
                "keys use; use lookup() of the runtime"
            )
        rows[rows == EMPTY] = self.key_rows.unknown_row()
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

    @property
    def row_slots(self) -> Rows:
        """A copy of the per-row state, float32 [K, R], in the order of `keys`."""
        self._before_read()
        return self.storage.row_slots[self.key_rows.committed().rows]

    @property
    def block(self) -> NoReturn:
        """Raise TypeError: rows are in no order that has a meaning."""
        raise TypeError(f"table {self.name!r} is a table by key, whose rows have no order; use read_rows(keys, ...)")

    _shown = staticmethod(np.ascontiguousarray)  # columns are copies, which need not be read-only

    def _columns(self, *, current: bool = False) -> dict[str, Any]:
        return self._in_order(self.key_rows.committed().rows, current=current)

    def _in_order(self, rows: Positions, *, current: bool = False) -> dict[str, Any]:
        """Return the columns of `TableRows.columns`, with the rows in the order `rows`."""
        return {
            name: ReadColumn(len(rows), column.shape[1], lambda at, column=column: column[rows[at]])  # type: ignore[misc]
            for name, column in self.stored.columns(current=current).items()
        }

    def stored_columns(self) -> Mapping[str, ReadColumn]:
        """Return stored weights and optimizer state: the out-of-vocabulary rows by name, then the rows of `keys`."""
        self._before_read()
        rows = np.array(list(self.unknown_rows.values()), np.int32)
        return self._in_order(np.concatenate([rows, self.key_rows.committed().rows]))

    def key_arrays(self) -> KeyArrays:
        """Return the keys for a digest."""
        self._before_read()
        found = self.key_rows.committed()
        arrays = found.keys, found.last, found.uses, *found.waiting, found.sketch
        return KeyArrays(found.step, list(self.unknown_rows), *arrays)

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """Return what `kernels.norm.partial_squares` returns for the rows of `keys`, in their order."""
        return partial_squares(np.ascontiguousarray(self.weights)[:, None])

    def begin_snapshot(self, budget: Budget, *, everything: bool, copies: Copies | None = None) -> KeySnapshot:
        """See `HostTable.begin_snapshot`."""
        return self.key_rows.begin_snapshot(budget, everything=everything, copies=copies)

    def load_rows(self, names: Sequence[str], found: KeyColumns, block: Rows, row_slots: Rows) -> None:
        """Write rows of a checkpoint: arguments as for `place_rows`, with block [N, 1 + S, D] and row_slots [N, R].

        Raises:
            ValueError: As for `write_rows`.
            UserError: The table's capacity is too small.
        """
        self._check_values(found.keys, block, row_slots, None)
        with self._rekeying():
            rows, chosen = self.key_rows.place_saved(names, found)
            self.stored.forget(rows)  # a new key's row may be on disk with its former key
            self.stored.write(rows, block[chosen], row_slots[chosen])

    def place_rows(self, names: Sequence[str], found: KeyColumns) -> tuple[Positions, Any]:
        """Give distinct keys [N] of a checkpoint a row each; the first ones have the out-of-vocabulary rows `names`.

        Return the rows of this rank, and an index that selects their keys from arrays [N]. The caller sets the rows'
        values.
        """
        with self._rekeying():
            rows, chosen = self.key_rows.place_saved(names, found)
            self.stored.note_write(rows)
        return rows, chosen

    def reseed(self, seed: int) -> None:
        """Set the seed to that of a checkpoint, since it decides the values of new rows."""
        with self._rekeying():
            self.seed, self.stored.format = seed, replace(self.stored.format, seed=seed)
            self.key_rows.index.reseed(seed)

    def restore_keys(
        self, step: int, decays: int, waiting: Keys, counts: npt.NDArray[np.int64], sketch: npt.NDArray[np.uint32]
    ) -> None:
        """Set the keys' state, except rows, to a checkpoint's; see `KeyIndex.restore`. Skip keys of other ranks."""
        mine, index = self.owns(waiting), self.key_rows.index
        with self._rekeying():
            index.restore(step, decays, waiting[mine], counts[mine])
            if len(sketch):
                index.restore_sketch(sketch)

    def forget(self, keys: Keys, decay: float, decays: int) -> None:
        """Let the uses of all keys decay `decays` times, and then remove keys; called while a checkpoint is loaded."""
        with self._rekeying():
            index = self.key_rows.index
            index.decay(decay, decays)
            index.release(index.erase(keys))
