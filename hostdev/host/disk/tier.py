"""Rows of a table in memory, as many as fit, and the others on disk.

Shapes: V rows, M frames (places in memory), N rows of a call.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.progress import note
from hostdev.host.disk.frame_pool import FramePool, MemorySize, count_most
from hostdev.host.disk.readers import Planes, Read
from hostdev.host.disk.segments import SEGMENT_BYTES
from hostdev.kernels import disk_records, frames
from hostdev.kernels.arrays import AnyIds, Positions
from hostdev.kernels.disk_records import Format


class Pinned(NamedTuple):
    """Rows that stay in memory until they are unpinned."""

    frames: Positions  # int32 [N]
    read: Read | None  # the read of the rows that are on disk; None if there are none


class Tier(FramePool):
    """The rows of a table that are in memory, in frames, above a store of segments.

    Any thread may call the methods. Values of pinned rows may be read and written without a lock.

    Args:
        name: The table's name.
        parent: The folder in which the tier makes a folder for its segments.
        rows: V.
        nbytes: Memory for frames and buffers.
        row_bytes: Bytes of a row in memory.
        allocate: Called with a number of frames, and with the array of their keys, int64 [frames]; returns the frames'
            planes, whose memory should only be reserved, as most frames may never be used.
        get_keys: Returns the keys, integers [N], of rows.
        fill: Called with frames [N] and the keys of rows; writes the rows' initial values.
        segment_bytes: The size of a segment, at least a chunk; None for `SEGMENT_BYTES`.
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
        get_keys: Callable[[AnyIds], AnyIds],
        fill: Callable[[Positions, npt.NDArray[np.int64]], None],
        segment_bytes: int | None = None,
        *,
        keys_change: bool = False,
    ) -> None:
        self._keys_change = keys_change
        self.rows, self._get_keys, self._fill = rows, get_keys, fill
        format_ = Format.of(row_bytes, SEGMENT_BYTES if segment_bytes is None else segment_bytes)
        super().__init__(name, parent, MemorySize(rows, row_bytes, format_), format_, nbytes, allocate)
        self.used = self.missed = 0  # rows that were pinned, and those of them that were not in memory
        self.waited = 0.0  # seconds of waiting for pinned rows

    def close(self) -> None:
        """Remove the files. The rows are lost."""
        self._at_end()

    def reset(self) -> None:
        """Give all rows their initial values; nothing may be pinned."""
        for start in range(0, self.rows, 1 << 20):
            self.forget(np.arange(start, min(self.rows, start + (1 << 20))))

    def try_pin(
        self, rows: AnyIds, *, change: bool, reserve: bool = False, read: bool = True, exceed: bool = False
    ) -> Pinned | None:
        """Pin rows: keep them in memory until `unpin`, and begin to read those that are on disk.

        Args:
            rows: int32 or int64 [N], distinct.
            change: Whether the rows may be written.
            reserve: Whether to use the frames that are reserved for calls outside of the pipeline.
            read: Whether the rows' values are needed; if not, all must be written before `unpin`.
            exceed: Whether rows that do not fit get frames beyond the budget for as long as necessary.

        Returns:
            The pinned rows; None if other rows must be unpinned first, which does not happen with `exceed`.

        Raises:
            NoFramesError: The host has no memory beyond the budget.
            UserError: A read or write of the disk has failed.
        """
        most = self.count if reserve or exceed else count_most(self.count, self.rows)
        line = None
        while True:
            with self._changed:
                self.store.require_good()
                self._shrink()
                missing, fresh = frames.count_missing(rows, self.where, self._pins)
                if not exceed and self._pinned + fresh > most:
                    return None
                wanted = missing - self._free_count
                if wanted > 0 and not self._evict(wanted) and self.store.room():  # all other rows are pinned
                    if not exceed:
                        return None
                    line = self._grow(wanted, self._pinned + int(fresh))
                    wanted = 0
                if wanted <= 0:
                    pinned, new = self._pin(rows, change=change, read=read)
                    break
            self.store.await_room()
        if line is not None:
            note(line)
        if len(new):
            try:
                self._fill(new, self.keys[new])
            except BaseException:
                self.store.fail(UserError(f"table {self._name!r}: new rows were not filled; load a checkpoint again"))
                self.unpin(pinned)
                raise
            finally:
                self._arrived(new)  # even after an error, so that no thread waits in vain
        return pinned

    def _pin(self, rows: AnyIds, *, change: bool, read: bool) -> tuple[Pinned, Positions]:
        """Pin rows, for which there are enough free frames; return them, and the frames that need initial values."""
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
                store.fail(error)  # before the frames count as read
            self._arrived(targets, number)

        return Pinned(found, store.read(positions, keys, targets, self.planes, done)), new

    def _keys_of(self, rows: AnyIds) -> npt.NDArray[np.int64]:
        """Return the rows' keys, int64 [N], as records have them."""
        return self._get_keys(rows).astype(np.int64, copy=False)

    def _arrived(self, targets: Positions, read: int | None = None) -> None:
        """Record that frames have their values; end the read of this number, unless it is None."""
        with self._changed:
            self._state[targets] &= 255 - frames.ARRIVING
            if read is not None:
                self.store.end_read(read)
            self._changed.notify_all()

    def await_rows(self, pinned: Pinned) -> None:
        """Wait until the rows have values, whichever thread reads or fills them; raise UserError if the store fails."""
        begin = time.perf_counter()
        if pinned.read is not None:
            pinned.read.wait()
        with self._changed:
            self._changed.wait_for(lambda: not (self._state[pinned.frames] & frames.ARRIVING).any())
        self.waited += time.perf_counter() - begin
        self.store.require_good()

    def unpin(self, pinned: Pinned) -> None:
        """Undo `try_pin`: rows that are not pinned otherwise may leave the memory."""
        if pinned.read is not None:
            pinned.read.wait()
        with self._changed:
            self._pinned -= frames.unpin(pinned.frames, self._pins)
            self._shrink()
            self._changed.notify_all()

    def locate(self, rows: AnyIds) -> npt.NDArray[np.int64]:
        """Return where the values of some rows are on disk, int64 [N]: position + 1, or 0 for initial values.

        Changed rows are written first. The rows must not change meanwhile. The records stay on disk until the end of a
        read that the caller has begun before; see `SegmentStore.begin_read`.

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

    def write_back(self, rows: AnyIds) -> None:
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

    def begin_read(self) -> int:
        """See `SegmentStore.begin_read`."""
        with self._changed:
            return self.store.begin_read()

    def end_read(self, number: int) -> None:
        """See `SegmentStore.end_read`."""
        with self._changed:
            self.store.end_read(number)

    def adopt(self, rows: AnyIds, positions: npt.NDArray[np.int64]) -> None:
        """Let rows [N] with initial values have the records at positions [N], which the store has adopted."""
        per_segment, live = self.store.format.per_segment, self.store.live
        with self._changed:
            self.where[rows] = positions + 1
            live += np.bincount(positions // per_segment, minlength=len(live))

    def find(self, rows: AnyIds) -> Positions:
        """Return the frames of rows that are pinned, int32 [N]."""
        out = np.empty(len(rows), np.int32)
        frames.find(0, len(rows), rows, self.where, out)
        assert not len(out) or out.min() >= 0, f"rows of table {self._name!r} are used that are not pinned"
        return out

    @contextmanager
    def held(self, rows: AnyIds, *, change: bool, read: bool = True) -> Iterator[None]:
        """Pin distinct rows for a `with` block outside of the pipeline."""
        pinned = self.try_pin(rows, change=change, read=read, exceed=True)
        assert pinned is not None
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

    def copy(self, rows: AnyIds, planes: Planes, fill: Callable[[Positions, npt.NDArray[np.int64]], None]) -> None:
        """Copy rows, from memory or disk, to the first N rows of other planes; the rows stay where they are.

        Args:
            rows: int32 or int64 [N], duplicates allowed.
            planes: Planes of at least N rows.
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

    def _arriving(self, rows: AnyIds, places: Positions) -> bool:
        """Write the rows' frames to `places`, -1 for rows not in memory; return whether one is being read or filled."""
        frames.find(0, len(rows), rows, self.where, places)
        here = places[places >= 0]
        return bool((self._state[here] & frames.ARRIVING).any())
