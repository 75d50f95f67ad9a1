"""What is read, as streams of bytes: files plain or compressed, files in tar archives, standard input.

What a file is, is told by its first bytes and not by its name.
"""

import gzip
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from hostdev.core.errors import HostdevError, TransientError, UserError

STANDARD_INPUT = Path("-")
HEAD_BYTES = 1 << 20  # of standard input, that can be looked at before it is read

_BZIP2 = (b"BZh%d" % level + block for level in range(1, 10) for block in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"))
_CODECS = {b"\x1f\x8b": "gzip", **dict.fromkeys(_BZIP2, "bz2"), b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")  # the suffixes of these
_ZIP = b"PK\x03\x04"
_OTHERS = {b"\xfd7zXZ": "xz", _ZIP: "zip", b"7z\xbc\xaf": "7z", b"\x1f\x9d": "compress"}
_OTHER_SUFFIXES = {".xz": "xz", ".zip": "zip", ".7z": "7z", ".z": "compress"}
_TAR_MAGIC, _TAR_AT = b"ustar", 257
_MAGIC_BYTES = 512
_LARGEST_EMPTY = 512  # bytes of a compressed file that may have nothing in it
_ERRORS = (OSError, EOFError, pa.ArrowException, tarfile.TarError, zlib.error)  # of what is read
_SKIPPED_AT_ONCE = 1 << 22


class Stream:
    """An input's bytes in order.

    source    has `read`, and `seek` where it is seekable
    name      in errors
    taken     tells how many bytes of the file have been read so far, compressed as they are
    after     what comes behind it in the file, whose checksum may come last: read, too, at the end
    """

    def __init__(
        self, source: Any, name: str, taken: Callable[[], int], *, seekable: bool = False, after: "Stream | None" = None
    ) -> None:
        self._source, self._name, self._seekable, self._after = source, name, seekable, after
        self.taken = taken

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end.

        Raises UserError where they cannot be read, TransientError where that is not for what they are.
        """
        pieces: list[bytes] = []
        while size > 0:
            try:
                piece = bytes(self._source.read(size))
            except _ERRORS as error:
                raise unreadable(self._name, "the file cannot be read", error) from None
            if not piece:
                after, self._after = self._after, None
                while after is not None and after.read(_SKIPPED_AT_ONCE):
                    pass
                break
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, size: int) -> None:
        """Pass over so many bytes. UserError where there are fewer."""
        if self._seekable:
            self._source.seek(size, os.SEEK_CUR)
            return
        if sum(map(len, self.pieces(size))) < size:
            raise UserError(f"{self._name}: the file is shorter than it was; it has changed")

    def pieces(self, size: int) -> Iterator[bytes]:
        """Iterate over the next `size` bytes, some MiB at a time."""
        while size > 0 and (piece := self.read(min(size, _SKIPPED_AT_ONCE))):
            yield piece
            size -= len(piece)


class Input:
    """A file of bytes, a compressed one, or one in an archive.

    path    the file
    wanted  which file of an archive is meant, by its name without folders; None: the only one
    """

    def __init__(self, path: Path, wanted: Callable[[str], bool] | None = None) -> None:
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty")
        self.path, self.name = path, str(path)
        self._codec = _codec_of(path)
        self._wanted = wanted
        with self._decompressed() as stream:
            start = stream.read(_MAGIC_BYTES)
        self._archive = start[_TAR_AT : _TAR_AT + len(_TAR_MAGIC)] == _TAR_MAGIC
        if self._archive:
            self._member = self._find()
            self.name = f"{path}:{self._member}"
        self.plain = self._codec is None and not self._archive
        self.size = path.stat().st_size
        self._seen = _stamp(path)

    @contextmanager
    def open(self) -> Iterator[Stream]:
        """Read it from its beginning."""
        with self._decompressed() as stream:
            if not self._archive:
                yield stream
                return
            with self._reading(), _archive_of(stream) as archive:
                for member in archive:
                    if member.name == self._member:
                        yield Stream(archive.extractfile(member), self.name, stream.taken, after=stream)
                        return
            raise UserError(f"{self.path}: {self._member} is no longer in the archive")

    def head(self, size: int) -> bytes:
        """Return its first bytes."""
        with self.open() as stream:
            return stream.read(size)

    def describe(self) -> dict[str, Any]:
        """Return its absolute path and size."""
        member = {"member": self._member} if self._archive else {}
        return {"file": str(self.path.resolve()), "bytes": self.path.stat().st_size, **member}

    def stamp(self) -> list[Any] | None:
        """Return what changes with the file; None where it can be read once only."""
        return [str(self.path.resolve()), *_stamp(self.path)]

    def check_unchanged(self) -> None:
        """Raise UserError if the file has changed since this was made."""
        if _stamp(self.path) != self._seen:
            raise UserError(f"{self.path}: the file changed while it was read; run again once it is still")

    @contextmanager
    def _decompressed(self) -> Iterator[Stream]:
        with self.path.open("rb", buffering=0 if self._codec is None else -1) as file:
            if self._codec is None:
                yield Stream(file, str(self.path), file.tell, seekable=True)
                return
            with _decompressing(file, self._codec, padded=_ends_in_zero(file)) as source:
                yield Stream(source, str(self.path), file.tell)

    def _find(self) -> str:
        """Return the name of the archive's file that is meant."""
        names: list[str] = []
        with self._decompressed() as stream, self._reading(), _archive_of(stream) as archive:
            for member in archive:
                name = str(member.name)
                base = name.rpartition("/")[2]
                if not member.isfile() or base.startswith("."):
                    continue
                if self._wanted is not None and self._wanted(base):
                    return name
                names.append(name)
        if self._wanted is None and len(names) == 1:
            return names[0]
        shown = ", ".join(names[:10]) or "no file"
        meant = "a train.txt is looked for" if self._wanted is not None else "one file is expected"
        raise UserError(f"{self.path}: {meant} in the archive, which has {shown}; unpack the one that is meant")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"{self.path}: the archive cannot be read ({_reason(error)})") from None


class ReadOnce:
    """Standard input or a named pipe, plain or compressed: what is looked at before is kept for reading."""

    plain, size = False, 0

    def __init__(self, path: Path, source: BinaryIO) -> None:
        self.path, self.name = path, "standard input" if path == STANDARD_INPUT else str(path)
        raw = _Counted(source)
        start = raw.peek(_MAGIC_BYTES)
        if not start:
            raise UserError(f"{self.name}: the file is empty")
        codec = _codec(start, self.name)
        decompressed = raw if codec is None else _decompressing(raw, codec, padded=True)
        self._stream = Stream(decompressed, self.name, lambda: raw.taken)
        self._head = self._stream.read(HEAD_BYTES)
        if self._head[_TAR_AT : _TAR_AT + len(_TAR_MAGIC)] == _TAR_MAGIC:
            raise UserError(
                f"{self.name}: this is a tar archive; give it as a file, or only the file in it that is meant"
            )

    @contextmanager
    def open(self) -> Iterator[Stream]:
        """Read it, once."""
        yield Stream(_Rest(self._head, self._stream), self.name, self._stream.taken)

    def head(self, size: int) -> bytes:
        """Return its first bytes, at most HEAD_BYTES."""
        return self._head[:size]

    def describe(self) -> dict[str, Any]:
        """Return that it was `-`, or the pipe."""
        return {"file": str(self.path)}

    def stamp(self) -> list[Any] | None:
        """Return that it can be read once only."""
        return None

    def check_unchanged(self) -> None:
        """It is read once."""


AnyInput = Input | ReadOnce


def open_input(path: Path, wanted: Callable[[str], bool] | None = None) -> AnyInput:
    """Return a file, or standard input for "-"; UserError where there is none, or nothing in it."""
    if path == STANDARD_INPUT:
        if sys.stdin is None:  # as with <&-
            raise UserError("standard input is closed; give it to the command, as with < FILE, or name a file")
        return ReadOnce(path, sys.stdin.buffer)
    return ReadOnce(path, path.open("rb")) if path.is_fifo() else Input(path, wanted)


def unreadable(name: str, what: str, error: Exception) -> HostdevError:
    """Return the error for a file that cannot be read: TransientError where the system says so, and not its content."""
    if isinstance(error, MemoryError):
        return TransientError(f"{name}: there is not enough memory to read the file ({_reason(error)})")
    if isinstance(error, OSError) and error.errno is not None:
        return TransientError(f"{name}: the file cannot be read ({error.strerror})")
    return UserError(f"{name}: {what} ({_reason(error)})")


def refuse_unread(path: Path, start: bytes) -> None:
    """Raise UserError for a file that is compressed as none that is read, by its name or its first bytes."""
    by_name = _OTHER_SUFFIXES.get(path.suffix.lower())
    if by_name is not None:
        raise _not_read(by_name, str(path))
    if not (start.startswith(_ZIP) and path.suffix):  # much else is a zip file: .xlsx, .npz
        _codec(start, str(path))


def is_empty(path: Path) -> bool:
    """Tell whether nothing is in a file, compressed or not, as in those that Spark writes for parts without rows."""
    if not path.is_file() or path.stat().st_size > _LARGEST_EMPTY:
        return False
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        codec = next((codec for magic, codec in _CODECS.items() if file.peek(_MAGIC_BYTES).startswith(magic)), None)
        if codec is None:
            return False
        try:
            return not _decompressing(file, codec, padded=True).read(1)
        except _ERRORS:  # which are told when it is read
            return False


def _codec_of(path: Path) -> str | None:
    with path.open("rb") as file:
        return _codec(file.read(_MAGIC_BYTES), str(path))


def _codec(start: bytes, name: str) -> str | None:
    for magic, other in _OTHERS.items():
        if start.startswith(magic):
            raise _not_read(other, name)
    return next((codec for magic, codec in _CODECS.items() if start.startswith(magic)), None)


def _decompressing(file: Any, codec: str, *, padded: bool = False) -> Any:
    """Return the content of a compressed file; padded: zeros may come after it, which Arrow cannot pass over."""
    if codec == "gzip" and padded:
        return gzip.GzipFile(fileobj=file, mode="rb")
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)


def _ends_in_zero(file: BinaryIO) -> bool:
    """Tell whether the last byte is zero: padding, or a length; Arrow decompresses the others a fifth faster."""
    file.seek(-1, os.SEEK_END)
    last = file.read(1)
    file.seek(0)
    return last == b"\0"


def _not_read(other: str, name: str) -> UserError:
    return UserError(f"{name}: {other} files are not read; decompress it, or write it as .gz or .zst")


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _archive_of(stream: Any) -> tarfile.TarFile:
    """Return the archive that a stream has, to be read in order."""
    return tarfile.open(fileobj=stream, mode="r|")


class _Counted:
    """A source of bytes that counts them, and of which the first can be looked at."""

    closed = False

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._start = source, b""
        self.taken = 0

    def peek(self, size: int) -> bytes:
        self._start += self._source.read(size - len(self._start))
        return self._start

    def read(self, size: int) -> bytes:
        piece, self._start = (self._start[:size], self._start[size:]) if self._start else (self._source.read(size), b"")
        self.taken += len(piece)
        return piece

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Somebody else's."""


class _Rest:
    """Bytes that were looked at, and then the rest."""

    def __init__(self, head: bytes, rest: Stream) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int) -> bytes:
        piece, self._head = (self._head[:size], self._head[size:]) if self._head else (self._rest.read(size), b"")
        return piece
