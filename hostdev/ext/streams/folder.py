"""The folder in which files arrive, on this machine or in a store: listing, opening, detection of incomplete files."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from hostdev.core.addresses import address_of
from hostdev.core.errors import StoreError, UserError
from hostdev.core.stores import Store
from hostdev.data.preprocess import places
from hostdev.data.preprocess.folders import order_by_name

_HIDDEN = (".", "_")  # beginnings of names that other programs use while they write
_PARTIAL = (".part", ".partial", ".tmp")  # endings of names that other programs use while they write
_FILE_SYSTEMS = "hdfs:", "webhdfs:", "sftp:", "ftp:", "smb:"  # stores that list a file while it is written
_MOST_NAMES = 1 << 14  # maximum number of names whose sort keys and hashes are cached

Key = tuple[list[tuple[int, str]], str]
_STREAM, _STREAM_ENDS = b"\xff\xff\xff\xff", (b"\xff\xff\xff\xff\0\0\0\0",)  # beginning and end of an Arrow stream
# Formats whose readers refuse a file without its end: Parquet, Arrow, gzip, bzip2, zstd, lz4, zip.
_CHECKED = b"PAR1", b"ARROW1", b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"PK"


@lru_cache(_MOST_NAMES)
def hash_of(name: str) -> int:
    """Return 64 bits that stand for a name; two of a million names are equal with a probability of 3e-8."""
    return _bits(name)


def _bits(text: str) -> int:
    return int.from_bytes(blake2b(os.fsencode(text), digest_size=8).digest(), "little")


class FileState(NamedTuple):
    """A file's size in bytes and time of modification in nanoseconds, which change when the file is written to.

    `identity` also changes when another file takes the file's place.
    """

    size: int
    modified: int
    identity: str = ""

    @property
    def stamp(self) -> int:
        """63 bits that stand for the size and the identity."""
        return _bits(f"{self.size} {self.identity}") >> 1


@lru_cache(_MOST_NAMES)
def key_of(name: str) -> Key:
    """Return the sort key of a file's name: numbers in names are compared as numbers, as `preprocess` does."""
    return order_by_name(name)


class Folder:
    """A folder in which files arrive.

    A file is listed under its path below the folder, with "/" between parts. Names that begin with "." or "_", or end
    in .part, .partial or .tmp, are of files that are still being written, and are not listed.

    Args:
        path: The folder.
        mark: The name of a file, such as _SUCCESS, that a writer puts into a complete sub-folder. Only the files
            directly in such a sub-folder are listed. It may be at any depth, but not below another one with a mark.
            None to list the files of the folder itself.

    Raises:
        UserError: The folder does not exist.
    """

    most_looked = 512  # known files whose states are compared in each look, besides those that are changing

    def __init__(self, path: Path, mark: str | None = None) -> None:
        if not path.is_dir():
            raise UserError(f"--follow {path}: there is no such folder; create it, or name another")
        self.path, self.mark = path, mark

    @property
    def must_settle(self) -> bool:
        """Whether a listed file may still be growing."""
        return self.mark is None

    def names(self) -> list[str]:
        """Return the names of the files, sorted; raise OSError if the folder cannot be listed."""
        names = [name for name in self._list() if not any(map(_is_hidden, name.split("/")[:-1]))]
        if self.mark is None:
            names = [name for name in names if "/" not in name]
        else:
            marked = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == self.mark} - {""}
            tops = {folder for folder in marked if not marked.intersection(_parents(folder))}
            names = [name for name in names if name.rpartition("/")[0] in tops and name.rpartition("/")[2] != self.mark]
        return sorted((name for name in names if name and not _is_hidden(name.rpartition("/")[2])), key=key_of)

    def _list(self) -> Iterable[str]:
        """Return the names of all files; without a mark, those in sub-folders may be left out."""
        if self.mark is None:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_file()]
        names = []
        for folder, folders, files in os.walk(self.path, onerror=_raise, followlinks=True):
            folders[:] = [name for name in folders if not _is_hidden(name)]
            names += [(Path(folder) / name).relative_to(self.path).as_posix() for name in files]
        return names

    def state(self, name: str) -> FileState | None:
        """Return a file's state, or None if it no longer exists; raise OSError if it cannot be read."""
        try:
            found = self.open(name).stat()
        except FileNotFoundError:
            return None
        return FileState(found.st_size, found.st_mtime_ns, f"{found.st_mtime_ns} {found.st_ino}")

    def open(self, name: str) -> Path:
        """Return the path under which a file can be read. The file may no longer exist."""
        return self.path / name

    def has_folders(self) -> bool:
        """Return whether the folder has sub-folders whose files are not listed."""
        with os.scandir(self.path) as entries:
            return self.mark is None and any(not _is_hidden(entry.name) and entry.is_dir() for entry in entries)


class StoreFolder(Folder):
    """A folder in a store; see `Folder`. An object store lists a file only when it is complete."""

    most_looked = 32  # fewer than in a local folder: each takes a request

    def __init__(self, path: Path, mark: str | None = None) -> None:
        address = address_of(path)
        assert address is not None
        self.path, self.mark, self._store = path, mark, Store(address)
        self._is_of_objects = not address.startswith(_FILE_SYSTEMS)

    @property
    def must_settle(self) -> bool:
        """Whether a listed file may still be growing."""
        return self.mark is None and not self._is_of_objects

    def _list(self) -> Iterable[str]:
        with _as_os_error():
            return self._store.list()

    def state(self, name: str) -> FileState | None:
        """Return a file's state, or None if it no longer exists; raise OSError if it cannot be read."""
        with _as_os_error():
            found = self._store.about(name)
        return None if found is None else FileState(found.size, found.changed, found.version)

    def has_folders(self) -> bool:
        """Return whether the folder has sub-folders whose files are not listed."""
        return self.mark is None and any("/" in name for name in self._store.list())


def open_folder(path: Path, mark: str | None = None) -> Folder:
    """Return the folder with this `source_path`, on this machine or in a store; see `Folder`."""
    return Folder(path, mark) if address_of(path) is None else StoreFolder(path, mark)


def _raise(error: OSError) -> None:
    raise error


def _parents(folder: str) -> list[str]:
    parts = folder.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise OSError in place of StoreError."""
    try:
        yield
    except StoreError as error:
        raise OSError(str(error)) from None


def _is_hidden(name: str) -> bool:
    return name.startswith(_HIDDEN) or name.endswith(_PARTIAL)


def has_end(path: Path) -> bool:
    """Return whether a file has its end: a text a line break, an Arrow stream its last message.

    True for formats whose readers refuse a file without its end. False for an empty file.
    """
    with places.open_bytes(path) as file:
        start = file.read(8)
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8))
        last = file.read(8)
    if start.startswith(_CHECKED):
        return True
    if start.startswith(_STREAM):
        return last.endswith(_STREAM_ENDS)
    return last.rstrip(b"\0").endswith(b"\n")  # in UTF-16, a zero byte may follow


def ends_line(path: Path, nbytes: int) -> bool:
    """Return whether the first `nbytes` bytes of a text end with a line."""
    with places.open_bytes(path) as file:
        file.seek(max(0, nbytes - 4))
        return file.read(min(4, nbytes)).rstrip(b"\0").endswith(b"\n")
