"""Reader of text in blocks of complete lines, from the beginning or at any window of an uncompressed file."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hostdev.core.errors import UserError
from hostdev.data.preprocess.inputs import AnyInput
from hostdev.data.preprocess.recoded import Recoded


class TextLines(NamedTuple):
    """Some MiB of complete lines; the last line of an input may lack its newline."""

    text: bytes
    offset: int  # end of the lines in the input, in decompressed bytes
    taken: int  # bytes that the lines took in the (compressed) file
    is_last: bool = False  # the rest of the input, without a newline


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
    if stop < source.size:  # if a line ends near the window's end, no text is copied to cut it there
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
    """Return the end of the last line that ends at most at `before`; 0 if there is none."""
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
