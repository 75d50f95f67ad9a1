"""Safe printing of untrusted text, such as other processes' messages and file headers, to any standard stream.

Printing never fails if standard output or standard error is closed, has a limited encoding, or has lost its terminal.
"""

import codecs
import io
import os
import sys

MOST_CHARACTERS = 500
_CUT = " ... "
# Lone surrogates stand for undecodable bytes of file names (PEP 383), and are printed as those bytes, except 0x80 to
# 0x9f, which some terminals interpret as control characters.
_RAW_BYTES = range(0xDCA0, 0xDD00)
_BYTES = range(0xDC80, 0xDD00)  # surrogates for undecodable bytes of a file name (PEP 383)


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    r"""Return text on one line without control characters, such as a terminal's escape sequences.

    Line breaks and tabs become spaces; other unprintable characters become \x1b, \u202e, ...

    Args:
        text: The text.
        most: Maximum number of characters; the middle of a longer text is dropped.
    """
    if len(text) > 4 * most:  # bounds the time for long texts
        text = text[: 2 * most] + text[-2 * most :]
    shown = "".join(_shown(character) for character in " ".join(text.split()))
    if len(shown) <= most:
        return shown
    tail = (most - len(_CUT)) // 3
    return shown[: most - len(_CUT) - tail] + _CUT + shown[len(shown) - tail :]


def _shown(character: str) -> str:
    code = ord(character)
    if character.isprintable() or code in _RAW_BYTES:
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def prepare_streams() -> None:
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
        sys.stderr.reconfigure(errors="backslashreplace")  # Python's default for standard error


def silence(numbers: list[int]) -> None:
    """Discard whatever is written to these file descriptors from now on, since their terminal is gone."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  (in a signal handler)
        for number in numbers:
            os.dup2(nowhere.fileno(), number)


def terminals() -> list[int]:
    """Return which of the file descriptors 1 and 2, standard output and standard error, are terminals."""
    return [number for number in (1, 2) if not _is_closed(number) and os.isatty(number)]


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _printed(error: UnicodeError) -> tuple[str | bytes, int]:
    r"""Encode characters that the encoding lacks: undecodable bytes of a file name as bytes, others as \xe4, ..."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    made = bytearray()
    for character in error.object[error.start : error.end]:
        code = ord(character)
        made += bytes([code - 0xDC00]) if code in _BYTES else character.encode("ascii", "backslashreplace")
    return bytes(made), error.end
