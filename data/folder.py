"""A check that a folder is a data set, and copies of the files of a data set in a store.

The manifest and the vocabulary are copied first, shards when they are needed. This module imports little, so that a
wrong path is reported at once.
"""

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from hostdev.core import json_files
from hostdev.core.addresses import address_of, get_folder
from hostdev.core.checksums import checksum
from hostdev.core.errors import ChangedError, UserError, in_words, raise_if_transient
from hostdev.core.names import inside
from hostdev.core.outputs import remove_abandoned, replacing
from hostdev.core.stores import Store
from hostdev.core.sync import KeptFiles

FILE_NAME = "manifest.json"

T = TypeVar("T")


class RemoteFiles:
    """The files of a data set in a store (`store`), and their copies (`kept`). Any thread may call the methods.

    Args:
        address: The data set's address.
    """

    def __init__(self, address: str) -> None:
        self.store, self.kept = Store(address), KeptFiles()

    @classmethod
    def find(cls, root: Path) -> "RemoteFiles | None":
        """Return the files of the data set with this path, or None if it is on this machine."""
        address = address_of(root)
        return None if address is None else cls(address)

    def use(self, name: str, sha256: str, use: Callable[[Path], T], stop: threading.Event | None = None) -> T:
        """Return the result of `use`, called with the path of a copy of a file; see `KeptFiles.use`."""
        return self.kept.use(self.store, name, sha256, use, stop)

    def fetch_to(self, name: str, sha256: str | None, path: Path) -> None:
        """Copy a file of the store to a path, in place of an existing file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path)
        with replacing(path) as part:
            if sha256 is None:  # data sets of the first version have no checksum of the vocabulary
                self.store.fetch(name, part)
            else:
                self.use(name, sha256, partial(_link_or_copy, sha256=sha256, to=part))


def _link_or_copy(copy: Path, sha256: str, to: Path) -> None:
    """Link or copy an intact copy of a store's file to the path `to`, where it stays if the copy is removed."""
    if not _has_checksum(copy, sha256):
        copy.stat()  # raises FileNotFoundError if another process has removed it
        raise ChangedError(f"{copy} is damaged; check the disk, or set HOSTDEV_STORE_CACHE to a folder on another one")
    try:
        os.link(copy, to)
    except OSError:  # there are no links, or the copy is gone by now
        shutil.copyfile(copy, to)


def describe_place(root: Path) -> str:
    """Describe where a data set is; if it is in a store, also where its copies are and how large they may be."""
    from hostdev.core.memory import format_bytes  # not at the top, because it imports NumPy

    files = RemoteFiles.find(root)
    if files is None:
        return str(root)
    return f"{address_of(root)} (copies in {files.kept.folder}, at most {format_bytes(files.kept.limit)})"


def refresh(folder: Path, address: str) -> None:
    """Copy the manifest, and the vocabulary that it names, from a store; several processes may do so at once.

    Raises:
        UserError: The store cannot be read, or the folder cannot be written.
    """
    files = RemoteFiles(address)
    content = files.store.read_manifest(FILE_NAME, without=True)
    if content is None:
        content = files.store.read(FILE_NAME)  # raises the error for a missing file
    try:
        _place_vocabulary(files, content, folder)
        _write(folder / FILE_NAME, content)
    except OSError as error:
        raise_if_transient(error)
        raise UserError(f"{address} cannot be kept in {folder} ({in_words(error)}); set HOSTDEV_STORE_CACHE") from None


def pin(root: Path) -> Path:
    """Return a folder with the manifest in `root` and its vocabulary, which later changes of a store do not affect.

    If `root` is not in a store, return it unchanged.
    """
    address = address_of(root)
    if address is None:
        return root
    content = (root / FILE_NAME).read_bytes()
    folder = get_folder() / "versions" / hashlib.sha256(content).hexdigest()
    _place_vocabulary(RemoteFiles(address), content, folder)
    _write(folder / FILE_NAME, content)
    return folder


def _place_vocabulary(files: RemoteFiles, content: bytes, folder: Path) -> None:
    """Copy the vocabulary that a manifest names, unless `folder` has an intact copy."""
    try:
        found = json_files.loads(content)
        name, sha256 = found["vocabulary"], found.get("vocabulary_sha256")
        inside(folder, name)
    except (ValueError, TypeError, KeyError, AttributeError):
        return  # reading the manifest reports the error
    if sha256 is None or not _has_checksum(folder / name, sha256):
        files.fetch_to(name, sha256, folder / name)


def _has_checksum(path: Path, sha256: str) -> bool:
    try:
        return checksum(path) == sha256
    except OSError:
        return False


def _write(path: Path, content: bytes) -> None:
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path)
    with replacing(path) as part:
        part.write_bytes(content)


def require_input(folder: Path) -> None:
    """Raise UserError unless a folder of this machine has a manifest; only `require` checks a folder in a store."""
    if address_of(folder) is None:
        require(folder)


def require(folder: Path) -> None:
    """Raise UserError unless `folder` has a manifest; first copy the manifest and vocabulary of a folder in a store."""
    if (address := address_of(folder)) is not None:
        refresh(folder, address)
    if not (folder / FILE_NAME).is_file():
        raise UserError(
            f"{folder} is not a data set: it has no {FILE_NAME}; create a data set with python -m "
            "hostdev.data.preprocess"
        )
