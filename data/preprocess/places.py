"""Access to files of raw rows, on this machine or in an object store, by paths from `addresses.source_path`.

Files of a store are read as streams, without a copy on this machine.
"""

import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from hostdev.core.addresses import address_of, shown_place
from hostdev.core.errors import UserError
from hostdev.core.stores import About, Store

_FIRST, _MOST = 1 << 16, 1 << 23  # bytes of a stream's first request, and maximum bytes of a later one
_AHEAD = 2  # maximum number of prefetched requests


def is_file(path: Path) -> bool:
    """Return whether there is a file at a path."""
    return path.is_file() if address_of(path) is None else about_in_store(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether there is a folder at a path; a store has only folders with files."""
    return path.is_dir() if address_of(path) is None else bool(names_below(path))


def files_below(path: Path) -> list[Path]:
    """Return the files below a folder in a store."""
    return [path / name for name in names_below(path)]


def stamp(path: Path) -> tuple[int, Any]:
    """Return a file's size, and its modification time in nanoseconds or, in a store, its version."""
    if address_of(path) is None:
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    about = about_in_store(path)
    if about is None:
        raise UserError(f"{shown_place(path)}: no such file")
    return about.size, about.version


def whole_path(path: Path) -> str:
    """Return a file's absolute path, or its address in a store."""
    return address_of(path) or str(path.resolve())


def open_bytes(path: Path, *, buffered: bool = True) -> BinaryIO:
    """Open a file for reading."""
    if address_of(path) is None:
        return path.open("rb", buffering=-1 if buffered else 0)
    file = StoreFile(path, stamp(path)[0])
    return cast(BinaryIO, io.BufferedReader(file) if buffered else file)


def open_arrow(path: Path, *, mapped: bool = False) -> Any:
    """Open a file for Arrow's readers; if `mapped`, a file of this machine is mapped into memory."""
    if address_of(path) is not None:
        return pa.PythonFile(open_bytes(path), mode="r")
    return pa.memory_map(os.fsencode(path)) if mapped else pa.OSFile(os.fsencode(path))


def identities(paths: list[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield each path with a value that two paths of the same file share; skip files missing on this machine."""
    for path in paths:
        if (address := address_of(path)) is not None:
            yield path, address
        elif path.exists():
            found = path.stat()
            yield path, (found.st_dev, found.st_ino)


@lru_cache(maxsize=64)
def _store(address: str) -> Store:
    return Store(address)


def _find(path: Path) -> tuple[Store, str]:
    """Return the store of a file's folder, and the file's name; raise UserError for any other path."""
    address = address_of(path)
    if address is None or "/" not in address.partition("://")[2]:
        raise UserError(f"{address or path} is not the address of a file; give one such as s3://BUCKET/FOLDER/FILE")
    above, _, name = address.rpartition("/")
    return _store(above), name


def about_in_store(path: Path) -> About | None:
    """Return the facts about a file in a store, given its path from `source_path`; None if there is no such file."""
    if (address := address_of(path)) is not None and "/" not in address.partition("://")[2]:
        return None  # a bucket is no file
    store, name = _find(path)
    return store.about(name)


def names_below(path: Path) -> list[str]:
    """Return the names, relative to a folder in a store, of the files below it; [] if there is no such folder."""
    address = address_of(path)
    assert address is not None
    return sorted(name for name in _store(address).list() if name)


class StoreFile(io.RawIOBase):
    """A file in a store. If it is read in order, the next bytes are prefetched.

    Args:
        path: The file's path, from `source_path`.
        size: The file's size in bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._store, self._file = _find(path)
        self._size, self._at, self._next = size, 0, 0
        self._window = _FIRST
        self._start, self._content = 0, b""
        self._coming: list[tuple[int, int, Future[bytes]]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position; see `io.IOBase.seek`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read up to the buffer's size; see `io.RawIOBase.readinto`."""
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size - self._at)
        if wanted <= 0:
            return 0
        if not self._start <= self._at < self._start + len(self._content):
            self._fill(wanted)
        begin = self._at - self._start
        piece = self._content[begin : begin + wanted]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _fill(self, wanted: int) -> None:
        """Get the content at the position, by a prefetched request or a new one."""
        in_order = self._at == self._next
        if in_order and self._coming and self._coming[0][0] == self._at:
            start, stop, coming = self._coming.pop(0)
            self._start, self._content = start, coming.result()
        else:
            self._drop()
            self._window = min(_MOST, 2 * self._window) if in_order else _FIRST
            stop = min(self._size, self._at + max(self._window, min(wanted, _MOST)))
            self._start, self._content = self._at, self._get(self._at, stop)
        self._next = stop
        if in_order:
            self._read_ahead()

    def _read_ahead(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AHEAD, "hostdev-source")
        end = self._coming[-1][1] if self._coming else self._next
        while len(self._coming) < _AHEAD and end < self._size:
            self._window = min(_MOST, 2 * self._window)
            start, end = end, min(self._size, end + self._window)
            self._coming.append((start, end, self._pool.submit(self._get, start, end)))

    def _get(self, start: int, stop: int) -> bytes:
        return self._store.read_range(self._file, start, stop, self._stop)

    def _drop(self) -> None:
        for _, _, coming in self._coming:
            coming.cancel()
        self._coming = []

    def close(self) -> None:
        """Stop prefetching, and close the file."""
        if not self.closed:
            self._stop.set()
            self._drop()
            if self._pool is not None:
                self._pool.shutdown(wait=True)
        super().close()
