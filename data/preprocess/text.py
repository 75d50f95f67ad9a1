"""Text in blocks of whole lines."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hostdev.data.preprocess.inputs import AnyInput

from hostdev.core.errors import UserError


class Lines(NamedTuple):
    """Some MiB of whole lines: the last of an input may lack its end."""

    text: bytes
    offset: int  # of their end among the input's bytes
    taken: int  # bytes of the file that they took, compressed as they are
    is_last: bool = False  # what is left at the end of the input, without the end of a line


def whole_lines(
    source: AnyInput, offset: int, block_bytes: int, last_end: Callable[[bytes], int], too_long: Callable[[], UserError]
) -> Iterator[Lines]:
    """Iterate over an input's lines from an offset on, where a line begins.

    last_end  gets what is read, piece by piece, and returns how much of the piece is up to the last line's end; 0: none
    too_long  the error for a line of more than two blocks
    """
    with source.open() as stream:
        stream.skip(offset)
        rest, before = b"", stream.taken() if source.plain else 0
        while piece := stream.read(block_bytes):
            end = last_end(piece)
            if end == 0 and len(rest) + len(piece) > 2 * block_bytes:
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
