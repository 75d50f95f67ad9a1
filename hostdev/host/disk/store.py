"""The segments of a table on disk: append-only files of records, with buffers for those that are being written.

A position is the number of a record: segment * per_segment + its number in the segment. Records are appended to a
buffer in memory; a full buffer, a chunk of its segment, is written at once by a thread. A segment of which at least
half is dead is collected: its live records are appended again, and its file is removed.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from hostdev.core.errors import UserError, in_words
from hostdev.host.disk.collector import Collector
from hostdev.host.disk.readers import Planes, Read
from hostdev.host.disk.segments import SegmentFile, Segments, TableFolder, write_all
from hostdev.kernels import disk_records, frames
from hostdev.kernels.arrays import LongIds, reserve
from hostdev.kernels.disk_records import Format


class _Chunk(NamedTuple):
    """A full buffer, to be written."""

    segment: int
    number: int  # the chunk's number in its segment
    buffer: int


class SegmentStore:
    """The records of a table.

    Methods that say so need the lock of `changed`, which guards `where` and the store's attributes.

    Args:
        name: The table's name, for errors.
        folder: An empty folder for the segments.
        format_: The format of records.
        where: Where each row is, see `kernels.frames`.
        saved: For each frame, where its row is on disk if the row is unchanged; see `kernels.frames`.
        changed: Notified when buffers are written.
        buffers: Number of buffers in memory, each for a chunk.

    Attributes:
        written_bytes: Bytes of records appended so far, by kind: "rows" from memory, and "collected" records, moved
            from other segments.
        segments: The files.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        format_: Format,
        where: Any,
        saved: Any,
        changed: threading.Condition,
        buffers: int,
    ) -> None:
        self.format, self._name, self.where, self.saved, self.changed = format_, name, where, saved, changed
        most = int(np.iinfo(where.dtype).max) // format_.per_segment
        most = min(most, 2 * len(where) // format_.per_segment + 1024)
        self.segments = Segments(name, folder, format_, most)
        self.live = self.segments.live
        self._chunks = self.segments.chunks
        self._buffer_of = np.full(most * self._chunks, -1, np.int32)  # the buffer of each chunk that is not written
        self._words = reserve(buffers * format_.chunk_bytes, huge=True)[1].view(np.uint64).reshape(buffers, -1)
        self._free_buffers = list(range(buffers))
        self._segment, self._next = -1, 0  # the segment that is being filled (-1: none), and its number of records
        self._buffer = -1  # the buffer of this segment's last records; -1: none
        self._spare = -1  # an empty segment, to be filled next; -1: none
        self._preparing = threading.Lock()
        self._version = 1
        self._reads: dict[int, list[int]] = {}  # by number of a read: segments that wait for it before they are freed
        self.waiting: dict[int, int] = {}  # by segment to be freed: the number of reads that it waits for
        self._read_number = 0
        self._error: UserError | None = None
        self.written_bytes, self.read_records = {"rows": 0, "collected": 0}, 0
        self._to_write: SimpleQueue[_Chunk | None] = SimpleQueue()
        self.closed = False
        self._threads = [
            threading.Thread(target=work, name=f"hostdev-{verb}", daemon=True)
            for verb, work in (("write", self._write), ("collect", Collector(self).run))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Memory of the buffers in bytes."""
        return int(self._words.nbytes)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is one of the store's threads."""
        return threading.current_thread() in self._threads

    def require_good(self) -> None:
        """Raise the error of the first call of `fail`, if there was one."""
        if self._error is not None:
            raise UserError(str(self._error))

    def _require_open(self) -> None:
        self.require_good()
        if self.closed:
            raise UserError(f"table {self._name!r} was closed")

    def fail(self, error: UserError) -> None:
        """Record an error, which `require_good` and `await_room` raise from now on, unless one was recorded before."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    def room(self) -> int:
        """Return how many records can be appended at once; needs the lock."""
        per_chunk, per_segment = self.format.per_chunk, self.format.per_segment
        found = -self._next % per_chunk + len(self._free_buffers) * per_chunk
        segments = (per_segment - self._next if self._segment >= 0 else 0) + (per_segment if self._spare >= 0 else 0)
        return int(min(found, segments))

    def await_room(self) -> None:
        """Wait until records can be appended; must be called without the lock.

        Raises:
            DiskFullError: The disk is full.
            UserError: A read or write has failed, or the store was closed.
        """
        while True:
            with self._preparing:
                if self._spare < 0:
                    self._prepare()
            with self.changed:
                self._require_open()
                if self.room():
                    return
                self.changed.wait(0.2)

    def append(self, sources: Any, keys: Any, rows: Any, planes: Planes) -> list[tuple[int, int]]:
        """Append records of rows; there must be `room`. Needs the lock.

        Args:
            sources: int32 [N], the rows' places in `planes`.
            keys: int64 [N].
            rows: int32 or int64 [N], the rows' numbers.
            planes: The rows in memory.

        Returns:
            (position, count) of each run of new records, in order.
        """
        runs, done = [], 0
        while done < len(sources):
            words, first, count = self._open(len(sources) - done)
            part = slice(done, done + count)
            shared = self._version, first, words, self.format, planes.addresses, planes.widths
            disk_records.pack(0, count, sources[part], keys[part], rows[part], *shared)
            runs.append((self._add(count), count))
            done += count
        self.written_bytes["rows"] += len(sources) * self.format.record_bytes
        return runs

    def _open(self, wanted: int) -> tuple[Any, int, int]:
        """Return the buffer for the next records, the number of the first in it, and how many it takes."""
        per_chunk = self.format.per_chunk
        if self._segment < 0:
            self._segment, self._spare, self._next = self._spare, -1, 0
        first = self._next % per_chunk
        if not first:
            self._buffer = self._free_buffers.pop()
            self._buffer_of[self._segment * self._chunks + self._next // per_chunk] = self._buffer
        return self._words[self._buffer], first, min(wanted, per_chunk - first)

    def _add(self, count: int) -> int:
        """Count new records of the open buffer; return the position of the first."""
        per_chunk, segment = self.format.per_chunk, self._segment
        position = segment * self.format.per_segment + self._next
        self._next += count
        self._version += count
        self.live[segment] += count
        if self._next % per_chunk == 0:
            self._to_write.put(_Chunk(segment, self._next // per_chunk - 1, self._buffer))
            self._buffer = -1
        if self._next == self.format.per_segment:
            self._segment, self._next = -1, 0
        return position

    def copy_buffered(self, positions: LongIds, targets: Any, planes: Planes) -> Any:
        """Copy the records [N] that are in buffers to rows of `planes`; return the indices of all others, int64 [any].

        Needs the lock.
        """
        buffers = self._buffer_of[positions // self.format.per_chunk]
        here = np.flatnonzero(buffers >= 0)
        if len(here):
            found = positions[here], buffers[here], targets[here]
            shared = self._words, self.format, planes.addresses, planes.widths
            disk_records.copy_buffered(0, len(here), *found, *shared)
        return np.flatnonzero(buffers < 0)

    def begin_read(self) -> int:
        """Begin a read, and return its number: all segments that exist stay open until `end_read`. Needs the lock."""
        self._read_number += 1
        self._reads[self._read_number] = []
        return self._read_number

    def end_read(self, number: int) -> None:
        """End a read, and free the segments that waited only for this read; needs the lock."""
        for segment in self._reads.pop(number):
            self.waiting[segment] -= 1
            if not self.waiting[segment]:
                self._free(segment)

    def read(self, positions: LongIds, keys: Any, targets: Any, planes: Planes, done: Callable[[Read], None]) -> Read:
        """Begin to read records into rows of `planes`, after `begin_read`; see `Read`."""
        self.read_records += len(positions)
        return Read(self.segments.source, positions, keys, targets, planes, done)

    def require_read(self, read: Read) -> None:
        """Raise UserError if a read that has ended has failed; name the file and what is wrong with it."""
        self.segments.require_read(read)

    def _prepare(self) -> None:
        """Make an empty segment, to be filled next."""
        with self.changed:
            segment = self.segments.take_index()
        self.segments.make(segment)
        with self.changed:
            self._spare, self.segments.tainted[segment] = segment, False

    def _write(self) -> None:
        """Write full buffers to their files, in a thread."""
        size, source = self.format.chunk_bytes, self.segments.source
        while (chunk := self._to_write.get()) is not None:
            words = self._words[chunk.buffer]
            blocks = size // self.format.block_bytes
            tag = source.tags[chunk.segment] + np.uint64(chunk.number * blocks)
            disk_records.seal(0, blocks, words, tag, self.format)
            try:
                write_all(int(source.files[chunk.segment]), memoryview(words).cast("B"), chunk.number * size)
            except OSError as error:
                path = self.segments.path(chunk.segment)
                self.fail(UserError(f"table {self._name!r}: {path} cannot be written ({in_words(error)})"))
                return
            with self.changed:
                self._buffer_of[chunk.segment * self._chunks + chunk.number] = -1
                self.segments.note_written(chunk.segment, words)
                self._free_buffers.append(chunk.buffer)
                self.changed.notify_all()

    def close_segment(self) -> None:
        """End the segment that is being filled, and let its last chunk be written; needs the lock."""
        segment, per_chunk = self._segment, self.format.per_chunk
        if segment < 0:
            return
        if left := -self._next % per_chunk:
            disk_records.clear(per_chunk - left, per_chunk, self._words[self._buffer], self.format)
            self._next += left
            self._to_write.put(_Chunk(segment, self._next // per_chunk - 1, self._buffer))
        self.segments.ends[segment] = self._next // per_chunk
        self._segment, self._next, self._buffer = -1, 0, -1

    def finish(self, segments: Sequence[int]) -> list[SegmentFile]:
        """Wait until segments are on disk, and return their files. The caller is in a read, and does not hold the lock.

        Raises:
            UserError: A read or write has failed, or the store was closed.
        """
        wanted = np.array(segments, np.int64)
        with self.changed:
            if self._segment in segments:
                self.close_segment()
            while (self.segments.written[wanted] < self.segments.ends[wanted]).any():
                self._require_open()
                self.changed.wait(0.2)
            self._require_open()
        return [self.segments.finish(segment) for segment in segments]

    def adopt(self, files: Sequence[SegmentFile]) -> LongIds:
        """Hold the segments of a checkpoint, and return their indexes; errors are those of `Segments.adopt`."""
        with self._preparing:
            adopted: list[int] = []
            try:
                for file in files:
                    adopted.append(self.segments.adopt(file))
            except BaseException:
                for segment in adopted:
                    self.segments.free(segment)
                raise
            return np.array(adopted, np.int64)

    def use_adopted(self) -> None:
        """Record that the live records of adopted segments are counted; the segments can be collected from now on."""
        with self.changed:
            self.segments.use_adopted()
            self.changed.notify_all()

    def taint(self) -> None:
        """Record that checkpoints must not have the records that exist now, since some are of erased rows."""
        with self.changed:
            self.close_segment()
            self.segments.tainted[(self.segments.source.files >= 0)] = True
            if self._spare >= 0:
                self.segments.tainted[self._spare] = False
            self.changed.notify_all()

    @property
    def is_tainted(self) -> bool:
        """Whether there are records that checkpoints must not have."""
        return bool(self.segments.tainted.any())

    def release(self, segment: int) -> None:
        """Free a segment as soon as no read can need it; needs the lock."""
        if self._reads:
            self.waiting[segment] = len(self._reads)
            for segments in self._reads.values():
                segments.append(segment)
        else:
            self._free(segment)

    def _free(self, segment: int) -> None:
        self.waiting.pop(segment, None)
        self.segments.free(segment)

    def append_moved(self, segment: int, numbers: Any, rows: Any, source: Any) -> None:
        """Append records of a segment again; there must be `room`. Needs the lock.

        Args:
            segment: The segment.
            numbers: int32 [N], the records' numbers in `source`.
            rows: int64 [N], the rows' numbers.
            source: A chunk of the segment.
        """
        done = 0
        while done < len(numbers):
            words, first, count = self._open(len(numbers) - done)
            part = slice(done, done + count)
            disk_records.move(0, count, numbers[part], rows[part], source, self._version, first, words, self.format)
            frames.move_to(rows[part], self._add(count), self.where)
            done += count
        self.live[segment] -= len(numbers)
        self.written_bytes["collected"] += len(numbers) * self.format.record_bytes

    def close(self) -> None:
        """End the threads and close the files."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self.changed.notify_all()
        self._to_write.put(None)
        for thread in self._threads:
            thread.join()
        self.segments.close()


def end_table(store: SegmentStore, folder: TableFolder) -> None:
    """Close a table's store and remove its folder."""
    if not folder.is_own:  # this process is a fork of the one that has the threads
        return
    if store.is_own_thread:  # garbage is collected in any thread; this one cannot wait for itself
        threading.Thread(target=end_table, args=(store, folder), name="hostdev-close").start()
        return
    store.close()
    folder.remove()
