"""hostdev's exceptions; each message is one line that says what is wrong, where, and what to do."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hostdev.core.printable import printable

_SHORTAGES = {
    errno.EMFILE: "raise this process's limit, for example with ulimit -n",
    errno.ENFILE: "close files in other processes",
    errno.ENOMEM: "end other processes, or use less memory",
}


class HostdevError(Exception):
    """Base class of hostdev's errors; commands print them as one line and exit with code 2.

    A message may quote files and arguments, so it is cut to 500 characters and its control characters are escaped.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in arguments))


class UserError(HostdevError, ValueError):
    """The user's input or options are invalid."""


class NonFiniteError(UserError):
    """A gradient or a loss is NaN or infinite; the message says which one. No row was updated.

    Attributes:
        step: The loop's step, from 1, or 0 if unknown.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class ChangedError(UserError):
    """A file's content differs from the recorded checksum, or changed while it was read."""


class FullError(UserError):
    """There is no space for a table's rows; all finished steps are kept.

    Attributes:
        fact: The message without its advice.
    """

    def __init__(self, fact: str, advice: str = "") -> None:
        super().__init__(f"{fact}; {advice}" if advice else fact)
        self.fact = fact


class TableFullError(FullError):
    """A table by key has no room for a batch's new keys. All ranks raise this error at the same step."""


class DiskFullError(FullError):
    """There is no space for a table's rows on disk. Other ranks may have space."""


class TransientError(HostdevError):
    """A transient failure, such as a lack of memory: finished work is kept, and the same command may succeed later."""


class StoppedError(Exception):
    """The work was cancelled: its result is not needed any more."""


class StoreError(UserError):
    """A store is unreachable or wrongly configured, or an object is missing or damaged.

    Attributes:
        is_transient: Whether the error may go away; retries have been exhausted.
    """

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


class RankError(HostdevError):
    """Another rank has failed, hung or exited."""


def raise_if_transient(error: BaseException) -> None:
    """Raise TransientError if `error` comes from a lack of memory or file descriptors, not from a file's content."""
    if isinstance(error, OSError) and error.errno in _SHORTAGES:
        raise TransientError(f"{in_words(error)}; {_SHORTAGES[error.errno]}") from None
    if isinstance(error, MemoryError):
        raise TransientError(
            f"there is not enough memory ({in_words(error)}); end other processes, or use less memory"
        ) from None


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add this file's name to an OSError raised in the block without a file name, such as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def in_words(error: BaseException) -> str:
    """Return an error as one printable line, including an OSError's file name."""
    text = printable(str(error)) or type(error).__name__
    if isinstance(error, OSError):
        text = error.strerror or text
        if error.filename:
            text = f"{os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename}: {text}"
    return printable(text)


def write_stderr(line: str) -> None:
    """Write a line to standard error without taking the lock of sys.stderr, for a thread that ends the process."""
    os.write(2, f"{line}\n".encode(errors="backslashreplace"))
