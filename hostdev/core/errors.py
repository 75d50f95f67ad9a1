"""Errors that the user can mend: one line that says what, where and what to do."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hostdev.core.printable import printable

_SHORT = {
    errno.EMFILE: "allow this process more, as with ulimit -n",
    errno.ENFILE: "the system has no more",
    errno.ENOMEM: "end other processes, or use less",
}


class UserError(ValueError):
    """Wrong input or options; commands print it as one line and exit with code 2.

    What a file or a caller has given may be in the message: it has no control characters, and at most 500 others.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in arguments))


class PassingError(UserError):
    """What may pass without another input or option, as when memory is short: what is finished stays worth keeping."""


def raise_passing(error: BaseException) -> None:
    """Raise PassingError where the system is short of memory or open files: that says nothing of what a file holds."""
    if isinstance(error, OSError) and error.errno in _SHORT:
        raise PassingError(f"{in_words(error)}; {_SHORT[error.errno]}") from None
    if isinstance(error, MemoryError):
        raise PassingError(f"there is not enough memory ({in_words(error)})") from None


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Let an OSError that says of no file name this one: a full disk is met in a write, which knows no path."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def in_words(error: BaseException) -> str:
    """Return what has failed, and where, on one line that can be printed."""
    text = printable(str(error)) or type(error).__name__
    if isinstance(error, OSError):
        text = error.strerror or text
        if error.filename:
            text = f"{os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename}: {text}"
    return printable(text)


def tell_at_once(line: str) -> None:
    """Write a line to standard error past what holds its lock, as a thread does that ends the process."""
    os.write(2, f"{line}\n".encode(errors="backslashreplace"))
