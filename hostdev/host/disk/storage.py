"""Storage of a table on disk, some of whose rows are in memory; see `host.layouts` for their layouts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, format_bytes, require_table
from hostdev.core.table_dtypes import TableStep
from hostdev.host.disk.frame_pool import get_location_bytes
from hostdev.host.disk.readers import Planes
from hostdev.host.disk.tier import Tier
from hostdev.host.layouts import Float32, Split, fill_rows, make_layout
from hostdev.host.storage import COPIED_BYTES, ReadColumn, RowFormat, RowIds, Storage
from hostdev.kernels.arrays import AnyIds, LongIds, Positions, Rows, identity
from hostdev.kernels.clock import Clock
from hostdev.kernels.norm import PART
from hostdev.kernels.pool import Task

_HELD_OF = 16  # `held` pins at most one frame in 16 at a time


def allocate_rows(format_: RowFormat, keys: LongIds) -> Float32 | Split:
    """Return storage for rows in memory, one for each of the keys."""
    return make_layout(format_, len(keys), RowIds.of_keys(keys))


def count_row_bytes(format_: RowFormat) -> int:
    """Return the bytes of a row in memory."""
    return Planes.of(allocate_rows(format_, np.zeros(1, np.int64)).planes).row_bytes


class DiskStorage(Storage):
    """Storage of all rows of a table on disk, and of some in memory; see `Storage`.

    Methods that return tasks, `apply`, `taken` and `taken_row_slots` need rows that are pinned in memory. `sources`,
    `copy_to_columns` and columns read any rows. `held` and `holding` pin any rows.

    Args:
        format_: How rows are stored, and what they are initially.
        rows: V.
        index: The rows' ids or keys.
        disk: Where the rows are.
    """

    def __init__(self, format_: RowFormat, rows: int, index: RowIds, disk: Disk) -> None:
        self.format, self.window, self._given, self._rows = format_, disk.window, disk.nbytes, rows
        self.row_bytes = count_row_bytes(format_)

        def allocate(count: int, keys: LongIds) -> Planes:
            self.frames = allocate_rows(format_, keys)
            return Planes.of(self.frames.planes)

        def fill(frames: Positions, keys: LongIds) -> None:
            fill_rows(self.frames, frames, keys)

        shared = self.row_bytes, allocate, index.of, fill
        self.tier = Tier(format_.name, disk.path, rows, disk.nbytes, *shared, keys_change=index.keys is not None)
        self.row_slots: Any = self._make_column(len(format_.row_slots), lambda source: source.row_slots)

    def forget(self, ids: AnyIds, changes: Any) -> None:
        """See `Storage`; a snapshot for a checkpoint that is being written first copies the rows."""
        if changes is not None:
            changes.before_forget(ids)
        self.tier.forget(ids)

    def taint(self, changes: Any = None) -> None:
        """See `Storage`; first wait for a checkpoint that is being written, since it still reads the records."""
        if changes is not None:
            changes.await_end()
        self.tier.store.taint()

    def close(self, changes: Any = None) -> None:
        """See `Storage`; wait for a checkpoint that is being written."""
        if changes is not None:
            changes.await_end()
        self.tier.close()

    def summary(self) -> dict[str, Any]:
        """Return the numbers of rows and bytes in memory, and those moved between memory and disk so far, by name."""
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

    def fill(self) -> None:
        """See `Storage`."""
        self.tier.reset()

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Storage`."""
        return self._rows, *self.frames.shape[1:]

    @property
    def nbytes(self) -> int:
        """The memory that the table takes, in bytes."""
        return self.tier.nbytes + int(self.tier.where.nbytes)

    def sources(
        self, ids: AnyIds, positions: Positions | None = None
    ) -> Iterator[tuple[Storage, AnyIds, Positions | None]]:
        """See `Storage`."""
        step = max(1, COPIED_BYTES // self.row_bytes)
        if positions is None and len(ids) > step:
            positions = np.arange(len(ids), dtype=np.int32)
        for start in range(0, len(ids), step):
            part = np.ascontiguousarray(ids[start : start + step])
            to = allocate_rows(self.format, np.zeros(len(part), np.int64))
            self.tier.copy(part, Planes.of(to.planes), partial(fill_rows, to))
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

    def plane(self, number: int) -> Any:
        """See `Storage`."""
        return self._make_column(self.shape[2], lambda source: source.plane(number)[:])

    def column(self, number: int) -> Any:
        """See `Storage`."""
        if number < self.shape[1]:
            return self.plane(number)
        return self._make_column(1, lambda source: source.column(number))

    def _make_column(self, width: int, take: Callable[[Storage], Any]) -> ReadColumn:
        """Return a column of all rows; `take` returns the column of a storage in memory, [N, width] for its N rows."""

        def get(chosen: Any) -> Rows:
            ids = np.arange(self._rows)[chosen] if isinstance(chosen, slice) else np.asarray(chosen)
            out, done = np.empty((len(ids), width), np.float32), 0
            for source, numbers, _ in self.sources(ids) if out.size else ():
                out[done : done + len(numbers)] = take(source)
                done += len(numbers)
            return out

        return ReadColumn(self._rows, width, get)

    def lookup_tasks(
        self, ids: AnyIds, out: Rows, positions: Positions | None, clock: Clock | None = None
    ) -> list[Task]:
        """See `Storage`."""
        return self.frames.lookup_tasks(self.tier.find(ids), out, positions, clock)

    def fetch_tasks(self, ids: AnyIds, out: Rows, positions: Positions | None, planes: int) -> list[Task]:
        """See `Storage`."""
        return self.frames.fetch_tasks(self.tier.find(ids), out, positions, planes)

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
        step = max(1, COPIED_BYTES // self.row_bytes // PART) * PART
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


def make_storage(format_: RowFormat, rows: int, index: RowIds, disk: Disk | None) -> Storage:
    """Return storage for the rows of a table, in memory if `disk` is None; rows in memory are not filled."""
    if disk is None:
        return make_layout(format_, rows, index)
    return DiskStorage(format_, rows, index, disk)


def make_filled(format_: RowFormat, rows: int, index: RowIds, disk: Disk | None) -> Storage:
    """Return what `make_storage` does, with initial values in all rows; raise UserError if memory is lacking."""
    if disk is None:
        how = format_
        require_table(how.name, rows, how.dim, how.optimizer, dtype=how.dtype, slots_dtype=how.slots_dtype)
        storage = make_storage(format_, rows, index, disk)
        storage.fill()
        return storage
    location_bytes, free = get_location_bytes(rows), available_bytes()
    if disk.nbytes + location_bytes * rows > free:
        raise UserError(
            f"table {format_.name!r}: its Disk takes {format_bytes(disk.nbytes)} of memory, and {location_bytes} "
            f"bytes for each of {rows:,} rows, but {format_bytes(free)} of host memory are free; give it less "
            "memory"
        )
    return make_storage(format_, rows, index, disk)
