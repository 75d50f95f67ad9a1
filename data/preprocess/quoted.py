"""Row ends of quoted text, found in parts: each window of a file is scanned alone, then the results are chained.

Where a row ends depends on whether a quoted value is open, which depends on all text before. A window is therefore
scanned once for each state in which it may begin.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hostdev.core.errors import UserError
from hostdev.data.preprocess.inputs import AnyInput
from hostdev.data.preprocess.recoded import Recoded
from hostdev.data.preprocess.text import LONGEST
from hostdev.kernels.strings import IN_QUOTES, scan_quotes

STATES = 4  # of `scan_quotes`
_UNCHANGED = -1


class Scan(NamedTuple):
    """What a window does if it begins in one state of `scan_quotes`.

    Attributes:
        state: The state at its end.
        lines: Number of line ends.
        opened: The number, from 1, of the window's line on which its last quoted value begins; -1 if none does.
        end: Number of bytes up to and including the last line end outside quotes.
    """

    state: int
    lines: int
    opened: int
    end: int


class TextRows(NamedTuple):
    """Text [begin, end) of complete rows; `is_last` if it does not end with a line end."""

    begin: int
    end: int
    is_last: bool = False


def scan_windows(
    source: AnyInput | Recoded, delimiter: bytes, block_bytes: int, windows: range
) -> list[tuple[Scan, ...]]:
    """Return, for each window of `block_bytes` bytes, a `Scan` for each state in which it may begin."""
    found = []
    with source.open() as stream:
        stream.skip(windows.start * block_bytes)
        for _ in windows:
            text = stream.read(block_bytes)
            found.append(tuple(_scan(text, delimiter, state) for state in range(STATES)))
    return found


def _scan(text: bytes, delimiter: bytes, state: int) -> Scan:
    if b'"' not in text:
        lines = text.count(b"\n")
        if state == IN_QUOTES or not text:
            return Scan(state, lines, _UNCHANGED, 0)
        return Scan(int(text[-1:] not in (delimiter, b"\n", b"\r")), lines, _UNCHANGED, text.rfind(b"\n") + 1)
    found = scan_quotes(np.frombuffer(text, np.uint8), delimiter[0], state, 0, _UNCHANGED)
    return Scan(*map(int, found))


def chain(
    scans: Sequence[Sequence[Scan]], size: int, block_bytes: int, too_long: Callable[[], UserError], name: str
) -> tuple[list[TextRows], UserError | None]:
    """Return the rows of each window of a file of `size` bytes, as `whole_lines` yields them with `_RowEnds`.

    Also returns the error that ends the iteration, if any. Windows without a row end have no entry.
    """
    rows: list[TextRows] = []
    state = lines = opened = begin = 0
    for number, by_state in enumerate(scans):
        start, one = number * block_bytes, by_state[state]
        waiting = start - begin
        continued = 0 if one.end else min(block_bytes, size - start)
        if waiting + continued > LONGEST * block_bytes:
            return rows, too_long()
        if one.opened != _UNCHANGED:
            opened = lines + one.opened
        state, lines = one.state, lines + one.lines
        if one.end:
            rows.append(TextRows(begin, start + one.end))
            begin = start + one.end
    if begin < size:
        if state == IN_QUOTES:
            return rows, unclosed(name, opened)
        rows.append(TextRows(begin, size, is_last=True))
    return rows, None


def unclosed(name: str, line: int) -> UserError:
    """Return the error for quotes that begin on a line of the file and are never closed."""
    return UserError(
        f"{name}, line {line}: the quotes that begin here are never closed; if quotes are ordinary characters, give "
        "--no-quotes"
    )
