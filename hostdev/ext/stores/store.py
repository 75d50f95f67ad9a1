"""A folder in a store, read through fsspec. What fails for a while is tried again.

fsspec is what pandas, Dask and torch use. Each kind of store is a package of its own (s3fs, gcsfs, adlfs), which finds
credentials in its own ways; hostdev never sees them, and its messages leave out what an address may have of them.
"""

import base64
import contextlib
import errno
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from datetime import datetime
from hashlib import md5, sha256
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from hostdev.core.addresses import without_secrets
from hostdev.core.checksums import is_whole_json
from hostdev.core.errors import UserError, in_words, raise_if_transient, write_stderr
from hostdev.core.workers import run_in_thread

PATIENCE = 300.0  # seconds; HOSTDEV_STORE_PATIENCE has others
_PIECE = 1 << 23  # bytes of a request
_PAUSES = 0.5, 30.0  # seconds: the first one, which doubles, and the longest
_POLL = 0.2  # seconds between looks whether an answer is still needed
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_LASTING_NUMBERS = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EREMCHG if hasattr(errno, "EREMCHG") else -1}
_PASSING_STATES = {408, 425, 429}  # of HTTP, and all from 500 on
_PASSING_NAMES = "Connect|Timeout|TimedOut|Incomplete|Payload|Disconnect|Retrieval|HTTPClient|Server|Parser|Throttl|Too"
_PASSING_NAMES += "|Checksum"  # an answer that was damaged on its way
_PASSING_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}  # of S3, with state 400
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}

_VERSIONS = "ETag", "etag", "generation", "LastModified", "last_modified", "mtime", "created"  # by kind of store

_TIMES = "LastModified", "last_modified", "mtime", "updated", "created"
_MD5 = re.compile(r"([0-9a-f]{32})(?:-(\d+))?")  # of S3; with a hyphen, that of the parts' MD5s, and their number
_PART_SIZES = 5, 8, 16, 50, 64, 100, 5120  # MiB, of files that are written in parts
_WRONG = "an answer had a wrong checksum"
_SAME = 3  # times that a file comes with the same wrong content before the store is taken to have it so

T = TypeVar("T")


class StoppedError(Exception):
    """Whoever waited for a file does not need it any more."""


class StoreError(UserError):
    """A store cannot be reached, or has not what is needed of it.

    Attributes:
        may_pass: Whether it may be gone later; for how long it was tried again is over.
    """

    may_pass = False


class About(NamedTuple):
    """The size of a file in bytes, what differs if it is replaced, and its time of change.

    The time is in nanoseconds since 1970; 0 if the store does not tell it.
    """

    size: int
    version: str
    changed: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """Return it from what a store's package tells."""
        version = next((found[key] for key in _VERSIONS if found.get(key) is not None), None)
        changed = next((found[key] for key in _TIMES if found.get(key) is not None), 0)
        if isinstance(changed, str):
            changed = datetime.fromisoformat(changed)
        if isinstance(changed, datetime):
            changed = changed.timestamp()
        return cls(int(found.get("size") or 0), str(version), int(changed * 1_000_000_000))


class Store:
    """A folder in a store. Any thread may call the methods, and forks of the process.

    Args:
        address: Such as "s3://BUCKET/FOLDER".

    Raises:
        StoreError: The kind of store is unknown, its package is not installed, or it cannot be opened.
    """

    def __init__(self, address: str) -> None:
        self._address, self.shown = address, without_secrets(address).rstrip("/")
        self._open()

    def _open(self) -> None:
        import fsspec

        scheme = self._address.partition("://")[0].lower()
        try:
            self._opened, root = fsspec.core.url_to_fs(self._address)
        except ImportError as error:
            advice = f"pip install 'hostdev[{_EXTRAS[scheme]}]'" if scheme in _EXTRAS else "install it"
            raise StoreError(f"{self.shown} needs a package that is missing ({in_words(error)}); {advice}") from None
        except Exception as error:  # each package has its own
            raise StoreError(f"{self.shown}: {_describe(error)}") from None
        self._root, self._owner = root.rstrip("/"), os.getpid()

    @property
    def _files(self) -> Any:
        if self._owner != os.getpid():  # a fork of the process that has the threads
            self._open()
        return self._opened

    def size(self, name: str, stop: threading.Event | None = None) -> int:
        """Return the size of a file in bytes."""
        path = self._path(name)

        def get() -> int:
            self._files.invalidate_cache(path.rpartition("/")[0])
            return int(self._files.info(path)["size"])

        return self._patiently(name, get, stop)

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        return self._patiently(name, lambda: bytes(self._files.cat_file(self._path(name))), None)

    def read_if_there(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is no such file."""

        def get() -> bytes | None:
            try:
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

        return self._patiently(name, get, None)

    def read_manifest(self, name: str, *, without: bool = False) -> bytes | None:
        """Return a file with a checksum of its own (see `is_whole_json`), or None if there is no such file.

        What has a wrong one is asked for again, as in `fetch_intact`.
        """
        came: Counter[bytes] = Counter()
        patience = _Patience(f"{self.shown}/{name}")
        while True:
            content = self.read_if_there(name)
            if content is None or is_whole_json(content, without=without):
                return content
            came[content] += 1
            if came[content] == _SAME:
                return content
            patience.wait(ConnectionError(_WRONG), None)

    def list(self, name: str = "") -> dict[str, int]:
        """Return the files below a folder by their names within it, such as "a/b", and their sizes in bytes.

        A folder that is missing has no files.
        """
        return {each: about.size for each, about in self.list_about(name).items()}

    def list_about(self, name: str = "") -> dict[str, About]:
        """Return what is known of the files below a folder, by their names within it; see `list`."""
        path = self._path(name)

        def get() -> dict[str, About]:
            self._files.invalidate_cache()
            found = self._files.find(path, detail=True)
            return {each[len(path) :].lstrip("/"): About.of(about) for each, about in found.items()}

        return self._patiently(name, get, None)

    def about(self, name: str) -> About | None:
        """Return what is known of a file; None if there is no such file."""

        found = self._find(name, None)
        return None if found is None else About.of(found)

    def _find(self, name: str, stop: threading.Event | None) -> Mapping[str, Any] | None:
        """Return what the store's package tells of a file; None if there is no such file."""

        def get() -> Mapping[str, Any] | None:
            path = self._path(name)
            self._files.invalidate_cache(path.rpartition("/")[0])
            try:
                found: Mapping[str, Any] = self._files.info(path)
            except FileNotFoundError:
                return None
            return found if found["type"] == "file" else None

        return self._patiently(name, get, stop)

    def compare(self, name: str, path: Path) -> About | None:
        """Return what is known of a file if it has the bytes of a file of this machine, or else None.

        If the store keeps an MD5 of the file's bytes, and it is that of the other file, they are not read.

        Raises:
            StoreError: The store cannot be read for too long.
            OSError: The path cannot be read.
        """
        found = self._find(name, None)
        if found is None or int(found.get("size") or 0) != path.stat().st_size:
            return None
        if not _has_md5(found, path) and not self._reads_as(name, path):
            return None
        return About.of(found)

    def _reads_as(self, name: str, path: Path) -> bool:
        start = 0
        with path.open("rb") as file:
            while expected := file.read(_PIECE):
                if self.read_range(name, start, start + len(expected)) != expected:
                    return False
                start += len(expected)
        return True

    def read_range(self, name: str, start: int, stop: int, stopped: threading.Event | None = None) -> bytes:
        """Return bytes [start, stop) of a file."""

        def get() -> bytes:
            content = bytes(self._files.cat_file(self._path(name), start=start, end=stop))
            if len(content) != stop - start:
                raise ConnectionError(f"{len(content):,} of {stop - start:,} bytes came")
            return content

        return self._patiently(name, get, stopped)

    def put(self, path: Path, name: str, stop: threading.Event | None = None) -> About:
        """Copy a file of this machine to the store, where it appears when it is complete, and replaces what is there.

        Return what is known of it then.

        On a file system (hdfs://), it may be seen before.

        Raises:
            StoppedError: `stop` was set meanwhile.
            StoreError: The store has no such bucket, or cannot be written for too long.
            OSError: The path cannot be read.
        """
        size = path.stat().st_size

        def put() -> About:
            there = self._path(name)
            self._files.put_file(str(path), there)
            self._files.invalidate_cache(there.rpartition("/")[0])
            found = About.of(self._files.info(there))
            if found.size != size:
                raise ConnectionError(f"{found.size:,} of {size:,} bytes were written")
            return found

        return self._patiently(name, put, stop)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, which replaces what is there."""
        with tempfile.TemporaryDirectory() as folder:  # only copies of files make the folders that hdfs:// needs
            path = Path(folder) / "content"
            path.write_bytes(content)
            self.put(path, name)

    def copy(self, source: str, name: str) -> None:
        """Copy a file within the store."""
        self._patiently(name, lambda: self._files.cp_file(self._path(source), self._path(name)), None)

    def remove(self, name: str) -> None:
        """Remove a file, which may be missing."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

        self._patiently(name, remove, None)

    def fetch(self, name: str, path: Path, stop: threading.Event | None = None) -> str:
        """Copy a file to a path on this machine, in pieces, and return its SHA-256.

        Raises:
            StoppedError: `stop` was set meanwhile.
            StoreError: The store does not have the file, or cannot be read for too long.
            OSError: The path cannot be written.
        """
        size, digest = self.size(name, stop), sha256()
        with path.open("wb") as file:
            for start in range(0, size, _PIECE):
                content = self.read_range(name, start, min(size, start + _PIECE), stop)
                digest.update(content)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    def fetch_intact(
        self, name: str, path: Path, is_intact: Callable[[str], bool], stop: threading.Event | None = None
    ) -> bool:
        """Copy a file to a path on this machine until it is intact; return False if it is damaged in the store.

        Wrong content is asked for again, as after an answer that is cut, unless it is what the store has: by the MD5
        that the store keeps of it or, if it keeps none, since it came several times.

        Args:
            name: The file.
            path: Where to.
            is_intact: Called with the SHA-256 of what came.
            stop: See `fetch`.

        Raises:
            Exception: As `fetch`; StoreError also if other wrong content came for too long.
        """
        came: Counter[str] = Counter()
        patience = _Patience(f"{self.shown}/{name}")
        while True:
            digest = self.fetch(name, path, stop)
            if is_intact(digest):
                return True
            came[digest] += 1
            found = self._find(name, stop)
            is_there = None if found is None else _has_md5(found, path)
            if is_there or (is_there is None and came[digest] == _SAME):
                return False
            patience.wait(ConnectionError(_WRONG), stop)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _patiently(self, name: str, work: Callable[[], T], stop: threading.Event | None) -> T:
        """Return what `work` returns; after an error that may pass, try again after a pause, for as long as allowed."""
        patience = _Patience(f"{self.shown}/{name}" if name else self.shown)
        while True:
            if stop is not None and stop.is_set():
                raise StoppedError
            try:
                return _ask(work, stop)
            except StoppedError:
                raise
            except Exception as error:
                patience.wait(error, stop)


class _Patience:
    """The pauses between attempts to ask for something in a store; `where` is what messages call it."""

    def __init__(self, where: str) -> None:
        self._where, self._begin, self._pause = where, time.monotonic(), _PAUSES[0]

    def wait(self, error: Exception, stop: threading.Event | None) -> None:
        """Pause after an error; raise StoreError if it does not pass, or has gone on for as long as allowed."""
        raise_if_transient(error)
        where, why = self._where, _describe(error)
        left = _get_patience() - (time.monotonic() - self._begin)
        if not _may_pass(error):
            raise StoreError(f"{where}: {why}") from None
        if left <= 0:
            failure = StoreError(
                f"{where}: {why}; this went on for {time.monotonic() - self._begin:.0f} s; repeat the command when "
                "the store can be reached"
            )
            failure.may_pass = True
            raise failure from None
        pause = min(self._pause, max(left, 0.05))
        if pause > _PAUSES[0]:  # a first failure is usual
            write_stderr(f"{where}: {why}; trying again in {pause:.0f} s, for {left:.0f} s at most")
        if stop is None:
            time.sleep(pause)
        else:
            stop.wait(pause)
        self._pause = min(2 * pause, _PAUSES[1])


def _ask(work: Callable[[], T], stop: threading.Event | None) -> T:
    """Return what `work` returns in a thread of its own, which is left alone when `stop` is set: it may hang."""
    asked = run_in_thread("hostdev-store", work)
    while not wait([asked], _POLL).done:
        if stop is not None and stop.is_set():
            raise StoppedError
    return asked.result()


def _get_patience() -> float:
    text = os.environ.get("HOSTDEV_STORE_PATIENCE", "")
    try:
        return float(text) if text else PATIENCE
    except ValueError:
        raise StoreError(f"HOSTDEV_STORE_PATIENCE must be a number of seconds, not {text!r}") from None


def _has_md5(found: Mapping[str, Any], path: Path) -> bool | None:
    """Return whether the MD5 that a store keeps of a file's bytes is that of a file of this machine.

    Return None if it keeps none, or one of parts of an unknown size. For encrypted files it may keep something else.
    """
    text = str(found.get("ETag") or "").strip('"')
    if found.get("md5Hash"):  # of Google
        text = base64.b64decode(found["md5Hash"]).hex()
    match = _MD5.fullmatch(text)
    if match is None:
        return None
    size = path.stat().st_size
    if match[2] is None:
        return _get_md5s(path, max(1, size))[-1].hex() == match[1]
    for part in (mib << 20 for mib in _PART_SIZES):
        if -(-size // part) == int(match[2]) and _join_md5s(_get_md5s(path, part)) == match[1]:
            return True
    return None


def _join_md5s(parts: Iterable[bytes]) -> str:
    return md5(b"".join(parts), usedforsecurity=False).hexdigest()


def _get_md5s(path: Path, part: int) -> list[bytes]:
    """Return the MD5s of a file's parts; of an empty file, that of no bytes."""
    found: list[bytes] = []
    with path.open("rb") as file:
        while True:
            digest, left = md5(usedforsecurity=False), part
            while left and (content := file.read(min(left, _PIECE))):
                digest.update(content)
                left -= len(content)
            if left == part and found:
                return found
            found.append(digest.digest())
            if left:
                return found


def _may_pass(error: Exception) -> bool:
    """Return whether an error may be gone a while later; each package has its own kinds."""
    for each in (error, error.__cause__):  # s3fs has errors of its own
        told = getattr(each, "response", None)
        if isinstance(told, dict) and told.get("Error", {}).get("Code") in _PASSING_CODES:
            return True
    response = getattr(error, "response", None)
    of_boto = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    for state in (of_boto, getattr(error, "status", None), getattr(error, "code", None)):
        if isinstance(state, int) and state >= 400:
            return state >= 500 or state in _PASSING_STATES
    if isinstance(error, OSError):
        lasts = isinstance(error, _LASTING) or error.errno in _LASTING_NUMBERS or "Forbidden" in str(error)
        return not lasts
    return any(word in type(error).__name__ for word in _PASSING_NAMES.split("|"))


def _describe(error: Exception) -> str:
    """Return an error as a short text without addresses' secrets."""
    text = without_secrets(in_words(error))
    if isinstance(error, PermissionError):
        text = f"no permission ({text})"
    elif isinstance(error, FileNotFoundError):
        text = f"there is no such file or bucket ({text})"
    elif type(error).__name__ in _NO_CREDENTIALS:
        text = f"no credentials ({text})"
    return text[:200]
