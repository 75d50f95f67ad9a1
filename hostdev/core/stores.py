"""Folders in stores. A package adds a kind of store by a class for its URL scheme; all other code is shared.

    [project.entry-points."hostdev.store"]
    mystore = "package.module:MyBackend"       # for addresses such as mystore://BUCKET/FOLDER

`Store` retries failed operations for a limited time, and requests damaged content again. fsspec handles
the schemes that no package registers. `Patience` repeats failing work with growing pauses, up to a time limit.
"""

import contextlib
import errno
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from hashlib import md5
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from hostdev.core import registry
from hostdev.core.addresses import without_secrets
from hostdev.core.checksums import HashedFile, is_whole_json
from hostdev.core.errors import HostdevError, StoppedError, StoreError, in_words, raise_if_transient, write_stderr
from hostdev.core.workers import run_in_thread

LONGEST_SECONDS = 300.0  # time limit of all attempts, unless HOSTDEV_STORE_PATIENCE is set
_PAUSES = 0.5, 30.0  # seconds: the first pause, which each attempt doubles, and the longest
_POLL_SECONDS = 0.2  # between checks whether the result is still needed

T = TypeVar("T")
KIND, DEFAULT = "store", "fsspec"  # the kind in `core.registry`, and the default name
_PIECE = 1 << 23  # maximum bytes of a request
_MD5 = re.compile(r"([0-9a-f]{32})(?:-(\d+))?")
_PART_SIZES = 5, 8, 16, 50, 64, 100, 5120  # MiB, usual part sizes of multipart uploads
_DAMAGED = "an answer had a wrong checksum"
_SAME = 3  # arrivals of the same wrong content after which the stored file itself counts as damaged
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_PERMANENT_NUMBERS = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EREMCHG if hasattr(errno, "EREMCHG") else -1}


class Patience:
    """The pauses between attempts at one piece of work.

    Args:
        where: The thing that fails, for messages.
        is_transient: Returns whether an error may go away.
        describe: Returns an error as text that may be shown.
    """

    def __init__(
        self, where: str, is_transient: Callable[[Exception], bool], describe: Callable[[Exception], str]
    ) -> None:
        self._where, self._is_transient, self._describe = where, is_transient, describe
        self._begin, self._pause = time.monotonic(), _PAUSES[0]

    def wait(self, error: Exception, stop: threading.Event | None = None) -> None:
        """Pause after an error; return early when `stop` is set.

        Raises:
            StoreError: The error is permanent, or attempts have gone on for as long as allowed.
            TransientError: This machine lacks memory or file descriptors.
        """
        raise_if_transient(error)
        where, why = self._where, self._describe(error)
        if not self._is_transient(error):
            raise StoreError(f"{where}: {why}") from None
        seconds = time.monotonic() - self._begin
        remaining = _get_limit() - seconds
        if remaining <= 0:
            raise StoreError(
                f"{where}: {why}; this went on for {seconds:.0f} s; repeat the command when the store can be reached",
                is_transient=True,
            ) from None
        pause = min(self._pause, max(remaining, 0.05))
        if pause > _PAUSES[0]:  # a single failure is usual and not reported
            write_stderr(f"{where}: {why}; trying again in {pause:.0f} s, for {remaining:.0f} s at most")
        if stop is None:
            time.sleep(pause)
        else:
            stop.wait(pause)
        self._pause = min(2 * pause, _PAUSES[1])

    def repeat(self, work: Callable[[], T], stop: threading.Event | None = None) -> T:
        """Return the result of `work`, which is called again after each transient error.

        Raises:
            StoppedError: `stop` was set meanwhile.
            Exception: As `wait`.
        """
        while True:
            if stop is not None and stop.is_set():
                raise StoppedError
            try:
                return _call_abandonable(work, stop)
            except StoppedError:
                raise
            except Exception as error:
                self.wait(error, stop)


def _call_abandonable(work: Callable[[], T], stop: threading.Event | None) -> T:
    """Return the result of `work`, run in its own thread; when `stop` is set, abandon the thread, which may hang."""
    asked = run_in_thread("hostdev-store", work)
    while not wait([asked], _POLL_SECONDS).done:
        if stop is not None and stop.is_set():
            raise StoppedError
    return asked.result()


def _get_limit() -> float:
    text = os.environ.get("HOSTDEV_STORE_PATIENCE", "")
    try:
        return float(text) if text else LONGEST_SECONDS
    except ValueError:
        raise StoreError(f"HOSTDEV_STORE_PATIENCE must be a number of seconds, not {text!r}") from None


class About(NamedTuple):
    """The facts about a file in a store.

    Attributes:
        size: Bytes.
        version: A text that differs if the file is replaced.
        changed: Time of the last change in nanoseconds since 1970; 0 if the store does not report it.
        md5: The MD5 of the content in hexadecimal; or, as in S3, the MD5 of the parts' MD5s, a hyphen, and the number
            of parts; any other text if the store keeps no MD5.
    """

    size: int
    version: str
    changed: int = 0
    md5: str = ""


class StoreBackend(Protocol):
    """The interface of a kind of store: one attempt at each operation, in a folder of the store.

    File names are relative to the folder, such as "a/b"; `name` is "" for the folder itself. Any thread may call the
    methods; a forked process creates its own backend. `hostdev.testing.check_store` checks a backend.

    Args:
        address: The folder's address, without a slash at the end.

    Raises:
        StoreError: The address is invalid, or a package is missing.
    """

    def __init__(self, address: str) -> None: ...

    def about(self, name: str) -> About | None:
        """Return the facts about a file as they are now; None if there is no such file."""

    def list(self, name: str) -> dict[str, About]:
        """Return all files below a folder as they are now, by their names within it; {} if there is no such folder."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of a file; raise FileNotFoundError if there is no such file."""

    def put(self, path: Path, name: str) -> None:
        """Copy a file of this machine to the store; the copy appears when complete, and replaces an existing file."""

    def copy(self, source: str, name: str) -> None:
        """Copy a file within the store."""

    def remove(self, name: str) -> None:
        """Remove a file; for a missing one, FileNotFoundError may be raised."""

    @staticmethod
    def is_transient(error: Exception) -> bool:
        """Return whether an error may go away: by default, any OSError that is not known to be permanent."""
        if not isinstance(error, OSError) or isinstance(error, _PERMANENT):
            return False
        return error.errno not in _PERMANENT_NUMBERS and "Forbidden" not in str(error)

    @staticmethod
    def describe(error: Exception) -> str:
        """Return an error as short text."""
        text = without_secrets(in_words(error))
        if isinstance(error, PermissionError):
            return f"no permission ({text})"
        if isinstance(error, FileNotFoundError):
            return f"there is no such file or bucket ({text})"
        return text


class Store:
    """A folder in a store. Any thread and any forked process may call the methods.

    Args:
        address: An address such as "s3://BUCKET/FOLDER".

    Raises:
        StoreError: The kind of store is unknown, its package is not installed, or it cannot be opened. All methods
            raise it for a permanent error, and after retries are exhausted.
    """

    def __init__(self, address: str) -> None:
        self._address, self.shown = address.rstrip("/"), without_secrets(address).rstrip("/")
        scheme = address.partition("://")[0].lower()
        self._kind: type[StoreBackend] = registry.find(KIND, scheme if scheme in registry.names(KIND) else DEFAULT)
        self._open()

    def _open(self) -> None:
        try:
            self._opened = self._kind(self._address)
        except HostdevError:
            raise
        except Exception as error:  # each package has its own exceptions
            raise StoreError(f"{self.shown}: {self._describe(error)}") from None
        self._owner = os.getpid()

    @property
    def backend(self) -> StoreBackend:
        """The backend of this process."""
        if self._owner != os.getpid():  # in a forked process, which lacks the backend's threads
            self._open()
        return self._opened

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        return self._repeat(name, lambda: self.backend.read(name))

    def read_if_there(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is no such file."""

        def get() -> bytes | None:
            try:
                return self.backend.read(name)
            except FileNotFoundError:
                return None

        return self._repeat(name, get)

    def read_manifest(self, name: str, *, without: bool = False) -> bytes | None:
        """Return a file that contains its own checksum (see `is_whole_json`), or None if there is no such file.

        Content with a wrong checksum is requested again, and returned only if the same content arrives three times.
        """
        arrived: Counter[bytes] = Counter()
        patience = self._patience(name)
        while True:
            content = self.read_if_there(name)
            if content is None or is_whole_json(content, without=without):
                return content
            arrived[content] += 1
            if arrived[content] == _SAME:
                return content
            patience.wait(ConnectionError(_DAMAGED))

    def read_range(self, name: str, start: int, stop: int, stopped: threading.Event | None = None) -> bytes:
        """Return bytes [start, stop) of a file."""

        def get() -> bytes:
            content = self.backend.read(name, start, stop)
            if len(content) != stop - start:
                raise ConnectionError(f"{len(content):,} of {stop - start:,} bytes came")
            return content

        return self._repeat(name, get, stopped)

    def list(self, name: str = "") -> dict[str, About]:
        """Return all files below a folder by their names within it, such as "a/b"; {} if there is no such folder."""
        return self._repeat(name, lambda: self.backend.list(name))

    def about(self, name: str, stop: threading.Event | None = None) -> About | None:
        """Return the facts about a file; None if there is no such file."""
        return self._repeat(name, lambda: self.backend.about(name), stop)

    def compare(self, name: str, path: Path) -> About | None:
        """Return the facts about a file in the store if its bytes equal those of the local file `path`, else None.

        The file is not read if the store keeps an equal MD5.

        Raises:
            StoreError: The store cannot be read, and retries are exhausted.
            OSError: The path cannot be read.
        """
        about = self.about(name)
        if about is None or about.size != path.stat().st_size:
            return None
        return about if _has_md5(about, path) or self._reads_as(name, path) else None

    def _reads_as(self, name: str, path: Path) -> bool:
        start = 0
        with path.open("rb") as file:
            while expected := file.read(_PIECE):
                if self.read_range(name, start, start + len(expected)) != expected:
                    return False
                start += len(expected)
        return True

    def put(self, path: Path, name: str) -> About:
        """Copy a file of this machine to the store; return the facts about the copy.

        The copy appears when it is complete, and replaces an existing file. On a file system (hdfs://), it may be
        visible earlier.

        Raises:
            StoreError: The store has no such bucket, or cannot be written, and retries are exhausted.
            OSError: The path cannot be read.
        """
        size = path.stat().st_size

        def put() -> About:
            self.backend.put(path, name)
            about = self._require(name)
            if about.size != size:
                raise ConnectionError(f"{about.size:,} of {size:,} bytes were written")
            return about

        return self._repeat(name, put)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, in place of an existing one."""
        with tempfile.TemporaryDirectory() as folder:  # copying a file also creates the folders that hdfs:// needs
            path = Path(folder) / "content"
            path.write_bytes(content)
            self.put(path, name)

    def copy(self, source: str, name: str) -> None:
        """Copy a file within the store."""
        self._repeat(name, lambda: self.backend.copy(source, name))

    def remove(self, name: str) -> None:
        """Remove a file, which may be missing."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.backend.remove(name)

        self._repeat(name, remove)

    def fetch(self, name: str, path: Path, stop: threading.Event | None = None) -> str:
        """Copy a file to a path on this machine, in chunks, and return its SHA-256.

        Raises:
            StoppedError: `stop` was set meanwhile.
            StoreError: The store does not have the file, or cannot be read, and retries are exhausted.
            OSError: The path cannot be written.
        """
        size = self._repeat(name, lambda: self._require(name).size, stop)
        path.unlink(missing_ok=True)
        with contextlib.closing(HashedFile(path)) as file:
            for start in range(0, size, _PIECE):
                file.write(self.read_range(name, start, min(size, start + _PIECE), stop))
            return file.finish()

    def fetch_intact(
        self, name: str, path: Path, is_intact: Callable[[str], bool], stop: threading.Event | None = None
    ) -> bool:
        """Copy a file to a path on this machine until it is intact; return False if it is damaged in the store.

        Wrong content is requested again until the stored file itself counts as damaged: the MD5 that the store keeps is
        that of the wrong content or, if it keeps none, the same content has arrived three times.

        Args:
            name: The file.
            path: The path of the copy.
            is_intact: Called with the SHA-256 of the copy.
            stop: See `fetch`.

        Raises:
            Exception: As `fetch`; StoreError also if retries are exhausted while the wrong content differs each time.
        """
        arrived: Counter[str] = Counter()
        patience = self._patience(name)
        while True:
            digest = self.fetch(name, path, stop)
            if is_intact(digest):
                return True
            arrived[digest] += 1
            about = self.about(name, stop)
            is_stored = None if about is None else _has_md5(about, path)
            if is_stored or (is_stored is None and arrived[digest] == _SAME):
                return False
            patience.wait(ConnectionError(_DAMAGED), stop)

    def _require(self, name: str) -> About:
        about = self.backend.about(name)
        if about is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return about

    def _patience(self, name: str) -> Patience:
        where = f"{self.shown}/{name}" if name else self.shown
        return Patience(where, self._kind.is_transient, self._describe)

    def _repeat(self, name: str, work: Callable[[], T], stop: threading.Event | None = None) -> T:
        return self._patience(name).repeat(work, stop)

    def _describe(self, error: Exception) -> str:
        return without_secrets(self._kind.describe(error))[:200]


def _has_md5(about: About, path: Path) -> bool | None:
    """Return whether the MD5 that a store keeps of a file's bytes is that of a file of this machine.

    Return None if the store keeps no MD5, or an MD5 of parts of an unknown size. Encrypted files may give False.
    """
    match = _MD5.fullmatch(about.md5)
    if match is None:
        return None
    size = path.stat().st_size
    if match[2] is None:
        return _get_md5s(path, max(1, size))[-1].hex() == match[1]
    for part in (mib << 20 for mib in _PART_SIZES):
        if -(-size // part) == int(match[2]):
            joined = b"".join(_get_md5s(path, part))
            if md5(joined, usedforsecurity=False).hexdigest() == match[1]:
                return True
    return None


def _get_md5s(path: Path, part: int) -> list[bytes]:
    """Return the MD5s of a file's parts of `part` bytes; for an empty file, the MD5 of no bytes."""
    digests: list[bytes] = []
    with path.open("rb") as file:
        while True:
            digest, remaining = md5(usedforsecurity=False), part
            while remaining and (content := file.read(min(remaining, _PIECE))):
                digest.update(content)
                remaining -= len(content)
            if remaining == part and digests:
                return digests
            digests.append(digest.digest())
            if remaining:
                return digests
