"""What is written, brought to the disk, so that a loss of power leaves it."""

import errno
import os
from pathlib import Path


def is_text(path: Path | str) -> bool:
    """Tell whether a name, or what a shell has given, is text: on POSIX it may be any bytes, here surrogates."""
    return not any("\udc80" <= character <= "\udcff" for character in str(path))


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    _sync(path)


def sync_tree(path: Path) -> None:
    """Bring all that is in a folder to the disk: the files, and then the names in it and in those inside."""
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
            return  # as some file systems have it, which bring names to the disk in their own time
        error.filename = str(path)
        raise
    finally:
        os.close(number)
