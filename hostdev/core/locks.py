"""Locks between processes. A lock lasts until its file is unlocked, or closed in every process that inherited it."""

import os
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not POSIX: no locks
    fcntl = None  # type: ignore[assignment]


def try_lock(file: IO[Any]) -> bool:
    """Lock a file; return False if another process holds the lock or the file system has no locks.

    On a system without POSIX locks, return True without a lock.
    """
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def lock_state(number: int, *, wait: bool = False) -> str:
    """Lock an open file or folder; with `wait`, first wait until no other process holds the lock.

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
    """Wait until no other process holds the lock on a file, and lock it."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)


def unlock(file: IO[Any]) -> None:
    """Unlock a file; closing it is not enough, since a forked process may also have it open."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)


def is_same_file(path: Path, file: IO[Any]) -> bool:
    """Return whether an open file is still the file at `path`: neither file nor folder was removed or replaced."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False
