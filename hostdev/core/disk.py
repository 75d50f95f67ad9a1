"""Flushing of files and folders to disk, so that they survive a power failure, and files that replace others."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to, which then takes the place of `path` at once; an error removes it.

    Processes and threads that replace the same file have names of their own, which end with ".part".
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
