"""Addresses such as s3://BUCKET/FOLDER. This module imports little, so that parsing a command line stays fast.

It also finds the folder for files that hostdev keeps for a user between runs.
"""

import os
import re
import sys
from pathlib import Path

from hostdev.core.errors import UserError

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
# The possible secrets in addresses: USER:PASSWORD@, with http(s) also USER@, which may be a token, and ?QUERY.
_SECRETS = re.compile(r"(?<=://)[^/@:\s]*:[^/@\s]*@|((?<=http://)|(?<=https://))[^/@\s]*@|\?[^\s'\"]*")
LOCAL = ("file", "local")
_DATA, _CHECKPOINTS, _RESULTS, _SOURCES = "data", "checkpoints", "results", "sources"  # subfolders of `get_folder()`


def is_remote(text: str) -> bool:
    """Return whether a text is an address with a scheme other than file:// and local://."""
    found = _SCHEME.match(text)
    return found is not None and found[1].lower() not in LOCAL


def without_secrets(text: str) -> str:
    """Return a text without the secrets that its addresses may contain.

    Removed are user names with passwords, for http(s) also user names alone, and each question mark with the characters
    up to the next space or quote.
    """
    return _SECRETS.sub("", text)


def get_folder() -> Path:
    """Return the folder for copies of stores' files: HOSTDEV_STORE_CACHE, or `stores` in the user's cache folder."""
    given = os.environ.get("HOSTDEV_STORE_CACHE", "")
    if given and not Path(given).is_absolute():
        raise UserError(f"HOSTDEV_STORE_CACHE must be an absolute path, not {given}")
    return Path(given) if given else user_cache() / "stores"


def data_path(text: str) -> Path:
    """Return the path of a data set; an address becomes a local folder for copies of some of the data set's files.

    `address_of` returns the address again, in any process. Nothing is read or written.

    Raises:
        UserError: The address may contain a secret (see `without_secrets`), which logs would show, or names no folder.
    """
    return _path_of(text, _DATA)


def checkpoint_path(text: str | Path) -> Path:
    """Return the path of a checkpoint, or of a folder of checkpoints; an address becomes a local folder for copies.

    `data_path` describes the errors.
    """
    return _path_of(str(text), _CHECKPOINTS)


def result_path(text: str | Path) -> Path:
    """Return the path of a new file or folder; for an address, the local path to write before copying to the store."""
    return _path_of(str(text), _RESULTS)


def source_path(text: str | Path) -> Path:
    """Return the path of a file or folder with raw rows; for an address, a path that stands for it and never exists."""
    return _path_of(str(text), _SOURCES)


def local_path(text: str) -> Path:
    """Return the path on this machine that a text names; raise UserError for an address in a store."""
    if is_remote(text):
        raise UserError(f"{without_secrets(text)} is an address; this must be a path of this machine")
    return _without_scheme(text)


def require_input(path: Path, said: str) -> None:
    """Raise UserError unless a path exists, is an address, or is - (standard input).

    `said` is the message, with {} for the path.
    """
    if str(path) == "-" or address_of(path) is not None:
        return
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(said.format(path)) from None
    except (OSError, ValueError):
        pass  # opening the file later reports the error


def _without_scheme(text: str) -> Path:
    found = _SCHEME.match(text)
    return Path(text if found is None else text[found.end() :])


def _path_of(text: str, kind: str) -> Path:
    if not is_remote(text):
        return _without_scheme(text)
    scheme, _, rest = text.partition("://")
    host = rest.partition("/")[0]
    if without_secrets(text) != text:
        raise UserError(
            f"{without_secrets(text)}: leave out passwords and what follows a question mark, which logs would show; "
            "the store's package finds credentials in its own ways"
        )
    parts = rest.rstrip("/").split("/")
    if not host or {"", ".", ".."} & set(parts):
        raise UserError(
            f"{text} is not the address of a folder; give one such as s3://BUCKET/FOLDER or hdfs://HOST:PORT/FOLDER, "
            "without empty parts"
        )
    return get_folder() / kind / scheme.lower() / Path(*parts)


def address_of(folder: Path) -> str | None:
    """Return the address for which a path stands (see `data_path`), or None for any other path."""
    try:
        root = get_folder()
    except UserError:
        return None
    for below in (folder.absolute(), folder.resolve()):
        for above in (root, root.resolve()):
            if below.is_relative_to(above):
                kind, *parts = below.relative_to(above).parts or ("",)
                if kind in (_DATA, _CHECKPOINTS, _RESULTS, _SOURCES) and len(parts) > 1:
                    return f"{parts[0]}://{'/'.join(parts[1:])}"
    return None


def shown_place(folder: Path) -> str:
    """Return the name of a file or folder for messages: its address, or its path."""
    return address_of(folder) or str(folder)


def user_cache() -> Path:
    """Return $XDG_CACHE_HOME/hostdev, or hostdev in the platform's cache folder; raise UserError if there is none."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG specification ignores other paths
        return base / "hostdev"
    try:
        home = Path.home()
    except RuntimeError:
        raise UserError("there is no home folder to keep files in; set XDG_CACHE_HOME, or give --data") from None
    return (home / "Library/Caches" if sys.platform == "darwin" else home / ".cache") / "hostdev"
