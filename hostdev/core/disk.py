"""Flushing of files and folders to disk, so that they survive a power failure."""

import errno
import os
from pathlib import Path


def is_text(path: Path | str) -> bool:
    """Return whether a file name is valid text; POSIX also allows other bytes, which Python decodes to surrogates."""
    return not any("\udc80" <= character <= "\udcff" for character in str(path))


def sync_folder(path: Path) -> None:
    """Flush a folder's directory entries to disk."""
    _sync(path)


def sync_tree(path: Path) -> None:
    """Flush a folder's content to disk: all files, and the directory entries of the folder and its subfolders."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP) and path.is_dir():
            return  # some file systems cannot flush folders
        error.filename = str(path)
        raise
    finally:
        os.close(number)
