"""The files of a table on disk: segments of 64 MiB, each with a number, a count of live records, and a checksum.

A segment is written from its begin to its end, in chunks, and does not change afterwards. Checkpoints can then hold it
by a hard link. Segments of a checkpoint that was loaded are held in the same way.

The folder of a table is made for one run, is locked while the run lasts, and is removed at the run's end.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
from collections import deque
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import DiskFullError, UserError, in_words
from hostdev.core.locks import is_same_file, lock_state
from hostdev.core.memory import format_bytes
from hostdev.host.disk.readers import Read, RecordSource
from hostdev.kernels.arrays import reserve
from hostdev.kernels.disk_records import DAMAGED, GOOD, UNREADABLE, Format

SEGMENT_BYTES = 64 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EFBIG}
_ADOPTED = -1  # the value of `written` for an adopted segment, until `use_adopted`
_HEADER_WORDS = 2  # words of a block's header: its checksum and its tag
_LOCK = "in-use.lock"
_PREFIX = "hostdev-table-"


class SegmentFile(NamedTuple):
    """A segment that does not change any more.

    Attributes:
        path: Where it is.
        nbytes: Its size.
        sha256: The SHA-256 of the headers of its blocks, each of which has a checksum of its block.
        number: The number in the tags of its blocks.
    """

    path: Path
    nbytes: int
    sha256: str
    number: int


class Segments:
    """The segments of a table, each at an index below `most`, which is reused when the segment is removed.

    Args:
        name: The table's name, for errors.
        folder: An empty folder for the segments.
        format_: The format of records.
        most: The largest number of segments at once.

    Attributes:
        source: The open files.
        live: int64 [most], numbers of live records.
        written: int32 [most], numbers of chunks on disk.
        ends: int32 [most], numbers of chunks that the segments have when they are closed.
        tainted: bool [most], whether there are records in the segment that checkpoints must not have.
        adopted: Segments of another run, whose records have the row numbers of that run.
        direct: Whether files bypass the system's page cache.
        is_full: Whether there was no space, or no free file descriptor, for the last segment.
    """

    def __init__(self, name: str, folder: Path, format_: Format, most: int) -> None:
        self.name, self.folder, self.format = name, folder, format_
        self.most = most
        _allow_open_files(most)
        self.chunks = format_.per_segment // format_.per_chunk
        files, tags = np.full(most, -1, np.int32), np.zeros(most, np.uint64)
        self.source = RecordSource(files, tags, format_, np.zeros(most, np.int64))
        self.live = np.zeros(most, np.int64)
        self.written, self.ends = np.zeros(most, np.int32), np.zeros(most, np.int32)
        self.tainted = np.zeros(most, np.bool_)
        self.adopted: set[int] = set()
        self.direct, self.is_full = bool(_DIRECT), False
        self._paths: dict[int, Path] = {}
        self._hashes: dict[int, Any] = {}
        self._synced: set[int] = set()
        self._free = deque(range(most))
        self._made = 0  # number of segments made or adopted so far

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, segment: int) -> Path:
        """Return the path of a segment."""
        return self._paths[segment]

    def closed(self) -> npt.NDArray[np.int64]:
        """Return the segments that are on disk and do not change any more."""
        return np.flatnonzero((self.source.files >= 0) & (self.written == self.ends))

    def take_index(self) -> int:
        """Take a free index; raise UserError if there is none."""
        if not self._free:
            raise UserError(f"table {self.name!r} has too many records on disk for its numbers of rows")
        return self._free.popleft()

    def make(self, segment: int) -> None:
        """Make an empty segment at an index; raise DiskFullError if there is no space, UserError after other errors."""
        self._made += 1
        path, size = self.folder / f"segment-{self._made:08d}", self.format.segment_bytes
        try:
            file = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                os.posix_fallocate(file, 0, size)
            except OSError:
                os.close(file)
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._free.append(segment)
            if not self.folder.is_dir():
                raise UserError(
                    f"table {self.name!r}: its folder {self.folder} was removed while it was in use, and its rows with "
                    "it; resume from the last checkpoint, and leave the folder alone until the run has ended"
                ) from None
            if error.errno not in _NO_ROOM:
                raise UserError(
                    f"table {self.name!r}: no file can be made in {self.folder} ({in_words(error)}); resume from the "
                    "last checkpoint, with another folder if need be"
                ) from None
            self.is_full = True
            what, advice = f"{format_bytes(size)} more in {self.folder}", "Free space there"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                what, advice = f"one more open file in {self.folder}", "Raise the limit of open files (ulimit -n)"
            raise DiskFullError(
                f"table {self.name!r} needs {what} ({in_words(error)})",
                f"all finished steps are kept. {advice}, or give its Disk more memory",
            ) from None
        self.is_full = False
        self._paths[segment], self._hashes[segment] = path, hashlib.sha256()
        self.live[segment] = self.written[segment] = 0
        self.ends[segment] = self.chunks
        self.source.files[segment], self.source.tags[segment] = file, self._made << 32

    def adopt(self, file: SegmentFile) -> int:
        """Hold a segment of a checkpoint, and return its index; it counts as closed from `use_adopted` on.

        Raises:
            DiskFullError: There is no space for a copy, which a file system without links needs.
            UserError: The file cannot be read.
        """
        segment = self.take_index()
        self._made += 1
        path = self.folder / f"adopted-{self._made:08d}"
        try:
            link_or_copy(file.path, path)
            opened = self._open(path, os.O_RDONLY)
        except OSError as error:
            self._free.append(segment)
            path.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                why = f"table {self.name!r} needs {format_bytes(file.nbytes)} more in {self.folder}"
                raise DiskFullError(why, "free space there") from None
            raise UserError(f"table {self.name!r}: {file.path} cannot be read ({in_words(error)})") from None
        self._paths[segment], self._hashes[segment] = path, file.sha256
        self.live[segment] = 0
        self.written[segment], self.ends[segment] = _ADOPTED, file.nbytes // self.format.chunk_bytes
        self.source.tags[segment] = file.number << 32
        self.adopted.add(segment)
        self._synced.add(segment)
        self.source.files[segment] = opened
        return segment

    def use_adopted(self) -> None:
        """Record that the live records of adopted segments are counted; the segments count as closed from now on."""
        at = np.flatnonzero(self.written == _ADOPTED)
        self.written[at] = self.ends[at]

    def _open(self, path: Path, flags: int) -> int:
        """Open a file; bypass the system's page cache if the file system supports that."""
        if self.direct:
            try:
                return os.open(path, flags | _DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                if flags & os.O_CREAT:
                    path.unlink(missing_ok=True)
        return os.open(path, flags, 0o666)

    def note_written(self, segment: int, words: Any) -> None:
        """Record that the next chunk of a segment, `words`, was written; chunks are written in order."""
        blocks = words[: self.format.chunk_bytes >> 3].reshape(-1, self.format.block_bytes >> 3)
        self._hashes[segment].update(np.ascontiguousarray(blocks[:, :_HEADER_WORDS]).data)
        self.written[segment] += 1

    def finish(self, segment: int) -> SegmentFile:
        """Make sure that a closed segment survives a crash of the system; return its file."""
        file, size = int(self.source.files[segment]), int(self.ends[segment]) * self.format.chunk_bytes
        if segment not in self._synced:
            os.ftruncate(file, size)
            os.fsync(file)
            self._synced.add(segment)
        known = self._hashes[segment]
        sha256 = known if isinstance(known, str) else known.hexdigest()
        return SegmentFile(self._paths[segment], size, sha256, int(self.source.tags[segment]) >> 32)

    def free(self, segment: int) -> None:
        """Remove a segment."""
        if self.source.files[segment] >= 0:  # else all files were closed
            os.close(int(self.source.files[segment]))
        with contextlib.suppress(OSError):  # the folder is removed at the table's end
            self._paths.pop(segment).unlink()
        del self._hashes[segment]
        self._synced.discard(segment)
        self.adopted.discard(segment)
        self.source.files[segment], self.written[segment], self.tainted[segment] = -1, 0, False
        self._free.append(segment)

    def require_read(self, read: Read) -> None:
        """Raise UserError if a read that has ended has failed; name the file and what is wrong with it."""
        kind, position, got = map(int, read.failure)
        if kind == GOOD:
            return
        segment, number = divmod(position, self.format.per_segment)
        block, size = number // self.format.per_block, self.format.block_bytes
        if kind != UNREADABLE:
            raise self.damage(segment, block, kind)
        why = f"only {got} bytes of them are there"
        if got < 0:
            try:
                os.preadv(int(self.source.files[segment]), [memoryview(get_pages(size).data)], block * size)
                why = "a first attempt failed"
            except OSError as error:
                why = in_words(error)
        raise self._failure(segment, block, f"cannot be read ({why})")

    def damage(self, segment: int, block: int, kind: int) -> UserError:
        """Return the error of a block that is DAMAGED or MISPLACED (`kernels.disk_records`)."""
        what = "are damaged: their checksum is wrong" if kind == DAMAGED else "are those of another place"
        return self._failure(segment, block, what)

    def _failure(self, segment: int, block: int, what: str) -> UserError:
        size = self.format.block_bytes
        where = f"table {self.name!r}: bytes {block * size:,} to {(block + 1) * size:,} of {self._paths[segment]}"
        return UserError(f"{where} {what}; resume from the last checkpoint, and check the disk")

    def close(self) -> None:
        """Close all files."""
        for file in self.source.files[self.source.files >= 0].tolist():
            os.close(file)
        self.source.files[:] = -1


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as the system allows, so that `count` more can be open."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = soft + count if hard == resource.RLIM_INFINITY else min(hard, soft + count)
        if soft != resource.RLIM_INFINITY and wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def try_link(source: Path, target: Path) -> bool:
    """Make `target` a hard link of a file; return whether that is possible."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        if target.parent.is_dir():
            return False
        raise
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def link_or_copy(source: Path, target: Path) -> bool:
    """Make `target` a hard link of a file, or a synced copy where that is not possible; return whether it is a link."""
    if try_link(source, target):
        return True
    shutil.copyfile(source, target)
    file = os.open(target, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    return False


def get_pages(size: int) -> npt.NDArray[np.uint8]:
    """Return memory that begins at a page, uint8 [size]."""
    found: npt.NDArray[np.uint8] = reserve(size, huge=False)[1]
    return found


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all data at an offset of a file."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def read_all(file: int, data: memoryview, offset: int) -> None:
    """Fill `data` from an offset of a file; raise OSError if the file is too short."""
    while data:
        count = os.preadv(file, [data], offset)
        if not count:
            raise OSError(errno.EIO, "the file is shorter than it was")
        data, offset = data[count:], offset + count


class TableFolder:
    """A new folder in `parent` for a table's segments.

    Folders that killed runs have left behind in `parent` are removed; folders of live runs are not.

    Raises:
        UserError: The folder cannot be made or written.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self._owner = os.getpid()
        short = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:40]
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent)
            self.path, self._lock = self._make(parent, f"{_PREFIX}{short}-{self._owner}")
        except OSError as error:
            raise UserError(
                f"table {name!r}: its folder in {parent} cannot be made ({in_words(error)}); give Disk another folder"
            ) from None

    @staticmethod
    def _make(parent: Path, name: str) -> tuple[Path, IO[bytes]]:
        for number in itertools.count():
            path = parent / f"{name}-{number}"
            try:
                path.mkdir()
                lock = (path / _LOCK).open("wb")
            except (FileExistsError, FileNotFoundError):
                continue
            if lock_state(lock.fileno()) != "held" and is_same_file(path / _LOCK, lock):
                return path, lock
            lock.close()  # another process has taken the folder for abandoned before it was locked
        raise AssertionError

    @property
    def is_own(self) -> bool:
        """Whether this process has made the folder; False in a fork of that process."""
        return os.getpid() == self._owner

    def remove(self) -> None:
        """Remove the folder with its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)  # network file systems keep files that are open, under other names


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of tables whose processes have ended without removing them, if the file system has locks."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open("rb+") as file:
                if lock_state(file.fileno()) == "locked":
                    shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # it belongs to somebody else, or has just gone
