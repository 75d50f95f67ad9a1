"""The segments of a table on disk: append-only files of records, with buffers for those that are being written.

A position is the number of a record: segment * per_segment + its number in the segment. Records are appended to a
buffer in memory; a full buffer, a chunk of its segment, is written at once by a thread. A segment of which at least
half is dead is collected: its live records are appended again, and its file is removed.
"""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import DiskFullError, UserError, in_words
from hostdev.core.memory import format_bytes
from hostdev.host.disk.readers import Planes, Read, Source
from hostdev.kernels import disk_records, frames
from hostdev.kernels.buffers import reserve
from hostdev.kernels.disk_records import DAMAGED, GOOD, UNREADABLE, Format

SEGMENT_BYTES = 64 << 20
_LEAST_BUFFERS = 4
_RETRIED_AFTER = 0.5  # seconds after which a segment is collected again, after the disk was full
_DIRECT = getattr(os, "O_DIRECT", 0)

Positions = npt.NDArray[np.int64]


class _Chunk(NamedTuple):
    """A full buffer, to be written."""

    segment: int
    number: int  # in the segment
    buffer: int


class SegmentStore:
    """The records of a table.

    Methods that say so need the lock of `changed`, which guards `where` and all that the store knows.

    Args:
        name: The table's name, for errors.
        folder: An empty folder for the segments.
        format_: The format of records.
        where: Where each row is, see `kernels.frames`.
        saved: For the rows in memory, see there.
        changed: Notified when buffers are written.
        buffers: Number of chunks in memory.

    Attributes:
        written_bytes: What was written, by kind: "rows", and "collected" rows.
        direct: Whether files bypass the system's page cache.
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
        self.format, self._name, self._folder = format_, name, folder
        self._where, self._saved, self._changed = where, saved, changed
        most = int(np.iinfo(where.dtype).max) // format_.per_segment
        most = min(most, 2 * len(where) // format_.per_segment + 1024)
        self._chunks = format_.per_segment // format_.per_chunk
        self.live = np.zeros(most, np.int64)  # live records of each segment
        self._source = Source(np.full(most, -1, np.int32), np.zeros(most, np.uint64), format_)
        self._buffer_of = np.full(most * self._chunks, -1, np.int32)  # the buffer of each chunk that is not written
        self._written = np.zeros(most, np.int32)  # chunks of each segment that are on disk
        count = max(_LEAST_BUFFERS, buffers)
        self._words = reserve(count * format_.chunk_bytes, huge=True)[1].view(np.uint64).reshape(count, -1)
        self._free_buffers, self._free_segments = list(range(count)), deque(range(most))
        self._segment, self._next = -1, 0  # the segment that is being filled, and its records
        self._buffer = -1  # for its last records
        self._spare = -1  # an empty segment
        self._preparing = threading.Lock()
        self._files = 0  # that were ever made
        self._version = 1
        self._reads: dict[int, list[int]] = {}  # by number, segments to be freed after this read
        self._waiting: dict[int, int] = {}  # by segment to be freed, the reads that it waits for
        self._read_number = 0
        self._error: UserError | None = None
        self.direct = bool(_DIRECT)
        self.written_bytes, self.read_records = {"rows": 0, "collected": 0}, 0
        self._to_write: SimpleQueue[_Chunk | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=work, name=f"hostdev-{verb}", daemon=True)
            for verb, work in (("write", self._write), ("collect", self._collect))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Memory of the buffers in bytes."""
        return int(self._words.nbytes)

    @property
    def segments(self) -> int:
        """Number of segments on disk."""
        return int((self._source.files >= 0).sum())

    def require_good(self) -> None:
        """Raise the error that has ended the writing, if any."""
        if self._error is not None:
            raise UserError(str(self._error))

    def fail(self, error: UserError) -> None:
        """Make all further calls fail with this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def room(self) -> int:
        """Return how many records can be appended at once; needs the lock."""
        per_chunk, per_segment = self.format.per_chunk, self.format.per_segment
        found = -self._next % per_chunk + len(self._free_buffers) * per_chunk
        segments = (per_segment - self._next if self._segment >= 0 else 0) + (per_segment if self._spare >= 0 else 0)
        return int(min(found, segments))

    def await_room(self) -> None:
        """Wait until records can be appended; must be called without the lock.

        Raises:
            UserError: The disk is full, or a write has failed.
        """
        while True:
            with self._preparing:
                if self._spare < 0:
                    self._prepare()
            with self._changed:
                self.require_good()
                if self.room():
                    return
                self._changed.wait(0.2)

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

    def are_written(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Return which records [N] are on disk, and not in a buffer; needs the lock."""
        found: npt.NDArray[np.bool_] = self._buffer_of[positions // self.format.per_chunk] < 0
        return found

    def copy_buffered(self, positions: Positions, targets: Any, planes: Planes) -> Any:
        """Copy those records [N] that are in buffers to rows of `planes`; return the places of the others, int64 [any].

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
        """Begin a read, and return its number: segments of now stay open until `end_read`. Needs the lock."""
        self._read_number += 1
        self._reads[self._read_number] = []
        return self._read_number

    def end_read(self, number: int) -> None:
        """End a read; needs the lock."""
        for segment in self._reads.pop(number):
            self._waiting[segment] -= 1
            if not self._waiting[segment]:
                self._free(segment)

    def read(self, positions: Positions, keys: Any, targets: Any, planes: Planes, done: Callable[[], None]) -> Read:
        """Begin to read records into rows of `planes`, after `begin_read`; see `Read`."""
        self.read_records += len(positions)
        return Read(self._source, positions, keys, targets, planes, done)

    def require_read(self, read: Read) -> None:
        """Raise UserError if a read that has ended has failed; name the file and what is wrong with it."""
        kind, position, got = map(int, read.failure)
        if kind == GOOD:
            return
        segment, number = divmod(position, self.format.per_segment)
        block = number // self.format.per_block
        size, path = self.format.block_bytes, self._path(int(self._source.tags[segment]) >> 32)
        where = f"table {self._name!r}: bytes {block * size:,} to {(block + 1) * size:,} of {path}"
        if kind != UNREADABLE:
            what = "are damaged: their checksum is wrong" if kind == DAMAGED else "are those of another place"
            raise UserError(f"{where} {what}; resume from the last checkpoint, and check the disk")
        why = f"only {got} bytes of them are there"
        if got < 0:
            try:
                os.preadv(int(self._source.files[segment]), [memoryview(_pages(size).data)], block * size)
                why = "a first attempt failed"
            except OSError as error:
                why = in_words(error)
        raise UserError(f"{where} cannot be read ({why}); resume from the last checkpoint, and check the disk")

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:08d}"

    def _prepare(self) -> None:
        """Make an empty segment."""
        with self._changed:
            if not self._free_segments:
                raise UserError(f"table {self._name!r} has too many records on disk for its numbers of rows")
            segment, self._files = self._free_segments.popleft(), self._files + 1
            number = self._files
        path, size = self._path(number), self.format.segment_bytes
        try:
            file = self._open_file(path)
            try:
                os.posix_fallocate(file, 0, size)
            except OSError:
                os.close(file)
                path.unlink()
                raise
        except OSError as error:
            self._free_segments.append(segment)
            raise DiskFullError(
                f"table {self._name!r} needs {format_bytes(size)} more in {self._folder} ({in_words(error)})",
                "all finished steps are kept. Free space there, or give its Disk more memory",
            ) from None
        with self._changed:
            self._source.files[segment], self._source.tags[segment] = file, number << 32
            self.live[segment] = self._written[segment] = 0
            self._spare = segment

    def _open_file(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        if self.direct:
            try:
                return os.open(path, flags | _DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                path.unlink(missing_ok=True)
        return os.open(path, flags, 0o600)

    def _write(self) -> None:
        """Write full buffers to their files, in a thread."""
        size = self.format.chunk_bytes
        while (chunk := self._to_write.get()) is not None:
            words = self._words[chunk.buffer]
            blocks = size // self.format.block_bytes
            tag = self._source.tags[chunk.segment] + np.uint64(chunk.number * blocks)
            disk_records.seal(0, blocks, words, tag, self.format)
            try:
                _write_all(int(self._source.files[chunk.segment]), memoryview(words).cast("B"), chunk.number * size)
            except OSError as error:
                path = self._path(int(self._source.tags[chunk.segment]) >> 32)
                self.fail(UserError(f"table {self._name!r}: {path} cannot be written ({in_words(error)})"))
                return
            with self._changed:
                self._buffer_of[chunk.segment * self._chunks + chunk.number] = -1
                self._free_buffers.append(chunk.buffer)
                self._written[chunk.segment] += 1
                self._changed.notify_all()

    def _collect(self) -> None:
        """Collect segments, in a thread."""
        words = _pages(self.format.chunk_bytes).view(np.uint64)
        while True:
            with self._changed:
                while not self._closed and (segment := self._find_dead()) < 0:
                    self._changed.wait(1.0)
                if self._closed:
                    return
            try:
                self._move_live(segment, words)
            except DiskFullError:  # for those who append rows to say
                time.sleep(_RETRIED_AFTER)
            except UserError as error:
                self.fail(error)
                return

    def _find_dead(self) -> int:
        """Return the segment with the least live records if at least half of it is dead, or a negative number."""
        full = np.flatnonzero((self._written == self._chunks) & (self._source.files >= 0))
        full = full[[segment not in self._waiting for segment in full.tolist()]] if self._waiting else full
        if not len(full):
            return -1
        segment = int(full[np.argmin(self.live[full])])
        return segment if 2 * self.live[segment] <= self.format.per_segment else -1

    def _move_live(self, segment: int, words: Any) -> None:
        """Append the live records of a segment again, and free it."""
        per_chunk = self.format.per_chunk
        numbers = np.empty(per_chunk + 1, np.int32)
        for chunk in range(self._chunks):
            if not self.live[segment]:
                break
            self._read_chunk(segment, chunk, words)
            first = segment * self.format.per_segment + chunk * per_chunk
            while not self._closed:
                with self._changed:
                    found, dropped = disk_records.find_live(
                        words, per_chunk, first, self._where, self._saved, self.format, numbers
                    )
                    self.live[segment] -= dropped
                    moved = min(int(found), self.room())
                    if moved:
                        self._append_moved(segment, numbers[:moved], words)
                    if moved == found:
                        break
                self.await_room()
        with self._changed:
            if not self._closed:
                assert not self.live[segment]
                self._release(segment)

    def _append_moved(self, segment: int, numbers: Any, source: Any) -> None:
        done, rows = 0, np.empty(len(numbers), np.int64)
        disk_records.moved_rows(0, len(numbers), numbers, source, self.format, rows)
        while done < len(numbers):
            words, first, count = self._open(len(numbers) - done)
            part = slice(done, done + count)
            disk_records.move(0, count, numbers[part], source, self._version, first, words, self.format)
            frames.move_to(rows[part], self._add(count), self._where)
            done += count
        self.live[segment] -= len(numbers)
        self.written_bytes["collected"] += len(numbers) * self.format.record_bytes

    def _read_chunk(self, segment: int, chunk: int, words: Any) -> None:
        size, blocks = self.format.chunk_bytes, self.format.chunk_bytes // self.format.block_bytes
        path, failure = self._path(int(self._source.tags[segment]) >> 32), np.zeros(3, np.int64)
        try:
            _read_all(int(self._source.files[segment]), memoryview(words).cast("B"), chunk * size)
        except OSError as error:
            raise UserError(f"table {self._name!r}: {path} cannot be read ({in_words(error)})") from None
        tag = self._source.tags[segment] + np.uint64(chunk * blocks)
        disk_records.check(0, blocks, words, tag, self.format, failure)
        if failure[0] != GOOD:
            begin = chunk * size + int(failure[1]) * self.format.block_bytes
            raise UserError(
                f"table {self._name!r}: bytes {begin:,} to {begin + self.format.block_bytes:,} of {path} are damaged; "
                "resume from the last checkpoint, and check the disk"
            )

    def _release(self, segment: int) -> None:
        """Free a segment as soon as no read can need it."""
        if self._reads:
            self._waiting[segment] = len(self._reads)
            for segments in self._reads.values():
                segments.append(segment)
        else:
            self._free(segment)

    def _free(self, segment: int) -> None:
        self._waiting.pop(segment, None)
        os.close(int(self._source.files[segment]))
        self._path(int(self._source.tags[segment]) >> 32).unlink(missing_ok=True)
        self._source.files[segment], self._written[segment] = -1, 0
        self._free_segments.append(segment)

    def close(self) -> None:
        """End the threads and close the files."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._to_write.put(None)
        for thread in self._threads:
            thread.join()
        for file in self._source.files[self._source.files >= 0].tolist():
            os.close(file)


def _pages(size: int) -> npt.NDArray[np.uint8]:
    """Return memory that begins on a page."""
    found: npt.NDArray[np.uint8] = reserve(size, huge=False)[1]
    return found


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _read_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(file, [data], offset)
        if not count:
            raise OSError(errno.EIO, "the file is shorter than it was")
        data, offset = data[count:], offset + count
