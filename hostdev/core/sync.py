"""Copying of files to a store and from it.

Results are written on this machine first, then copied. Copies of a store's files are on the local disk in a folder of
bounded size, which all processes of a host share.

A copy's name is its SHA-256, so that data sets with the same file share its copy. The copies that were used longest
ago are removed first. A copy that is removed while it is mapped into memory can be read until it is unmapped.
"""

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from hostdev.core.addresses import address_of, get_folder
from hostdev.core.errors import ChangedError, StoppedError, StoreError, UserError, in_words, raise_if_transient
from hostdev.core.locks import is_same_file, lock_state, unlock
from hostdev.core.outputs import is_abandoned, is_partial, replacing
from hostdev.core.progress import bar
from hostdev.core.stores import Store
from hostdev.core.workers import call_all

_THREADS = 4
_LOCK = ".lock"
_SHA256 = re.compile("[0-9a-f]{64}")
_SHARE = 0.25  # default limit of the copies, as a share of the free space and the copies together
_PAUSE = 0.05  # seconds between looks at a file that another process fetches
_MOST_REMOVED, _MOST_DAMAGED = 20, 3  # maximum attempts to use a copy that is removed, or is damaged
T = TypeVar("T")


def require_new(path: Path, manifest: str | None = None) -> None:
    """Raise UserError if a store has something at the address of a result; a path of this machine is not checked.

    Args:
        path: From `addresses.result_path`.
        manifest: The file that marks a complete folder; an existing folder without it may be written over. None: any
            existing file counts.
    """
    address = address_of(path)
    if address is None:
        return
    there = Store(address).list()
    if there if manifest is None else manifest in there:
        raise UserError(f"--out {address} exists already; remove it or choose another --out")


@contextmanager
def sending(path: Path, manifest: str | None = None) -> Iterator[None]:
    """Copy the file or folder `path`, which the block creates, to the store if it has an address; then remove it here.

    Args:
        path: From `addresses.result_path`.
        manifest: See `sync`.

    Raises:
        UserError: The store has something at the address, or cannot be written.
    """
    address = address_of(path)
    if address is None:
        yield
        return
    require_new(path)
    _remove(path)  # left by a killed command
    yield
    if path.is_dir():
        sync(path, Store(address), list_files(path), manifest)
    else:
        above, _, name = address.rpartition("/")
        Store(above).put(path, name)
    _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def sync(
    folder: Path,
    store: Store,
    names: Sequence[str],
    manifest: str | None = None,
    done: Callable[[str], None] = lambda name: None,
) -> None:
    """Copy files of a folder to a store, several at a time.

    Args:
        folder: The source.
        store: The target.
        names: The files' paths, relative to both.
        manifest: Files of this name are copied after all others: a folder without them is incomplete for its readers.
        done: Called in the caller's thread with the name of each file that has been copied.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    is_last = {name: name == manifest or name.endswith(f"/{manifest}") for name in names}
    with bar(sum(sizes.values()), f"copying to {store.shown}", "B", unit_scale=True) as progress:
        for turn in (False, True):
            some = [name for name in names if is_last[name] is turn]
            calls = (partial(store.put, folder / name, name) for name in some)
            for name, _ in zip(some, call_all(_THREADS, "hostdev-upload", calls), strict=True):
                done(name)
                progress.update(sizes[name])


def get_limit(folder: Path) -> int:
    """Return the bytes that copies may take: HOSTDEV_STORE_CACHE_SIZE, or 1/4 of the free space plus the copies."""
    text = os.environ.get("HOSTDEV_STORE_CACHE_SIZE", "")
    if text:
        from hostdev.core.memory import parse_bytes  # only here, because it imports NumPy

        try:
            return parse_bytes(text)
        except ValueError as error:
            raise UserError(f"HOSTDEV_STORE_CACHE_SIZE: {error}") from None
    here = sum(size for _, size, _ in _list(folder))
    return int(_SHARE * (shutil.disk_usage(folder).free + here))


class KeptFiles:
    """The copies of stores' files on the local disk. Any thread may call the methods.

    Raises:
        UserError: The folder cannot be made.
    """

    def __init__(self) -> None:
        self.folder = get_folder() / "files"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the folder for files of stores cannot be made ({in_words(error)}); set HOSTDEV_STORE_CACHE to another"
            ) from None
        self.limit = get_limit(self.folder)

    def get(self, store: Store, name: str, sha256: str, stop: threading.Event | None = None) -> Path:
        """Return the path of the copy of a store's file; fetch the file if there is no copy.

        Raises:
            StoppedError: `stop` was set meanwhile.
            StoreError: The file cannot be fetched, or has another SHA-256.
            UserError: The copy cannot be written.
        """
        if not _SHA256.fullmatch(sha256):
            raise StoreError(f"{store.shown}: the manifest has no SHA-256 for {name}; preprocess the data again")
        path, lock = self.folder / sha256, self.folder / f"{sha256}{_LOCK}"
        while not _touch(path):
            try:
                with lock.open("ab") as file:
                    state = lock_state(file.fileno())
                    if state == "held":
                        _wait(stop)
                        continue
                    try:
                        if not is_same_file(lock, file) or _touch(path):
                            continue  # whoever held the lock has fetched the file
                        self._fetch(store, name, sha256, path, stop)
                    finally:
                        if is_same_file(lock, file):
                            lock.unlink(missing_ok=True)
                        if state == "locked":
                            unlock(file)  # a fork of the process may have the file open, too
            except OSError as error:
                raise_if_transient(error)
                raise UserError(
                    f"{store.shown}/{name} cannot be kept in {self.folder} ({in_words(error)}); set "
                    "HOSTDEV_STORE_CACHE to a folder with more space"
                ) from None
        return path

    def use(
        self, store: Store, name: str, sha256: str, use: Callable[[Path], T], stop: threading.Event | None = None
    ) -> T:
        """Return the result of `use`, called with the path of a copy.

        If `use` raises FileNotFoundError, another process has removed the copy to make room; if it raises ChangedError,
        the copy is damaged. In both cases the file is fetched again.

        Raises:
            ChangedError: The copy was damaged several times.
            UserError: The copy was removed too often.
            Exception: As `get` and `use`.
        """
        damaged = 0
        for _ in range(_MOST_REMOVED):
            try:
                return use(self.get(store, name, sha256, stop))
            except FileNotFoundError:
                continue
            except ChangedError:
                damaged += 1
                if damaged == _MOST_DAMAGED:
                    raise
                with contextlib.suppress(OSError):
                    (self.folder / sha256).unlink()
        raise UserError(
            f"{self.folder} has no room for the files that are in use; set HOSTDEV_STORE_CACHE_SIZE to more"
        )

    def _fetch(self, store: Store, name: str, sha256: str, path: Path, stop: threading.Event | None) -> None:
        with replacing(path) as part:
            if not store.fetch_intact(name, part, sha256.__eq__, stop):
                raise StoreError(
                    f"{store.shown}/{name} has a wrong checksum: it is damaged or was changed; preprocess the data "
                    "again"
                )
        self._make_room(path)

    def _make_room(self, newest: Path) -> None:
        """Remove the copies that were used longest ago, until the others are within the limit."""
        files = sorted(_list(self.folder))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.limit:
                return
            if path != newest:
                try:
                    path.unlink(missing_ok=True)  # another process may make room, too
                except OSError:
                    continue
                total -= size


def _touch(path: Path) -> bool:
    """Set the time of a copy's last access to now; return whether the copy exists."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        with contextlib.suppress(OSError):  # the file belongs to another user
            os.utime(file, ns=(time.time_ns(), os.fstat(file).st_mtime_ns))  # a new mtime would look like a change
    finally:
        os.close(file)
    return True


def _wait(stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(_PAUSE)
    elif stop.wait(_PAUSE):
        raise StoppedError


def _list(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (time of last use in ns, bytes, path) of each copy and of each file that a killed process has left."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            state = path.stat()
            if path.suffix != _LOCK and (not is_partial(path) or is_abandoned(state)):
                found.append((state.st_atime_ns, state.st_size, path))
    return found
