"""Reader of text in blocks of complete lines, from the beginning or at any window of an uncompressed file.

Inputs with other encodings and line ends are converted to UTF-8 with newlines first. Where a row of quoted text ends
depends on whether a quoted value is open, which depends on all text before. A window of quoted text is therefore
scanned once for each state in which it may begin, and then the results are chained.
"""

import codecs
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from hostdev.core.errors import UserError
from hostdev.data.preprocess.inputs import AnyInput, Stream
from hostdev.kernels.strings import IN_QUOTES, scan_quotes

_AT_ONCE = 1 << 22  # bytes read at a time
STATES = 4  # number of states of `scan_quotes`
_UNCHANGED = -1


class Recoded:
    """An input converted to UTF-8 with newlines as line ends; path, size and fingerprint are those of the input.

    Args:
        source: The input.
        encoding: Python's name for the input's encoding.
        skipped_lines: Number of lines to skip at the beginning.
        returns: Whether lines end with a carriage return and no newline.
    """

    plain = False

    def __init__(self, source: AnyInput, *, encoding: str, skipped_lines: int, returns: bool) -> None:
        self._source, self._how = source, (encoding, skipped_lines, returns)
        self.path, self.name, self.size = source.path, source.name, source.size
        self.describe, self.stamp, self.check_unchanged = source.describe, source.stamp, source.check_unchanged

    def head(self, size: int) -> bytes:
        """Return the beginning of the content, at most `size` bytes; fewer if lines are skipped."""
        return _Recoder(io.BytesIO(self._source.head(size)), self.name, *self._how, whole=False).read(size)

    @contextmanager
    def open(self) -> Iterator[Stream]:
        """Open the content from its beginning."""
        with self._source.open() as stream:
            yield Stream(_Recoder(stream, self.name, *self._how), self.name, stream.taken)


def recode(source: AnyInput, *, encoding: str, skipped_lines: int, head: int) -> "AnyInput | Recoded":
    """Convert an input to UTF-8 with newlines; return `source` itself if no conversion is needed.

    The line ends are inferred from the first `head` bytes.
    """
    start = source.head(head)
    returns = b"\r" in start and b"\n" not in start and encoding == "utf-8"
    if encoding == "utf-8" and not skipped_lines and not returns:
        return source
    return Recoded(source, encoding=encoding, skipped_lines=skipped_lines, returns=returns)


class _Recoder:
    """Reads a byte stream as UTF-8; `whole` is false if the stream is only the beginning of an input."""

    def __init__(
        self, stream: Any, name: str, encoding: str, skipped_lines: int, returns: bool, *, whole: bool = True
    ) -> None:
        self._stream, self._name, self._encoding, self._whole = stream, name, encoding, whole
        self._decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)()
        self._left, self._returns, self._rest, self._read = skipped_lines, returns, b"", 0

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end."""
        while not self._rest:
            piece = self._stream.read(_AT_ONCE)
            text = self._decoded(piece)
            if self._returns:
                text = text.replace(b"\r", b"\n")
            self._rest = self._without_first_lines(text)
            if not piece:
                break
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def _decoded(self, piece: bytes) -> bytes:
        if self._decoder is None:
            return piece
        try:
            text: bytes = self._decoder.decode(piece, final=self._whole and not piece).encode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._name}: byte {self._read + error.start:,} or a byte near it is not {self._encoding}; "
                "choose another --encoding"
            ) from None
        except UnicodeEncodeError:  # the encoding allows lone surrogates
            raise UserError(
                f"{self._name}: a character cannot be written as UTF-8; choose another --encoding"
            ) from None
        self._read += len(piece)
        return text

    def _without_first_lines(self, text: bytes) -> bytes:
        while self._left and text:
            _, newline, text = text.partition(b"\n")
            self._left -= bool(newline)
        return text


class TextLines(NamedTuple):
    """Some MiB of complete lines; the last line of an input may lack its newline."""

    text: bytes
    offset: int  # end of the lines in the input, in decompressed bytes
    taken: int  # bytes that the lines took in the (compressed) file
    is_last: bool = False  # whether this is the rest of the input, which lacks a newline


_NEAR = 1 << 12  # bytes in which the end of a line is looked for first

LONGEST = 4  # maximum length of a line, in blocks, wherever in a block the line begins


def newline(piece: bytes) -> int:
    """Return the length of a piece up to and including its last newline, or 0 if it has none."""
    return piece.rfind(b"\n") + 1


def whole_lines(
    source: AnyInput | Recoded,
    offset: int,
    block_bytes: int,
    too_long: Callable[[], UserError],
    last_end: Callable[[bytes], int] = newline,
) -> Iterator[TextLines]:
    """Iterate over an input's lines, starting at `offset`, where a line must begin.

    Args:
        too_long: Creates the error for a line of more than `LONGEST` blocks.
        last_end: Called with bytes; returns the end of the last complete row in them. Any function other than `newline`
            is for rows that can contain newlines; such rows may be one block longer.
    """
    most = LONGEST * block_bytes
    with source.open() as stream:
        stream.skip(offset)
        rest, before = b"", stream.taken() if source.plain else 0
        while piece := stream.read(block_bytes):
            end = last_end(piece)
            continued = 0 if end else len(piece)  # bytes of a line that began in an earlier block
            if end and rest and last_end is newline:
                continued = piece.index(b"\n") + 1
            if len(rest) + continued > most:
                raise too_long()
            if end == 0:
                rest += piece
                continue
            text, rest = b"".join((rest, memoryview(piece)[:end])), piece[end:]
            offset, taken = offset + len(text), stream.taken()
            yield TextLines(text, offset, taken - before)
            before = taken
        if rest:
            yield TextLines(rest, offset + len(rest), stream.taken() - before, is_last=True)


def text_windows(source: AnyInput | Recoded, block_bytes: int) -> list[tuple[int, int]]:
    """Return the numbers of an uncompressed file's windows for `window_lines`, each with the average size in bytes."""
    windows = -(-source.size // block_bytes)
    return [(window, -(-source.size // windows)) for window in range(windows)]


def window_lines(
    source: AnyInput | Recoded, number: int, block_bytes: int, too_long: Callable[[], UserError]
) -> Iterator[TextLines]:
    """Iterate over the lines that `whole_lines` yields when it reads the window `number` of an uncompressed file.

    Windows have `block_bytes` bytes; every line ends with a newline, except possibly the last. The lines of all
    windows, in order, are those of `whole_lines(source, 0, ...)`.
    """
    start = number * block_bytes
    begin = _last_line_end(source, start, LONGEST * block_bytes, too_long)
    stop = start + block_bytes
    if stop < source.size:  # if possible, end at a line end: then `text[:end]` below copies nothing
        stop = _line_end(source, max(start, stop - _NEAR), stop) or stop
    with source.open() as stream:
        stream.skip(begin)
        text = stream.read(stop - begin)
    waiting = start - begin  # bytes of a line that began before the window
    if len(text) <= waiting:
        return
    end = text.rfind(b"\n", waiting) + 1
    continued = 0 if end else len(text) - waiting
    if end and waiting:
        continued = text.index(b"\n", waiting) + 1 - waiting
    if waiting + continued > LONGEST * block_bytes:
        raise too_long()
    taken = min(block_bytes, source.size - start)
    if end:
        yield TextLines(text[:end], begin + end, taken)
        taken = 0
    if start + block_bytes >= source.size and end < len(text):
        yield TextLines(text[end:], begin + len(text), taken, is_last=True)


def _line_end(source: AnyInput | Recoded, start: int, stop: int) -> int:
    """Return the end of the last line that ends in these bytes of an input; 0 if none does."""
    with source.open() as stream:
        stream.skip(start)
        end = stream.read(stop - start).rfind(b"\n") + 1
    return start + end if end else 0


def _last_line_end(source: AnyInput | Recoded, before: int, most: int, too_long: Callable[[], UserError]) -> int:
    """Return the end of the last line that ends at or before byte `before`; 0 if there is none."""
    size = _NEAR
    while True:
        first = max(0, before - size)
        if end := _line_end(source, first, before):
            return end
        if first == 0:
            return 0
        if size >= most:
            raise too_long()
        size = min(most, size * 8)


class Scan(NamedTuple):
    """The result of scanning a window that begins in one state of `scan_quotes`.

    Attributes:
        state: The state at the window's end.
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
    """Return the rows of each window of a file of `size` bytes, as `DelimitedFile.parts` yields them.

    Also returns the error for rows that are too long or quotes that are never closed, or None. Windows without a row
    end have no entry.
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
