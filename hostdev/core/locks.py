"""Locks on files, between processes: of a file that is open, until it is closed or unlocked."""

import os
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not POSIX: nobody is kept out
    fcntl = None  # type: ignore[assignment]


def try_lock(file: IO[Any]) -> bool:
    """Lock a file, unless another process has or there are no locks; tell whether it is locked."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def lock_state(number: int, *, wait: bool = False) -> str:
    """Lock an open file or folder; return "locked", "held" where another process has it, or "none": no locks here.

    wait  for the process that has it
    """
    if fcntl is not None:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return "locked"
        except BlockingIOError:
            return "held"
        except OSError:  # a file system without locks, as some over a network are
            pass
    return "none"


def await_lock(file: IO[Any]) -> None:
    """Lock a file, once no other process has."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)


def unlock(file: IO[Any]) -> None:
    """Unlock a file: a process that was forked meanwhile has it open, too."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)


def is_still(path: Path, file: IO[Any]) -> bool:
    """Tell whether an open file is still what lies at `path`, and was not removed, alone or with its folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False
