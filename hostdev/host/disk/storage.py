"""Storage of a table whose rows are on disk, but for those in memory; see `host.storage` for the rows' layouts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.initializers import Initializer
from hostdev.core.memory import available_bytes, format_bytes, require_table
from hostdev.core.table_dtypes import TableStep
from hostdev.host.disk.frame_pool import get_location_bytes
from hostdev.host.disk.readers import Planes
from hostdev.host.disk.tier import Tier
from hostdev.host.layouts import Float32, Split, make_layout
from hostdev.host.storage import Shape, Storage
from hostdev.kernels.arrays import AnyIds, Positions, Rows, identity
from hostdev.kernels.clock import Clock
from hostdev.kernels.norm import PART
from hostdev.kernels.pool import Task, run_tasks

COPIED_BYTES = 1 << 26  # bytes of rows that are copied at a time
_HELD_OF = 16  # a call outside of the pipeline holds at most one frame in 16 at a time


class RowFormat:
    """The format of a table's rows.

    Args:
        name: The table's name.
        shape: The dimensions of the whole table.
        dtype: How weights are stored.
        slots_dtype: How state columns are stored.
        seed: Of the initial values.
        init: The initializer of the weights.
    """

    def __init__(self, name: str, shape: Shape, dtype: str, slots_dtype: str, seed: int, init: Initializer) -> None:
        self.shape, self.seed, self.init = shape, seed, init
        self.name, self.dtypes = name, (dtype, slots_dtype)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        return Planes.of(self.allocate(np.zeros(1, np.int64)).planes).row_bytes

    def allocate(self, keys: npt.NDArray[np.int64]) -> Float32 | Split:
        """Return storage for rows in memory, one for each of the keys."""
        of, count = self.shape, len(keys)
        shape = Shape(count, of.dim, of.optimizer, 0, count, False, of.ids, self.dtypes[1], keys)
        return make_layout(self.name, shape, *self.dtypes)

    def fill(self, storage: Float32 | Split, rows: Positions, keys: npt.NDArray[np.int64]) -> None:
        """Write the initial values of the rows of some keys to these rows of storage in memory."""
        _, planes, D = storage.shape
        step = max(1, COPIED_BYTES // (4 * planes * D))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            n = len(rows[part])
            block: Any = np.empty((n, planes, D), np.float32)
            row_slots = np.empty((n, storage.row_slots.shape[1]), np.float32)
            storage.initial(self.shape, self.seed, self.init, keys[part], block)
            self.shape.fill_row_slots(row_slots)
            run_tasks(storage.write_tasks(rows[part], block, row_slots, None))


class DiskStorage(Storage):
    """Storage of all rows of a table on disk, and of some in memory. See `Storage`, whose methods need pinned rows.

    `sources` reads any rows, and `held` holds them in memory.

    Args:
        format_: How rows are stored, and what they are initially.
        disk: Where the rows are.
        get_keys: Returns what takes the place of the rows' ids, integers [N], for row numbers [N].
    """

    def __init__(self, format_: RowFormat, disk: Disk, get_keys: Callable[[AnyIds], AnyIds]) -> None:
        self._whole, self.format, self.window, self._given = format_.shape, format_, disk.window, disk.nbytes

        def allocate(count: int, keys: npt.NDArray[np.int64]) -> Planes:
            self.frames = self.format.allocate(keys)
            return Planes.of(self.frames.planes)

        def fill(frames: Positions, keys: npt.NDArray[np.int64]) -> None:
            self.format.fill(self.frames, frames, keys)

        shared = self.format.row_bytes, allocate, get_keys, fill
        shape, keys_change = self._whole, self._whole.keys is not None
        self.tier = Tier(format_.name, disk.path, shape.rows, disk.nbytes, *shared, keys_change=keys_change)
        self.row_slots: Any = RowSlots(self)

    def forget(self, ids: AnyIds, changes: Any) -> None:
        """See `Storage`; a checkpoint that is being written first copies the rows."""
        if changes is not None:
            changes.before_forget(ids)
        self.tier.forget(ids)

    def taint(self, changes: Any = None) -> None:
        """See `Storage`; a checkpoint that is being written is awaited, since it has the rows."""
        if changes is not None:
            changes.await_end()
        self.tier.store.taint()

    def close(self, changes: Any = None) -> None:
        """See `Storage`; a checkpoint that is being written is awaited."""
        if changes is not None:
            changes.await_end()
        self.tier.close()

    def summary(self) -> dict[str, Any]:
        """Return what has moved between memory and disk so far."""
        tier, store = self.tier, self.tier.store
        return {
            "rows": tier.rows,
            "rows_in_memory": tier.count,
            "memory_bytes": tier.nbytes,
            "used": tier.used,
            "missed": tier.missed,
            "given_bytes": self._given,
            "exceeded": tier.exceeded,
            "exceeded_bytes": tier.most_exceeded * tier.size.frame_bytes,
            "needed_bytes": tier.needed_bytes,
            "read": store.read_records,
            "read_bytes": store.read_records * store.format.block_bytes,
            "written_bytes": dict(store.written_bytes),
            "waited_us": round(tier.waited * 1e6),
            "direct": store.segments.direct,
        }

    def fill(self, shape: Shape, seed: int, init: Initializer) -> None:
        """See `Storage`."""
        del shape, seed, init  # as they were when the storage was made
        self.tier.reset()

    def initial(self, shape: Shape, seed: int, init: Initializer, ids: npt.NDArray[np.int64], block: Rows) -> None:
        """See `Storage`."""
        self.frames.initial(shape, seed, init, ids, block)

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Storage`."""
        return self._whole.rows, *self.frames.shape[1:]

    @property
    def nbytes(self) -> int:
        """The memory that the table takes."""
        return self.tier.nbytes + int(self.tier.where.nbytes)

    def sources(
        self, ids: AnyIds, positions: Positions | None = None
    ) -> Iterator[tuple[Storage, AnyIds, Positions | None]]:
        """See `Storage`."""
        step = max(1, COPIED_BYTES // self.format.row_bytes)
        if positions is None and len(ids) > step:
            positions = np.arange(len(ids), dtype=np.int32)
        for start in range(0, len(ids), step):
            part = np.ascontiguousarray(ids[start : start + step])
            to = self.format.allocate(np.zeros(len(part), np.int64))

            def fill(rows: Positions, keys: npt.NDArray[np.int64], to: Float32 | Split = to) -> None:
                self.format.fill(to, rows, keys)

            self.tier.copy(part, Planes.of(to.planes), fill)
            yield to, identity(len(part)), None if positions is None else positions[start : start + step]

    def held(
        self, ids: AnyIds, positions: Positions | None = None, *, read: bool = False
    ) -> Iterator[tuple[AnyIds, Positions | None]]:
        """See `Storage`."""
        step = max(1, self.tier.count // _HELD_OF)
        if positions is None and len(ids) > step:
            positions = np.arange(len(ids), dtype=np.int32)
        for start in range(0, len(ids), step):
            part = np.ascontiguousarray(ids[start : start + step])
            with self.tier.held(part, change=True, read=read):
                yield part, None if positions is None else positions[start : start + step]

    def holding(self, ids: AnyIds) -> AbstractContextManager[None]:
        """See `Storage`."""
        return self.tier.held(np.unique(ids), change=True)

    def column(self, number: int) -> Any:
        """See `Storage`."""
        return DiskColumn(self, self.shape[2], lambda source: source.column(number)[:])

    def lookup_tasks(self, ids: AnyIds, out: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return self.frames.lookup_tasks(self.tier.find(ids), out, positions)

    def pack_tasks(self, ids: AnyIds, out: Rows, positions: Positions | None, planes: int) -> list[Task]:
        """See `Storage`."""
        return self.frames.pack_tasks(self.tier.find(ids), out, positions, planes)

    def current_tasks(self, ids: AnyIds, clock: Clock, out: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return self.frames.current_tasks(self.tier.find(ids), clock, out, positions)

    def read_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return self.frames.read_tasks(self.tier.find(ids), block, row_slots, positions)

    def write_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return self.frames.write_tasks(self.tier.find(ids), block, row_slots, positions)

    def require_exact(self, plane: int, values: Rows) -> None:
        """See `Storage`."""
        self.frames.require_exact(plane, values)

    def update_tasks(self, ids: AnyIds, grads: Rows, step: TableStep, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return self.frames.update_tasks(self.tier.find(ids), grads, step, positions)

    def apply(self, ids: AnyIds, grads: Rows, step: TableStep) -> None:
        """See `Storage`."""
        self.frames.apply(self.tier.find(ids), grads, step)

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """See `Storage`."""
        step = max(1, COPIED_BYTES // self.format.row_bytes // PART) * PART
        found = []
        for start in range(0, self.shape[0], step):
            for source, _, _ in self.sources(np.arange(start, min(start + step, self.shape[0]))):
                found.append(source.partial_squares())
        return np.concatenate(found)

    def copy_to_columns(self, start: int, stop: int, first: int, ids: AnyIds | None, columns: Rows) -> None:
        """See `Storage`."""
        rows = np.arange(first + start, first + stop) if ids is None else ids[start:stop]
        for source, numbers, positions in self.sources(rows):
            begin = start if positions is None else start + int(positions[0])
            source.copy_to_columns(0, len(numbers), 0, numbers, columns[:, begin : begin + len(numbers)])

    def taken(self, ids: AnyIds) -> Rows:
        """See `Storage`."""
        return self.frames.taken(self.tier.find(ids))

    def taken_row_slots(self, ids: AnyIds) -> Rows:
        """See `Storage`."""
        return self.frames.taken_row_slots(self.tier.find(ids))


class DiskColumn:
    """Values of all rows, by slices or row ids: float32 [any, width].

    Args:
        storage: The rows.
        width: Number of values of a row.
        take: Returns the values [N, width] of all N rows of a storage in memory.
    """

    def __init__(self, storage: DiskStorage, width: int, take: Callable[[Storage], Any]) -> None:
        self._storage, self._take = storage, take
        self.shape = storage.shape[0], width

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Rows:
        ids = np.arange(len(self))[rows] if isinstance(rows, slice) else np.asarray(rows)
        out = np.empty((len(ids), self.shape[1]), np.float32)
        done = 0
        for source, numbers, _ in self._storage.sources(ids) if out.size else ():
            out[done : done + len(numbers)] = self._take(source)
            done += len(numbers)
        return out


class RowSlots:
    """The per-row state of all rows, float32 [V, R], by slices or row ids; a second index, a slice, selects columns.

    `[:, columns]` reads nothing yet, and returns a `DiskColumn`.
    """

    def __init__(self, storage: DiskStorage) -> None:
        self._storage = storage
        self.shape = storage.shape[0], storage.frames.row_slots.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        width = len(range(*columns.indices(self.shape[1])))
        found = DiskColumn(self._storage, width, lambda source: source.row_slots[:, columns])
        return found if isinstance(index, tuple) and rows == slice(None) else found[rows]


def make_storage(format_: RowFormat, disk: Disk | None, get_keys: Callable[[AnyIds], AnyIds]) -> Storage:
    """Return storage for the rows of a table, in memory if `disk` is None; rows in memory are not filled.

    `get_keys` is as for `DiskStorage`.
    """
    if disk is None:
        return make_layout(format_.name, format_.shape, *format_.dtypes)
    return DiskStorage(format_, disk, get_keys)


def make_filled(format_: RowFormat, disk: Disk | None, get_keys: Callable[[AnyIds], AnyIds]) -> Storage:
    """Return what `make_storage` does, with initial values in all rows; raise UserError if memory is lacking."""
    shape, (dtype, slots_dtype) = format_.shape, format_.dtypes
    if disk is None:
        require_table(format_.name, shape.rows, shape.dim, shape.optimizer, dtype=dtype, slots_dtype=slots_dtype)
        storage = make_storage(format_, disk, get_keys)
        storage.fill(shape, format_.seed, format_.init)
        return storage
    location_bytes, free = get_location_bytes(shape.rows), available_bytes()
    if disk.nbytes + location_bytes * shape.rows > free:
        raise UserError(
            f"table {format_.name!r}: its Disk takes {format_bytes(disk.nbytes)} of memory, and {location_bytes} "
            f"bytes for each of {shape.rows:,} rows, but {format_bytes(free)} of host memory are free; give it less "
            "memory"
        )
    return make_storage(format_, disk, get_keys)
