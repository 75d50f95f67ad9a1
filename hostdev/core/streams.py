"""Safe printing if standard output or standard error is closed, has a limited encoding, or has lost its terminal."""

import codecs
import io
import os
import sys

_BYTES = range(0xDC80, 0xDD00)  # surrogates for undecodable bytes of a file name (PEP 383)


def prepare() -> None:
    """Ensure that printing never fails because of unencodable characters or a missing stream."""
    for number, name in ((0, ""), (1, "stdout"), (2, "stderr")):
        if _is_closed(number):
            opened = os.open(os.devnull, os.O_RDWR)  # else the next opened file would get this number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if name and getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    codecs.register_error("hostdev.printed", _printed)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="hostdev.printed")
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.errors == "strict":
        sys.stderr.reconfigure(errors="backslashreplace")  # Python's default


def silence(numbers: list[int]) -> None:
    """Discard whatever is written to these file descriptors from now on, since their terminal is gone."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  (in a signal handler)
        for number in numbers:
            os.dup2(nowhere.fileno(), number)


def terminals() -> list[int]:
    """Return the file descriptors of standard output and standard error, without those that are not terminals."""
    return [number for number in (1, 2) if not _is_closed(number) and os.isatty(number)]


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _printed(error: UnicodeError) -> tuple[str | bytes, int]:
    r"""Encode characters that the encoding lacks: undecodable bytes of a file name as they are, others as \xe4, ..."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    made = bytearray()
    for character in error.object[error.start : error.end]:
        code = ord(character)
        made += bytes([code - 0xDC00]) if code in _BYTES else character.encode("ascii", "backslashreplace")
    return bytes(made), error.end
