"""A data set in a store: what is small is copied as a whole, and shards are copied when they are needed."""

import contextlib
import json
import os
import shutil
import threading
from pathlib import Path

from hostdev.core.errors import UserError, in_words
from hostdev.core.memory import format_bytes
from hostdev.core.names import inside
from hostdev.data.folder import FILE_NAME
from hostdev.stores.address import address_of
from hostdev.stores.kept_files import KeptFiles
from hostdev.stores.store import Store

_ATTEMPTS = 5


class RemoteFiles:
    """The files of a data set in a store. Any thread may call `fetch`.

    Args:
        address: The data set's address.
    """

    def __init__(self, address: str) -> None:
        self._store, self._kept = Store(address), KeptFiles()

    @classmethod
    def find(cls, root: Path) -> "RemoteFiles | None":
        """Return the files of the data set with this path, or None if it is on this machine."""
        address = address_of(root)
        return None if address is None else cls(address)

    @property
    def folder(self) -> Path:
        """Where the copies are."""
        return self._kept.folder

    @property
    def limit(self) -> int:
        """How many bytes the copies may take."""
        return self._kept.limit

    def fetch(self, name: str, sha256: str, stop: threading.Event | None = None) -> Path:
        """Return the path of a copy of a file; see `KeptFiles.get`."""
        return self._kept.get(self._store, name, sha256, stop)


def describe_place(root: Path) -> str:
    """Return where a data set is, in words; for one in a store, also where its copies are and how large they may be."""
    files = RemoteFiles.find(root)
    if files is None:
        return str(root)
    return f"{address_of(root)} (copies in {files.folder}, at most {format_bytes(files.limit)})"


def refresh(folder: Path, address: str) -> None:
    """Copy the manifest, and the vocabulary that it names, from a store; several processes may do so at once.

    Raises:
        UserError: The store cannot be read, or the folder cannot be written.
    """
    files = RemoteFiles(address)
    content = files._store.read(FILE_NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # whoever reads it says what is wrong
            found = json.loads(content)
            name, sha256 = found.get("vocabulary"), found.get("vocabulary_sha256")
            if isinstance(name, str) and isinstance(sha256, str) and sha256.isalnum():
                inside(folder, name)
                _place(files, name, sha256, folder / name)
        _write(folder / FILE_NAME, content)
    except OSError as error:
        raise UserError(f"{address} cannot be kept in {folder} ({in_words(error)}); set HOSTDEV_STORE_CACHE") from None


def _place(files: RemoteFiles, name: str, sha256: str, path: Path) -> None:
    """Copy a file to a path, unless it is there; a file beside it has its SHA-256."""
    noted = path.with_name(f"{path.name}.sha256")
    with contextlib.suppress(OSError):
        if path.is_file() and noted.read_text() == sha256:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.unlink(missing_ok=True)
    for attempt in range(_ATTEMPTS):
        copy = files.fetch(name, sha256)
        try:
            os.link(copy, part)  # it stays when the copy makes room for others
        except OSError:  # other processes have made room, or there are no links
            if not copy.exists() and attempt + 1 < _ATTEMPTS:
                continue
            shutil.copyfile(copy, part)
        break
    part.replace(path)
    _write(noted, sha256.encode())


def _write(path: Path, content: bytes) -> None:
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.write_bytes(content)
    part.replace(path)
