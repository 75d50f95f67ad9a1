"""Inputs as byte streams: plain or compressed files, files in tar and zip archives, standard input.

A file's first bytes, and not its name, determine its format.
"""

import gzip
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from hostdev.core.addresses import shown_place
from hostdev.core.errors import HostdevError, TransientError, UserError
from hostdev.data.preprocess import places

STANDARD_INPUT = Path("-")
HEAD_BYTES = 1 << 20  # maximum bytes that `ReadOnce.head` returns

_BZIP2 = (b"BZh%d" % level + block for level in range(1, 10) for block in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"))
_CODECS = {b"\x1f\x8b": "gzip", **dict.fromkeys(_BZIP2, "bz2"), b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")  # suffixes of the codecs
_OTHERS = {b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z", b"\x1f\x9d": "compress"}
_OTHER_SUFFIXES = {".xz": "xz", ".7z": "7z", ".z": "compress"}
_ZIP_MAGIC, _MAC_FOLDER = b"PK\x03\x04", "__MACOSX/"  # a folder that macOS adds to archives
_TAR_MAGIC, _TAR_AT = b"ustar", 257
_MAGIC_BYTES = 512
_LARGEST_EMPTY = 512  # largest size in bytes of a compressed file with empty content
_ERRORS = (OSError, EOFError, pa.ArrowException, tarfile.TarError, zlib.error, zipfile.BadZipFile)  # raised by reading
_SKIPPED_AT_ONCE = 1 << 22
_SHOWN = 10  # maximum number of an archive's names in a message


class Stream:
    """An input's bytes in order.

    Args:
        source: An object with `read`, and `seek` if `seekable`.
        name: The source's name in error messages.
        taken: Called to get the number of bytes read from the file so far, before decompression.
        after: A stream that is read to its end after `source`, to verify a trailing checksum.
    """

    def __init__(
        self, source: Any, name: str, taken: Callable[[], int], *, seekable: bool = False, after: "Stream | None" = None
    ) -> None:
        self._source, self._name, self._seekable, self._after = source, name, seekable, after
        self.taken = taken

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end.

        Raises UserError for unreadable content, and TransientError for system errors.
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
        """Skip `size` bytes; raise UserError if there are fewer, unless the source is seekable."""
        if self._seekable:
            self._source.seek(size, os.SEEK_CUR)
            return
        if sum(map(len, self.pieces(size))) < size:
            raise UserError(f"{self._name}: the file became shorter; run again once nothing writes to it")

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes, fewer only at the end, a few MiB at a time."""
        while size > 0 and (piece := self.read(min(size, _SKIPPED_AT_ONCE))):
            yield piece
            size -= len(piece)


class InputFile:
    """A plain or compressed file, or a file in a tar or zip archive.

    `wanted` is called with the name of each file in an archive, without folders, to select one; None requires that
    the archive has only one file.
    """

    def __init__(self, path: Path, wanted: Callable[[str], bool] | None = None) -> None:
        shown = shown_place(path)
        if not places.is_file(path):
            raise UserError(f"{shown}: no such file")
        self._seen = places.stamp(path)
        self.size = self._seen[0]
        if self.size == 0:
            raise UserError(f"{shown}: the file is empty")
        self.path, self.name = path, shown
        with places.open_bytes(path) as file:
            self._codec, self._zipped = _codec(file.read(_MAGIC_BYTES), shown), ""
        self._wanted = wanted
        if self._codec == "zip":
            self._zipped = _find_zipped(path, wanted)
            self.name = f"{shown}:{self._zipped}"
        with self._decompressed() as stream:
            start = stream.read(_MAGIC_BYTES)
        self._archive = start[_TAR_AT : _TAR_AT + len(_TAR_MAGIC)] == _TAR_MAGIC
        if self._archive:
            self._member = self._find()
            self.name = f"{shown}:{self._member}"
        self.plain = self._codec is None and not self._archive

    @contextmanager
    def open(self) -> Iterator[Stream]:
        """Open the content from its beginning."""
        with self._decompressed() as stream:
            if not self._archive:
                yield stream
                return
            with self._reading(), _open_archive(stream) as archive:
                for member in archive:
                    if member.name == self._member:
                        yield Stream(archive.extractfile(member), self.name, stream.taken, after=stream)
                        return
            raise UserError(
                f"{self.path}: {self._member} is no longer in the archive; run again once nothing writes to it"
            )

    def head(self, size: int) -> bytes:
        """Return the first `size` bytes."""
        with self.open() as stream:
            return stream.read(size)

    def describe(self) -> dict[str, Any]:
        """Return the absolute path and the size and, for an archive, the name of the file in it."""
        member = {"member": self._member} if self._archive else {"member": self._zipped} if self._zipped else {}
        return {"file": places.whole_path(self.path), "bytes": places.stamp(self.path)[0], **member}

    def stamp(self) -> list[Any] | None:
        """Return path, size and modification time; for a file in a store, its address, size and version."""
        return [places.whole_path(self.path), *places.stamp(self.path)]

    def check_unchanged(self) -> None:
        """Raise UserError if the file has changed since construction."""
        if places.stamp(self.path) != self._seen:
            raise UserError(
                f"{shown_place(self.path)}: the file changed while it was read; run again once nothing writes to it"
            )

    @contextmanager
    def _decompressed(self) -> Iterator[Stream]:
        with places.open_bytes(self.path, buffered=self._codec is not None) as file:
            if self._zipped:
                with zipfile.ZipFile(file) as archive, archive.open(self._zipped) as content:
                    yield Stream(content, self.name, file.tell)
                return
            if self._codec is None:
                yield Stream(file, shown_place(self.path), file.tell, seekable=True)
                return
            with _decompressing(file, self._codec, padded=_ends_in_zero(file)) as source:
                yield Stream(source, shown_place(self.path), file.tell)

    def _find(self) -> str:
        """Return the name of the selected file in the archive."""
        names: list[str] = []
        with self._decompressed() as stream, self._reading(), _open_archive(stream) as archive:
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
        shown = ", ".join(names[:_SHOWN]) or "no file"
        expected = "a train.txt" if self._wanted is not None else "a single file"
        raise UserError(f"{self.path}: the archive must have {expected}, but has {shown}; unpack the file you need")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"{self.path}: the archive cannot be read ({_reason(error)})") from None


class ReadOnce:
    """Standard input or a named pipe, plain or compressed; its first bytes are buffered for `head`."""

    plain, size = False, 0

    def __init__(self, path: Path, source: BinaryIO) -> None:
        self.path, self.name = path, "standard input" if path == STANDARD_INPUT else str(path)
        raw = _Counted(source)
        start = raw.peek(_MAGIC_BYTES)
        if not start:
            raise UserError(f"{self.name}: the file is empty")
        codec = _codec(start, self.name)
        if codec == "zip":
            raise UserError(f"{self.name}: a .zip archive can be read only from a file, not from a pipe")
        decompressed = raw if codec is None else _decompressing(raw, codec, padded=True)
        self._stream = Stream(decompressed, self.name, lambda: raw.taken)
        self._head = self._stream.read(HEAD_BYTES)
        if self._head[_TAR_AT : _TAR_AT + len(_TAR_MAGIC)] == _TAR_MAGIC:
            raise UserError(f"{self.name}: this is a tar archive; give it as a file, or pipe only the file in it")

    @contextmanager
    def open(self) -> Iterator[Stream]:
        """Open the content; possible only once."""
        yield Stream(_Rest(self._head, self._stream), self.name, self._stream.taken)

    def head(self, size: int) -> bytes:
        """Return the first `size` bytes, or the first HEAD_BYTES if that is less."""
        return self._head[:size]

    def describe(self) -> dict[str, Any]:
        """Return the path, `-` for standard input."""
        return {"file": str(self.path)}

    def stamp(self) -> list[Any] | None:
        """Return None, as the content can be read only once."""
        return None

    def check_unchanged(self) -> None:
        """Do nothing, as the content is read only once."""


AnyInput = InputFile | ReadOnce


def open_input(path: Path, wanted: Callable[[str], bool] | None = None) -> AnyInput:
    """Open a file, or standard input for "-"; raise UserError if it is missing or empty."""
    if path == STANDARD_INPUT:
        if sys.stdin is None:  # the shell closed it with <&-
            raise UserError("standard input is closed; redirect it, as with < FILE, or name a file")
        return ReadOnce(path, sys.stdin.buffer)
    return ReadOnce(path, path.open("rb")) if path.is_fifo() else InputFile(path, wanted)


def unreadable(name: str, what: str, error: Exception) -> HostdevError:
    """Return the error for an unreadable file: TransientError for system errors, UserError for bad content."""
    if isinstance(error, MemoryError):
        return TransientError(f"{name}: there is not enough memory to read the file ({_reason(error)})")
    if isinstance(error, OSError) and error.errno is not None:
        return TransientError(f"{name}: the file cannot be read ({error.strerror})")
    return UserError(f"{name}: {what} ({_reason(error)})")


def refuse_unread(path: Path, start: bytes) -> None:
    """Raise UserError for an unsupported compression, judging by the name or the first bytes of a file."""
    by_name = _OTHER_SUFFIXES.get(path.suffix.lower())
    if by_name is not None:
        raise _not_read(by_name, str(path))
    _codec(start, str(path))


def is_empty(path: Path) -> bool:
    """Return whether a file's content is empty, compressed or not; Spark writes such files for empty partitions."""
    if not places.is_file(path) or (size := places.stamp(path)[0]) > _LARGEST_EMPTY:
        return False
    if size == 0:
        return True
    with places.open_bytes(path) as file:
        start = file.read(_MAGIC_BYTES)
        file.seek(0)
        codec = next((codec for magic, codec in _CODECS.items() if start.startswith(magic)), None)
        if codec is None:
            return False
        try:
            return not _decompressing(file, codec, padded=True).read(1)
        except _ERRORS:  # reported when the content is read
            return False


def _find_zipped(path: Path, wanted: Callable[[str], bool] | None) -> str:
    """Return the name of the file to read in a .zip file.

    `wanted` is called with a file's name without folders, and returns whether this is the file to read. If `wanted` is
    None, the .zip file must have a single file.

    Raises UserError if the .zip file is broken, encrypted, an Excel workbook or a NumPy archive, or if the file
    to read is missing or not unique.
    """
    try:
        with places.open_bytes(path) as file, zipfile.ZipFile(file) as archive:
            members = [
                one for one in archive.infolist() if not one.is_dir() and not one.filename.startswith(_MAC_FOLDER)
            ]
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise UserError(f"{path}: the .zip file cannot be read ({error})") from None
    names = [one.filename for one in members if not one.filename.rpartition("/")[2].startswith(".")]
    if "[Content_Types].xml" in names:
        raise UserError(f"{path}: this is an Excel workbook; save the sheet as CSV")
    if names and all(name.endswith(".npy") for name in names):
        raise UserError(
            f"{path}: this is NumPy's .npz; write its arrays as Parquet, such as pandas.DataFrame(...).to_parquet(...)"
        )
    chosen = [name for name in names if wanted is not None and wanted(name.rpartition("/")[2])] or names
    if len(chosen) != 1 or (wanted is not None and not wanted(chosen[0].rpartition("/")[2])):
        expected = "a train.txt" if wanted is not None else "a single file"
        shown = ", ".join(names[:_SHOWN]) or "no file"
        raise UserError(f"{path}: the .zip file must have {expected}, but has {shown}; unpack the file you need")
    if next(one for one in members if one.filename == chosen[0]).flag_bits & 1:
        raise UserError(f"{path}: the .zip file is encrypted; unpack it with its password")
    return chosen[0]


def _codec(start: bytes, name: str) -> str | None:
    for magic, other in _OTHERS.items():
        if start.startswith(magic):
            raise _not_read(other, name)
    if start.startswith(_ZIP_MAGIC):
        return "zip"
    return next((codec for magic, codec in _CODECS.items() if start.startswith(magic)), None)


def _decompressing(file: Any, codec: str, *, padded: bool = False) -> Any:
    """Return a reader of a compressed file's content; `padded` allows trailing zeros, which Arrow cannot skip."""
    if codec == "gzip" and padded:
        return gzip.GzipFile(fileobj=file, mode="rb")
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)


def _ends_in_zero(file: BinaryIO) -> bool:
    """Return whether the last byte is zero, as in a padded file. If it is not, Arrow's faster reader can be used."""
    file.seek(-1, os.SEEK_END)
    last = file.read(1)
    file.seek(0)
    return last == b"\0"


def _not_read(other: str, name: str) -> UserError:
    return UserError(f"{name}: {other} files are not supported; decompress the file, or compress it as .gz or .zst")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _open_archive(stream: Any) -> tarfile.TarFile:
    """Open a stream as an archive for sequential reading."""
    return tarfile.open(fileobj=stream, mode="r|")


class _Counted:
    """A byte source that counts the bytes read; `peek` returns the first bytes without counting them."""

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
        """Do nothing, as the caller owns the source."""


class _Rest:
    """The buffered head, then the rest of the stream."""

    def __init__(self, head: bytes, rest: Stream) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int) -> bytes:
        piece, self._head = (self._head[:size], self._head[size:]) if self._head else (self._rest.read(size), b"")
        return piece
