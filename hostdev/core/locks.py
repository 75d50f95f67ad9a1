"""File locks between processes: on an open file, until it is closed or unlocked."""

import os
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not POSIX: no locks
    fcntl = None  # type: ignore[assignment]


def try_lock(file: IO[Any]) -> bool:
    """Lock a file unless another process holds it or locks are unsupported; return whether it is locked."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def lock_state(number: int, *, wait: bool = False) -> str:
    """Lock an open file or folder, waiting for another process if `wait`.

    Returns:
        "locked", "held" (by another process), or "none" (locks are unsupported).
    """
    if fcntl is not None:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return "locked"
        except BlockingIOError:
            return "held"
        except OSError:  # a file system without locks, such as some network file systems
            pass
    return "none"


def await_lock(file: IO[Any]) -> None:
    """Lock a file, once no other process holds it."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)


def unlock(file: IO[Any]) -> None:
    """Unlock a file explicitly, since a forked process may have it open, too."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)


def is_same_file(path: Path, file: IO[Any]) -> bool:
    """Return whether an open file is still the one at `path`, so neither it nor its folder was removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False
