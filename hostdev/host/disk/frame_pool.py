"""Frames, which are places in memory for rows of a table on disk: which rows leave them, when their number changes, and
how many fit in an amount of memory.

Shapes: V rows, M frames, N rows of a call.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, format_bytes, free_addresses
from hostdev.host.disk.readers import Planes
from hostdev.host.disk.segments import TableFolder
from hostdev.host.disk.store import SegmentStore, end_table
from hostdev.kernels import frames
from hostdev.kernels.arrays import AnyIds, Positions, give_back, reserved
from hostdev.kernels.disk_records import Format

FRAME_BYTES = 32  # memory of a frame beside its row
_BUFFERS_OF = 16  # buffers for writing take up to one part in 16 of the memory, or LEAST_BUFFERS chunks if that is more
LEAST_BUFFERS = 4
_SPARE_BATCHES = 4  # the planner leaves frames for the rows of this many batches, but at most half of all frames
_RESERVED_OF = 8  # one frame in 8 is for reads and writes outside of the pipeline
Allocate = Callable[[int, npt.NDArray[np.int64]], Planes]


class MemorySize(NamedTuple):
    """Sizes that determine how many rows fit in memory: V rows, the bytes of a row, and the format of records."""

    rows: int
    row_bytes: int
    format: Format

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame with its row."""
        return self.row_bytes + FRAME_BYTES

    @property
    def least_bytes(self) -> int:
        """Bytes that suffice for the buffers and for some rows."""
        return LEAST_BUFFERS * self.format.chunk_bytes + 1024 * self.frame_bytes

    def count_buffers(self, nbytes: int) -> int:
        """Return the number of buffers, each for a chunk, in `nbytes` of memory."""
        return max(nbytes // _BUFFERS_OF // self.format.chunk_bytes, LEAST_BUFFERS)

    def count_frames(self, nbytes: int) -> int:
        """Return how many rows fit in `nbytes` of memory beside the buffers; less than 1 if no row does."""
        buffers = self.count_buffers(nbytes) * self.format.chunk_bytes
        return min(self.rows, (nbytes - buffers) // self.frame_bytes)

    def get_bytes(self, batch: int) -> int:
        """Return a memory size in bytes with which, or with more, the pipeline can hold `batch` rows at once."""
        frames = min(self.rows, -(-batch * _RESERVED_OF // (_RESERVED_OF - 1))) * self.frame_bytes
        in_buffers = -(-frames // (_BUFFERS_OF - 1))
        return frames + max(in_buffers, LEAST_BUFFERS * self.format.chunk_bytes)


def count_most(frames: int, rows: int) -> int:
    """Return how many of `frames` the pipeline may use; all of them if all rows of the table have one."""
    return frames if frames == rows else frames - frames // _RESERVED_OF


def count_kept(frames: int, rows: int, batch: int) -> int:
    """Return how many rows the planner keeps in memory, for a tier with `frames` frames and batches of `batch` rows."""
    return frames if frames == rows else max(frames // 2, frames - _SPARE_BATCHES * batch)


def get_location_bytes(rows: int) -> int:
    """Return the bytes per row of a tier's array `where`, which says where each of the table's rows is."""
    return 4 if 3 * rows < np.iinfo(np.int32).max else 8  # with dead records, positions may be twice the rows


class NoFramesError(UserError):
    """There is not enough memory for rows that are needed at once."""


class FramePool:
    """The frames of a `Tier`, and the store of rows on disk. Methods with an underscore need the lock of `_changed`.

    Args:
        name: The table's name.
        parent: The folder in which the store makes a folder for its segments.
        size: The sizes of rows and frames.
        format_: The format of records.
        nbytes: Memory for frames and buffers.
        allocate: As for `Tier`.
    """

    def __init__(
        self, name: str, parent: Path, size: MemorySize, format_: Format, nbytes: int, allocate: Allocate
    ) -> None:
        self._name, self.size, self.count = name, size, size.count_frames(nbytes)
        if self.count < 1:
            raise UserError(
                f"table {name!r}: its Disk has {nbytes:,} bytes of memory, but needs at least {size.least_bytes:,}, "
                "most of them for buffers"
            )
        self._changed = threading.Condition()
        self.where: Any = reserved((size.rows,), f"i{get_location_bytes(size.rows)}")
        arrays = reserve_frames(self.count, size, allocate)
        self.keys, self._row_of, self._pins, self._saved, self._state, self._free, self.planes = arrays
        self._most = len(self.keys)  # frames for which there are addresses
        self._free[: self.count] = np.arange(self.count - 1, -1, -1, dtype=np.int32)
        self._free_count, self._hand, self._pinned = self.count, 0, 0
        self._end = self.count  # frames from here on have no memory; those from `count` on are beyond the budget
        self._leaving: deque[Positions] = deque()
        self._folder = folder = TableFolder(parent, name)
        shared = self.where, self._saved, self._changed
        self.store = SegmentStore(name, folder.path, format_, *shared, size.count_buffers(nbytes))
        self._at_end = weakref.finalize(self, end_table, self.store, folder)
        self.exceeded = self.most_exceeded = 0  # how often frames were added beyond the budget; most of these at once
        self.needed_bytes = 0  # memory that would have sufficed for the most rows needed at once

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without that of `where`."""
        return self._end * self.size.frame_bytes + self.store.nbytes

    def _grow(self, wanted: int, rows: int) -> str | None:
        """Add `wanted` frames beyond the budget, as `rows` rows are needed at once; the first time, return a warning.

        Needs the lock. The caller has called `_shrink`, so `_free` has no frame beyond the budget.
        """
        free = self.count + np.flatnonzero(self._row_of[self.count : self._end] == frames.FREE)[:wanted]
        end = self._end + wanted - len(free)
        beyond, size, needed = end - self.count, self.size.frame_bytes, self.size.get_bytes(rows)
        text = f"table {self._name!r}: {rows:,} rows are needed at once, but its Disk has memory for {self.count:,}"
        advice, host = f"a Disk with {-(-needed // (1 << 20))}MiB has room for them", available_bytes()
        if end > self._most or (end - self._end) * size > host:
            why = "for its addresses (ulimit -v)" if end > self._most else f"where {format_bytes(host)} are free"
            raise NoFramesError(f"{text}, and there are not {format_bytes(beyond * size)} more {why}; {advice}")
        added = np.concatenate([free, np.arange(self._end, end)]).astype(np.int32)
        self._row_of[added] = frames.FREE
        self._free[self._free_count : self._free_count + wanted] = added[::-1]
        self._free_count, self._end = self._free_count + wanted, end
        self.exceeded += 1
        self.most_exceeded, self.needed_bytes = max(self.most_exceeded, beyond), max(self.needed_bytes, needed)
        if self.exceeded > 1:
            return None
        return f"{text}; they take {format_bytes(beyond * size)} more for a while, and so may later ones; {advice}"

    def _shrink(self) -> None:
        """Evict rows from the frames beyond the budget, as far as possible; if all leave, give back the frames' memory.

        Needs the lock.
        """
        if self._end == self.count:
            return
        beyond = slice(self.count, self._end)
        leave = (self._row_of[beyond] >= 0) & (self._pins[beyond] == 0) & (self._state[beyond] & frames.ARRIVING == 0)
        leaving = (self.count + np.flatnonzero(leave)).astype(np.int32)
        changed = self._saved[leaving] == frames.CHANGED
        self._release(np.concatenate([leaving[~changed], leaving[changed][: self.store.room()]]))
        free = self._free[: self._free_count]
        within = free[free < self.count]
        self._free_count = len(within)
        self._free[: self._free_count] = within
        if (self._row_of[beyond] == frames.FREE).all():
            for values in (*self.planes.arrays, self.keys, self._row_of, self._saved, self._pins, self._state):
                give_back(values[beyond])
            self._hand, self._end = self._hand % self.count, self.count

    def _evict(self, wanted: int) -> int:
        """Free up to `wanted` frames, and return how many; needs the lock."""
        return self._release(self._choose(wanted))

    def _release(self, chosen: Positions) -> int:
        """Free chosen frames, none of which is pinned, as far as changed rows can be written; return how many."""
        if not len(chosen):
            return 0
        changed = np.empty(len(chosen) + 1, np.int32)
        state = self.where, self._row_of, self._saved, self._state, self._free
        self._free_count, count = frames.release(chosen, *state, self._free_count, changed)
        freed = len(chosen) - count
        changed = changed[:count]
        kept = changed[self.store.room() :]
        if len(kept):
            self._state[kept] = frames.LEAVING
            self._leaving.appendleft(kept)
            changed = changed[: len(changed) - len(kept)]
        if len(changed):
            rows = self._row_of[changed]
            done = 0
            for position, n in self.store.append(changed, self.keys[changed], rows, self.planes):
                shared = self.where, self._row_of, self._state, self._free, self._free_count
                self._free_count = frames.release_to(changed[done : done + n], position, *shared)
                done += n
        return int(freed + len(changed))

    def _choose(self, wanted: int) -> Positions:
        """Return up to `wanted` frames whose rows may leave, first those of rows marked by `let_go`."""
        chosen: list[Positions] = []
        left = wanted
        for _ in range(len(self._leaving)):
            some = self._leaving.popleft()
            out, kept = np.empty(len(some) + 1, np.int32), np.empty(len(some) + 1, np.int32)
            c, k = frames.choose_leaving(some, self._pins, self._state, left, out, kept)
            if c:
                chosen.append(out[:c])
                left -= int(c)
            if k:
                (self._leaving.append if left else self._leaving.appendleft)(kept[:k])
            if not left:
                break
        if left:
            out = np.empty(left + 1, np.int32)
            state = self._row_of[: self._end], self._pins, self._state
            c, self._hand = frames.choose_by_clock(self._hand, *state, left, out)
            chosen.append(out[:c])
        return np.concatenate(chosen)

    def let_go(self, rows: AnyIds) -> None:
        """Mark rows that may leave the memory before other rows, as soon as no batch pins them."""
        out = np.empty(len(rows) + 1, np.int32)
        with self._changed:
            if count := frames.mark_leaving(rows, self.where, self._state, out):
                self._leaving.append(out[:count])

    def keep(self, rows: AnyIds) -> None:
        """Undo `let_go` for these rows."""
        with self._changed:
            frames.mark_staying(rows, self.where, self._state)

    def forget(self, rows: AnyIds) -> None:
        """Give rows their initial values, unless they are pinned."""
        with self._changed:
            state = self.where, self._row_of, self._pins, self._saved, self._state, self._free
            store = self.store
            self._free_count = frames.forget(rows, *state, self._free_count, store.live, store.format.per_segment)
            self._changed.notify_all()

    def _write(self, at: Positions, rows: AnyIds) -> npt.NDArray[np.int64]:
        """Write changed rows, which stay in their frames; return the positions of their records. Needs the lock."""
        positions, done, store = np.empty(len(at), np.int64), 0, self.store
        for first, n in store.append(at, self.keys[at], rows, self.planes):
            some = at[done : done + n]
            frames.record_saved(some, first, self._pins, self._saved, store.live, store.format.per_segment)
            positions[done : done + n] = np.arange(first, first + n)
            done += n
        return positions


_ADDRESSES_OF = 4  # under `ulimit -v`, frames beyond the budget reserve at most a quarter of the addresses left


class FrameArrays(NamedTuple):
    """The arrays of frames, each [M]; see `kernels.frames`. `keys` has their rows' keys, and `planes` the rows."""

    keys: npt.NDArray[np.int64]
    row_of: npt.NDArray[np.int64]
    pins: npt.NDArray[np.int32]
    saved: npt.NDArray[np.int64]
    state: npt.NDArray[np.uint8]
    free: npt.NDArray[np.int32]
    planes: Planes


def reserve_frames(count: int, size: MemorySize, allocate: Allocate) -> FrameArrays:
    """Reserve addresses for `count` free frames, and for more frames, up to one per row, if there are enough.

    Raises MemoryError if the system refuses the addresses for `count` frames.
    """
    left = free_addresses()
    most = size.rows if left is None else min(size.rows, count + left // _ADDRESSES_OF // size.frame_bytes)
    try:
        return _reserve(most, count, allocate)
    except MemoryError:
        return _reserve(count, count, allocate)


def _reserve(most: int, count: int, allocate: Allocate) -> FrameArrays:
    dtypes = np.int64, np.int64, np.int32, np.int64, np.uint8, np.int32
    keys, row_of, pins, saved, state, free = (reserved((most,), dtype) for dtype in dtypes)
    row_of[:count] = frames.FREE
    found: Any = keys, row_of, pins, saved, state, free, allocate(most, keys)
    return FrameArrays(*found)
