"""A folder in a store, read and written through fsspec. What fails for a while is tried again.

fsspec is what pandas, Dask and torch use. Each kind of store is a package of its own (s3fs, gcsfs, adlfs), which finds
credentials in its own ways; hostdev never sees them, and its messages leave out what an address may have of them.
"""

import os
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from hostdev.core.errors import UserError, in_words, raise_if_transient, write_stderr
from hostdev.stores.address import without_secrets

PATIENCE = 300.0  # seconds; HOSTDEV_STORE_PATIENCE has others
_PIECE = 1 << 23  # bytes of a request
_PAUSES = 0.5, 30.0  # seconds: the first one, which doubles, and the longest
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}

T = TypeVar("T")


class StoppedError(Exception):
    """Whoever waited for a file does not need it any more."""


class StoreError(UserError):
    """A store cannot be reached, or has not what is needed of it."""


class Store:
    """A folder in a store. Any thread may call the methods.

    Args:
        address: Such as "s3://BUCKET/FOLDER".

    Raises:
        StoreError: The kind of store is unknown, or its package is not installed.
    """

    def __init__(self, address: str) -> None:
        import fsspec

        self.shown = without_secrets(address).rstrip("/")
        scheme = address.partition("://")[0].lower()
        try:
            self._files, root = fsspec.core.url_to_fs(address)
        except ImportError as error:
            advice = f"pip install 'hostdev[{_EXTRAS[scheme]}]'" if scheme in _EXTRAS else "install it"
            raise StoreError(f"{self.shown} needs a package that is missing ({in_words(error)}); {advice}") from None
        except ValueError as error:
            raise StoreError(f"{self.shown}: {without_secrets(in_words(error))}") from None
        self._root = root.rstrip("/")

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
                end = min(size, start + _PIECE)

                def get(start: int = start, end: int = end) -> bytes:
                    content = bytes(self._files.cat_file(self._path(name), start=start, end=end))
                    if len(content) != end - start:
                        raise ConnectionError(f"{len(content):,} of {end - start:,} bytes came")
                    return content

                content = self._patiently(name, get, stop)
                digest.update(content)
                file.write(content)
        return digest.hexdigest()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _patiently(self, name: str, work: Callable[[], T], stop: threading.Event | None) -> T:
        """Return what `work` returns; after an error that may pass, try again after a pause, for as long as allowed."""
        begin, pause = time.monotonic(), _PAUSES[0]
        where = f"{self.shown}/{name}" if name else self.shown
        while True:
            if stop is not None and stop.is_set():
                raise StoppedError
            try:
                return work()
            except Exception as error:
                if isinstance(error, OSError):
                    raise_if_transient(error)
                why = _describe(error)
                left = _get_patience() - (time.monotonic() - begin)
                if _lasts(error):
                    raise StoreError(f"{where}: {why}") from None
                if left <= 0:
                    raise StoreError(
                        f"{where}: {why}; this went on for {time.monotonic() - begin:.0f} s; repeat the command when "
                        "the store can be reached"
                    ) from None
                pause = min(pause, max(left, 0.05))
                if pause > _PAUSES[0]:  # a first failure is usual
                    write_stderr(f"{where}: {why}; trying again in {pause:.0f} s, for {left:.0f} s at most")
            if stop is None:
                time.sleep(pause)
            else:
                stop.wait(pause)
            pause = min(2 * pause, _PAUSES[1])


def _get_patience() -> float:
    text = os.environ.get("HOSTDEV_STORE_PATIENCE", "")
    try:
        return float(text) if text else PATIENCE
    except ValueError:
        raise StoreError(f"HOSTDEV_STORE_PATIENCE must be a number of seconds, not {text!r}") from None


def _lasts(error: Exception) -> bool:
    """Return whether an error stays the same however often one tries."""
    return isinstance(error, _LASTING) or "Credential" in type(error).__name__


def _describe(error: Exception) -> str:
    """Return an error as a short text without addresses' secrets."""
    text = without_secrets(in_words(error))
    if isinstance(error, PermissionError):
        text = f"no permission ({text})"
    elif isinstance(error, FileNotFoundError):
        text = f"there is no such file or bucket ({text})"
    elif "Credential" in type(error).__name__:
        text = f"no credentials ({text})"
    return text[:200]
