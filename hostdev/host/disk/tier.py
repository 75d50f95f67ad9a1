"""Rows of a table in memory, as many as fit, and the others on disk.

Shapes: V rows, M frames (places in memory), N rows of a call.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.memory import format_bytes
from hostdev.host.disk.folder import TableFolder
from hostdev.host.disk.readers import Planes, Read
from hostdev.host.disk.segments import SEGMENT_BYTES
from hostdev.host.disk.store import SegmentStore
from hostdev.kernels import disk_records, frames
from hostdev.kernels.buffers import reserved
from hostdev.kernels.disk_records import GOOD, Format

Ids = npt.NDArray[Any]
Positions = npt.NDArray[np.int32]

FRAME_BYTES = 32  # memory of a frame beside its row
_BUFFERS_OF = 16  # buffers for writing take at most one part in 16 of the memory
_SPARE_BATCHES = 4  # rows of so many batches are in memory although the plan does not keep them
_RESERVED_OF = 8  # one frame in 8 is for reads and writes outside of the pipeline


class NoFramesError(UserError):
    """There is not enough memory for rows that are needed at once."""


class Pinned(NamedTuple):
    """Rows that stay in memory until they are unpinned."""

    frames: Positions  # int32 [N]
    read: Read | None  # for those that are read from disk


class Tier:
    """The rows of a table that are in memory, in frames, above a store of segments.

    Any thread may call the methods. Values of pinned rows may be read and written without a lock.

    Args:
        name: The table's name.
        parent: The folder in which the tier makes one for its segments.
        rows: V.
        nbytes: Memory for frames and buffers.
        row_bytes: Bytes of a row in memory.
        allocate: Called with M and an int64 [M] for the keys of frames; returns the frames' planes.
        get_keys: Returns the keys, integers [N], of rows.
        fill: Called with frames [N] and the keys of rows; writes the rows' initial values.
        segment_bytes: The size of a segment, at least a chunk; None for the usual one.
        keys_change: Whether a row may have another key after it was forgotten, or written without being read.
    """

    def __init__(
        self,
        name: str,
        parent: Path,
        rows: int,
        nbytes: int,
        row_bytes: int,
        allocate: Callable[[int, npt.NDArray[np.int64]], Planes],
        get_keys: Callable[[Ids], Ids],
        fill: Callable[[Positions, npt.NDArray[np.int64]], None],
        segment_bytes: int | None = None,
        *,
        keys_change: bool = False,
    ) -> None:
        self._keys_change = keys_change
        self._name, self.rows, self._get_keys, self._fill = name, rows, get_keys, fill
        format_ = Format.of(row_bytes, SEGMENT_BYTES if segment_bytes is None else segment_bytes)
        buffers = nbytes // _BUFFERS_OF // format_.chunk_bytes
        each = row_bytes + FRAME_BYTES
        self.count = count_frames(rows, nbytes, row_bytes, format_)
        if self.count < 1:
            least = 4 * format_.chunk_bytes + 1024 * each
            raise UserError(
                f"table {name!r}: its Disk has {nbytes:,} bytes of memory, but needs at least {least:,}, most of them "
                "for buffers"
            )
        self._changed = threading.Condition()
        self.where: Any = reserved((rows,), f"i{get_location_bytes(rows)}")
        self.keys = np.zeros(self.count, np.int64)
        self._row_of = np.full(self.count, frames.FREE, np.int64)
        self._pins = np.zeros(self.count, np.int32)
        self._saved = np.zeros(self.count, np.int64)
        self._state = np.zeros(self.count, np.uint8)
        self._free = np.arange(self.count - 1, -1, -1, dtype=np.int32)
        self._free_count, self._hand, self._pinned = self.count, 0, 0
        self._leaving: deque[Positions] = deque()
        self.planes = allocate(self.count, self.keys)
        self._folder = folder = TableFolder(parent, name)
        shared = self.where, self._saved, self._changed
        self.store = SegmentStore(name, folder.path, format_, *shared, buffers)
        self._at_end = weakref.finalize(self, _end, self.store, folder)
        self.used = self.missed = 0  # rows that were pinned, and those of them that were not in memory
        self.waited = 0.0  # seconds of waiting for pinned rows

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without that of `where`."""
        return self.count * (self.planes.row_bytes + FRAME_BYTES) + self.store.nbytes

    def close(self) -> None:
        """Remove the files. The rows are lost."""
        self._at_end()

    def reset(self) -> None:
        """Give all rows their initial values; nothing may be pinned."""
        for start in range(0, self.rows, 1 << 20):
            self.forget(np.arange(start, min(self.rows, start + (1 << 20))))

    def try_pin(self, rows: Ids, *, change: bool, reserve: bool = False, read: bool = True) -> Pinned | None:
        """Pin rows: keep them in memory until `unpin`, and begin to read those that are on disk.

        Args:
            rows: int32 or int64 [N], distinct.
            change: Whether the rows may be written.
            reserve: Whether to use the frames that are reserved for calls outside of the pipeline.
            read: Whether the rows' values are needed; if not, all must be written before `unpin`.

        Returns:
            The pinned rows; None if other rows must be unpinned first.

        Raises:
            NoFramesError: The rows do not fit, even alone.
            UserError: A read or write of the disk has failed.
        """
        most = self.count if reserve or self.count == self.rows else self.count - self.count // _RESERVED_OF
        if len(rows) > most:
            needed = self.nbytes + (len(rows) - most) * self.nbytes // max(most, 1)
            raise NoFramesError(
                f"table {self._name!r}: a batch needs {len(rows):,} of its rows in memory, but its Disk has memory for "
                f"{most:,}; give it at least {format_bytes(needed)}, or use smaller batches"
            )
        while True:
            with self._changed:
                self.store.require_good()
                missing, fresh = frames.count_missing(rows, self.where, self._pins)
                if self._pinned and self._pinned + fresh > most:
                    return None
                if missing <= self._free_count:
                    pinned, new = self._pin(rows, change=change, read=read)
                    break
                if not self._evict(missing - self._free_count) and self.store.room():
                    return None  # all other rows are pinned
            self.store.await_room()
        if len(new):
            try:
                self._fill(new, self.keys[new])
            except BaseException:
                self.store.fail(UserError(f"table {self._name!r}: new rows were not filled; load a checkpoint again"))
                self.unpin(pinned)
                raise
            finally:
                self._arrived(new)  # nobody waits for them in vain
        return pinned

    def _pin(self, rows: Ids, *, change: bool, read: bool) -> tuple[Pinned, Positions]:
        """Pin rows, for which there are enough free frames; return also the frames that need initial values."""
        n, store = len(rows), self.store
        found, missing, positions = np.empty(n, np.int32), np.empty(n + 1, np.int32), np.empty(n + 1, np.int64)
        state = self.where, self._row_of, self._pins, self._saved, self._state, self._free, self._free_count
        out = found, missing, positions
        count, fresh = frames.pin(rows, change, *state, store.live, store.format.per_segment, *out)
        self._pinned += fresh
        self._free_count -= count
        self.used += n
        self.missed += count
        missing, positions = missing[:count], positions[:count]
        targets, keys = found[missing], self._keys_of(rows[missing])
        self.keys[targets] = keys
        if change and self._keys_change:
            self.keys[found] = self._keys_of(rows)  # rows in memory may have new keys
        if not read:
            self._state[targets] &= 255 - frames.ARRIVING
            return Pinned(found, None), targets[:0]
        new = targets[positions < 0]
        at = np.flatnonzero(positions >= 0)
        left = at[store.copy_buffered(positions[at], targets[at], self.planes)]
        arrived = np.setdiff1d(at, left, assume_unique=True)
        self._state[targets[arrived]] &= 255 - frames.ARRIVING
        if not len(left):
            return Pinned(found, None), new
        targets, keys, positions = targets[left], keys[left], positions[left]
        number = store.begin_read()

        def done(read: Read) -> None:
            try:
                store.require_read(read)
            except UserError as error:
                store.fail(error)  # before anybody takes the frames for rows
            self._arrived(targets, number)

        return Pinned(found, store.read(positions, keys, targets, self.planes, done)), new

    def _keys_of(self, rows: Ids) -> npt.NDArray[np.int64]:
        """Return the rows' keys, int64 [N], as records have them."""
        return self._get_keys(rows).astype(np.int64, copy=False)

    def _arrived(self, targets: Positions, read: int | None = None) -> None:
        """Record that frames have their values, which the read of this number has read."""
        with self._changed:
            self._state[targets] &= 255 - frames.ARRIVING
            if read is not None:
                self.store.end_read(read)
            self._changed.notify_all()

    def await_rows(self, pinned: Pinned) -> None:
        """Wait until the rows are in memory; raise UserError if one could not be read."""
        if pinned.read is not None:
            begin = time.perf_counter()
            pinned.read.wait()
            self.waited += time.perf_counter() - begin
            if pinned.read.failure[0] != GOOD:
                self.store.require_good()

    def unpin(self, pinned: Pinned) -> None:
        """Allow rows to leave the memory."""
        if pinned.read is not None:
            pinned.read.wait()
        with self._changed:
            self._pinned -= frames.unpin(pinned.frames, self._pins)
            self._changed.notify_all()

    def _evict(self, wanted: int) -> int:
        """Free up to `wanted` frames, and return how many; needs the lock."""
        chosen = self._choose(wanted)
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
        """Return up to `wanted` frames whose rows may leave: first those that the plan lets go."""
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
            c, self._hand = frames.choose_by_clock(self._hand, self._row_of, self._pins, self._state, left, out)
            chosen.append(out[:c])
        return np.concatenate(chosen)

    def let_go(self, rows: Ids) -> None:
        """Note rows that may leave the memory before others, as soon as no batch has pinned them."""
        out = np.empty(len(rows) + 1, np.int32)
        with self._changed:
            if count := frames.mark_leaving(rows, self.where, self._state, out):
                self._leaving.append(out[:count])

    def keep(self, rows: Ids) -> None:
        """Undo `let_go`."""
        with self._changed:
            frames.mark_staying(rows, self.where, self._state)

    def forget(self, rows: Ids) -> None:
        """Give rows their initial values, unless they are pinned."""
        with self._changed:
            state = self.where, self._row_of, self._pins, self._saved, self._state, self._free
            store = self.store
            self._free_count = frames.forget(rows, *state, self._free_count, store.live, store.format.per_segment)
            self._changed.notify_all()

    def locate(self, rows: Ids) -> npt.NDArray[np.int64]:
        """Return where the values of some rows are on disk, int64 [N]: position + 1, or 0 for initial values.

        Changed rows are written first. The rows must not change meanwhile. The records are there until a read ends that
        has begun before; see `SegmentStore.begin_read`.

        Raises:
            UserError: A read or write of the disk has failed.
        """
        found = np.empty(len(rows), np.int64)
        left = np.arange(len(rows))
        while True:
            with self._changed:
                some = rows[left]
                places, changed = np.empty(len(some), np.int32), np.empty(len(some) + 1, np.int32)
                self._changed.wait_for(lambda some=some, places=places: not self._arriving(some, places))  # type: ignore[misc]
                self.store.require_good()
                positions = np.empty(len(some), np.int64)
                count = frames.locate(some, self.where, self._saved, positions, changed)
                found[left] = positions
                now = changed[: min(count, self.store.room())]
                found[left[now]] = 1 + self._write(places[now], some[now])
                left = left[changed[len(now) : count]]
            if not len(left):
                return found
            self.store.await_room()

    def write_back(self, rows: Ids) -> None:
        """Write those of the rows [N] that are in memory, changed and not pinned; they stay in memory.

        Raises:
            UserError: A write of the disk has failed.
        """
        while len(rows):
            with self._changed:
                self.store.require_good()
                places = np.empty(len(rows), np.int32)
                frames.find(0, len(rows), rows, self.where, places)
                here = np.flatnonzero(places >= 0)
                at = places[here]
                unsaved = (self._saved[at] == frames.CHANGED) & (self._pins[at] == 0)
                here = here[unsaved & (self._state[at] & frames.ARRIVING == 0)]
                now = here[: self.store.room()]
                if len(now):
                    self._write(places[now], rows[now])
                rows = rows[here[len(now) :]]
            if len(rows):
                self.store.await_room()

    def _write(self, at: Positions, rows: Ids) -> npt.NDArray[np.int64]:
        """Write changed rows, which stay in their frames, and return their positions; needs the lock."""
        positions, done, store = np.empty(len(at), np.int64), 0, self.store
        for first, n in store.append(at, self.keys[at], rows, self.planes):
            some = at[done : done + n]
            frames.record_saved(some, first, self._pins, self._saved, store.live, store.format.per_segment)
            positions[done : done + n] = np.arange(first, first + n)
            done += n
        return positions

    def begin_read(self) -> int:
        """See `SegmentStore.begin_read`."""
        with self._changed:
            return self.store.begin_read()

    def end_read(self, number: int) -> None:
        """See `SegmentStore.end_read`."""
        with self._changed:
            self.store.end_read(number)

    def adopt(self, rows: Ids, positions: npt.NDArray[np.int64]) -> None:
        """Take the records at positions [N], which the store has adopted, for rows [N] that are nowhere yet."""
        per_segment, live = self.store.format.per_segment, self.store.live
        with self._changed:
            self.where[rows] = positions + 1
            live += np.bincount(positions // per_segment, minlength=len(live))

    def find(self, rows: Ids) -> Positions:
        """Return the frames of rows that are pinned, int32 [N]."""
        out = np.empty(len(rows), np.int32)
        frames.find(0, len(rows), rows, self.where, out)
        assert not len(out) or out.min() >= 0, f"rows of table {self._name!r} are used that are not pinned"
        return out

    @contextmanager
    def held(self, rows: Ids, *, change: bool, read: bool = True) -> Iterator[None]:
        """Pin distinct rows for a `with` block outside of the pipeline."""
        pinned = self.try_pin(rows, change=change, reserve=True, read=read)
        if pinned is None:
            raise NoFramesError(
                f"table {self._name!r}: {len(rows):,} of its rows do not fit in memory beside those of the batches "
                "that are in progress; give its Disk more memory"
            )
        try:
            self.await_rows(pinned)
            yield
        except BaseException:
            if not read:
                self.store.fail(
                    UserError(f"table {self._name!r}: a write of its rows was interrupted; load a checkpoint again")
                )
            raise
        finally:
            self.unpin(pinned)

    def copy(self, rows: Ids, planes: Planes, fill: Callable[[Positions, npt.NDArray[np.int64]], None]) -> None:
        """Copy rows to the first N rows of other planes, wherever they are, without moving them.

        Args:
            rows: int32 or int64 [N], duplicates allowed.
            planes: Of at least N rows.
            fill: As for `Tier`, for the other planes.
        """
        n = len(rows)
        places, keys = np.empty(n, np.int32), self._keys_of(rows)
        with self._changed:
            self.store.require_good()
            self._changed.wait_for(lambda: not self._arriving(rows, places))
            here = np.flatnonzero(places >= 0).astype(np.int32)
            widths = planes.widths
            shared = self.planes.addresses, planes.addresses, widths
            disk_records.copy_rows(0, len(here), places[here], here, *shared)
            there = np.flatnonzero(places < 0).astype(np.int32)
            positions = self.where[rows[there]].astype(np.int64) - 1
            new = there[positions < 0]
            there, positions = there[positions >= 0], positions[positions >= 0]
            left = self.store.copy_buffered(positions, there, planes)
            there, positions = there[left], positions[left]
            number = self.store.begin_read() if len(there) else 0
        if len(new):
            fill(new, keys[new])
        if not number:
            return

        errors: list[UserError] = []

        def done(read: Read) -> None:
            try:
                self.store.require_read(read)
            except UserError as error:
                errors.append(error)
            self.end_read(number)

        self.store.read(positions, keys[there], there, planes, done).wait()
        if errors:
            raise errors[0]

    def _arriving(self, rows: Ids, places: Positions) -> bool:
        """Find rows, as `find` does; return whether one of them is still being read."""
        frames.find(0, len(rows), rows, self.where, places)
        here = places[places >= 0]
        return bool((self._state[here] & frames.ARRIVING).any())


def count_frames(rows: int, nbytes: int, row_bytes: int, format_: Format) -> int:
    """Return how many of a table's rows fit in `nbytes` of memory; less than 1 if the buffers do not."""
    buffers = max(nbytes // _BUFFERS_OF // format_.chunk_bytes, 4)
    return min(rows, (nbytes - buffers * format_.chunk_bytes) // (row_bytes + FRAME_BYTES))


def count_kept(frames: int, rows: int, batch: int) -> int:
    """Return how many rows the planner of a tier with so many frames keeps, if a batch has `batch` rows."""
    return frames if frames == rows else max(frames // 2, frames - _SPARE_BATCHES * batch)


def get_location_bytes(rows: int) -> int:
    """Return the bytes of memory for each of a table's rows, to know where it is."""
    return 4 if 3 * rows < np.iinfo(np.int32).max else 8  # with dead records, positions may be twice the rows


def _end(store: SegmentStore, folder: TableFolder) -> None:
    if not folder.is_own:  # this process is a fork of the one that has the threads
        return
    if store.is_own_thread:  # garbage is collected in any thread; this one cannot wait for itself
        threading.Thread(target=_end, args=(store, folder), name="hostdev-close").start()
        return
    store.close()
    folder.remove()
