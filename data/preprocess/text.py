"""Reader of text in blocks of complete lines, from the beginning or at any window of an uncompressed file."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hostdev.core.errors import UserError
from hostdev.data.preprocess.inputs import AnyInput
from hostdev.data.preprocess.recoded import Recoded


class Lines(NamedTuple):
    """Some MiB of complete lines; the last line of an input may lack its newline."""

    text: bytes
    offset: int  # end of the lines in the input, in decompressed bytes
    taken: int  # bytes that the lines took in the (compressed) file
    is_last: bool = False  # the rest of the input, without a newline


_NEAR = 1 << 12  # bytes

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
) -> Iterator[Lines]:
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
            yield Lines(text, offset, taken - before)
            before = taken
        if rest:
            yield Lines(rest, offset + len(rest), stream.taken() - before, is_last=True)


def window_lines(
    source: AnyInput | Recoded, number: int, block_bytes: int, too_long: Callable[[], UserError]
) -> Iterator[Lines]:
    """Iterate over the lines that `whole_lines` yields when it reads the window `number` of an uncompressed file.

    Windows have `block_bytes` bytes; every line ends with a newline, except possibly the last. The lines of all
    windows, in order, are those of `whole_lines(source, 0, ...)`.
    """
    start = number * block_bytes
    begin = _last_line_end(source, start, LONGEST * block_bytes, too_long)
    stop = _line_end_near(source, start, start + block_bytes)
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
        yield Lines(text[:end], begin + end, taken)
        taken = 0
    if start + block_bytes >= source.size and end < len(text):
        yield Lines(text[end:], begin + len(text), taken, is_last=True)


def _line_end_near(source: AnyInput | Recoded, start: int, stop: int) -> int:
    """Return the end of the last line in a window, if it is near its end, so that no text is copied to cut it there.

    Returns `stop` if there is none, or the window is the last one.
    """
    if stop >= source.size:
        return stop
    first = max(start, stop - _NEAR)
    with source.open() as stream:
        stream.skip(first)
        end = stream.read(stop - first).rfind(b"\n") + 1
    return first + end if end else stop


def _last_line_end(source: AnyInput | Recoded, before: int, most: int, too_long: Callable[[], UserError]) -> int:
    """Return the end of the last line that ends at most at `before`; 0 if there is none."""
    size = 1 << 12
    while True:
        first = max(0, before - size)
        with source.open() as stream:
            stream.skip(first)
            end = stream.read(before - first).rfind(b"\n") + 1
        if end:
            return first + end
        if first == 0:
            return 0
        if size >= most:
            raise too_long()
        size = min(most, size * 8)
