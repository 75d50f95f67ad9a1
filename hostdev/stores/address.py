"""Addresses such as s3://BUCKET/FOLDER. This module imports little, so that command lines may use it."""

import os
import re
from pathlib import Path

from hostdev.core.errors import UserError
from hostdev.core.user_cache import user_cache

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
# A user with a password, or who may be one, and what a signed address ends with.
_SECRETS = re.compile(r"(?<=://)[^/@:\s]*:[^/@\s]*@|((?<=http://)|(?<=https://))[^/@\s]*@|\?[^\s'\"]*")
LOCAL = ("file", "local")
_DATA = "data"


def is_remote(text: str) -> bool:
    """Return whether a text is an address of something that is not a path on this machine."""
    found = _SCHEME.match(text)
    return found is not None and found[1].lower() not in LOCAL


def without_secrets(text: str) -> str:
    """Return a text without users with passwords in addresses, and without what follows a question mark in them."""
    return _SECRETS.sub("", text)


def get_folder() -> Path:
    """Return the folder for copies of a store's files: HOSTDEV_STORE_CACHE, or one below the user's cache folder."""
    given = os.environ.get("HOSTDEV_STORE_CACHE", "")
    if given and not Path(given).is_absolute():
        raise UserError(f"HOSTDEV_STORE_CACHE must be an absolute path, not {given}")
    return Path(given) if given else user_cache() / "stores"


def data_path(text: str) -> Path:
    """Return the path of a data set: for an address, that of the folder for its files that are copied as a whole.

    `address_of` returns the address again, in any process. Nothing is read or written.

    Raises:
        UserError: The address has a password, which would appear in logs.
    """
    if not is_remote(text):
        return Path(text)
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
    return get_folder() / _DATA / scheme.lower() / Path(*parts)


def address_of(folder: Path) -> str | None:
    """Return the address of the data set whose path this is, or None for a folder on this machine."""
    try:
        scheme, *parts = folder.absolute().relative_to(get_folder() / _DATA).parts
    except (ValueError, UserError):
        return None
    return f"{scheme}://{'/'.join(parts)}"


def shown_data(folder: Path) -> str:
    """Return what to call the data set in a message: its address, or its path."""
    return address_of(folder) or str(folder)
