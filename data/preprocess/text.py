"""Text in blocks of whole lines."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hostdev.core.errors import UserError
from hostdev.data.preprocess.inputs import AnyInput


class Lines(NamedTuple):
    """Some MiB of whole lines: the last of an input may lack its end."""

    text: bytes
    offset: int  # of their end among the input's bytes
    taken: int  # bytes of the file that they took, compressed as they are
    is_last: bool = False  # what is left at the end of the input, without the end of a line


LONGEST = 4  # blocks that a line may take; a longer one is an error, wherever blocks begin


def newline(piece: bytes) -> int:
    """Return how much of a piece is up to the last end of a line; 0: none."""
    return piece.rfind(b"\n") + 1


def whole_lines(
    source: AnyInput,
    offset: int,
    block_bytes: int,
    too_long: Callable[[], UserError],
    last_end: Callable[[bytes], int] = newline,
) -> Iterator[Lines]:
    """Iterate over an input's lines from an offset on, where a line begins.

    too_long  the error for a line of more than `LONGEST` blocks
    last_end  as `newline`; gets what is read, piece by piece, where the ends of rows are not those of lines. Then rows
              of up to one block more pass
    """
    most = LONGEST * block_bytes
    with source.open() as stream:
        stream.skip(offset)
        rest, before = b"", stream.taken() if source.plain else 0
        while piece := stream.read(block_bytes):
            end = last_end(piece)
            goes_on = 0 if end else len(piece)  # of the line that began before
            if end and rest and last_end is newline:
                goes_on = piece.index(b"\n") + 1
            if len(rest) + goes_on > most:
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
