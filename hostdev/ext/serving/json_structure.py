"""The structure of a JSON text: how much there is of each kind of value, and where the text can be divided."""

from typing import Any

import numpy as np

from hostdev.kernels.jit import kernel

WHOLE, WRONG, UNENDED, DEEP = range(4)  # results of `scan`
COUNTS = 5  # what `scan` counts: objects, arrays, texts, bytes of the texts in memory, characters of other values

_QUOTE, _BACKSLASH, _COMMA, _COLON, _SPACE = 34, 92, 44, 58, 32
_ARRAY, _ARRAY_END, _OBJECT, _OBJECT_END = 91, 93, 123, 125
_WIDE, _WIDEST = 0x80, 0xF0  # first bytes of characters for which Python may need 2 and 4 bytes per character


@kernel
def scan(text: Any, piece: Any, levels: Any, brackets: Any, cuts: Any, counts: Any) -> Any:
    """Count the values of a JSON text, and find where its large containers can be divided.

    A container is large if it has more than `piece` bytes. The cuts divide its entries into groups: each group has at
    most `piece` bytes, or is a single entry. Only strings, brackets and commas are checked; other errors are not found.

    Args:
        text: uint8 [N].
        piece: Bytes.
        levels: int64 [D, 3], scratch memory; D is the greatest depth.
        brackets: uint8 [D], scratch memory.
        cuts: int64 [M, 2], written: for each cut of a large container, and at last for its end, the positions of its
            opening bracket and of the comma or closing bracket.
        counts: int64 [COUNTS], zeros; written.

    Returns:
        A result, a position, and the number of cuts. WHOLE: all is counted. WRONG: there is a comma or bracket that
        does not belong there, at the position. UNENDED: what begins at the position has no end. DEEP: the text is
        nested too deeply for `levels` or `cuts`.
    """
    N, piece = len(text), np.int64(piece)
    depth, i, n, most = 0, 0, 0, len(cuts) - 3
    while i < N:
        c = text[i]
        if c == _QUOTE:
            start, widest = i, np.uint8(0)
            i += 1
            while i < N and text[i] != _QUOTE:
                if text[i] == _BACKSLASH:
                    widest = np.uint8(255)
                    i += 1
                else:
                    widest = max(widest, text[i])
                i += 1
            if i >= N:
                return UNENDED, start, n
            counts[2] += 1
            counts[3] += (i - start) * (4 if widest >= _WIDEST else 2 if widest >= _WIDE else 1)
        elif c in (_ARRAY, _OBJECT):
            if depth == len(levels):
                return DEEP, i, n
            counts[0 if c == _OBJECT else 1] += 1
            levels[depth, 0], levels[depth, 1], levels[depth, 2], brackets[depth] = i, i, i, c
            depth += 1
        elif c in (_COMMA, _ARRAY_END, _OBJECT_END):
            if depth == 0 or (c != _COMMA and c != brackets[depth - 1] + 2):
                return WRONG, i, n
            begin, cut, comma = levels[depth - 1, 0], levels[depth - 1, 1], levels[depth - 1, 2]
            if n > most:
                return DEEP, i, n
            if i - cut > piece and comma > cut:  # the group is full without the entry that ends here
                cuts[n, 0], cuts[n, 1] = begin, comma
                cut = comma
                n += 1
            if c == _COMMA:
                if i - cut > piece:
                    cuts[n, 0], cuts[n, 1] = begin, i
                    cut = i
                    n += 1
                levels[depth - 1, 1], levels[depth - 1, 2] = cut, i
            else:
                depth -= 1
                if i - begin > piece:
                    cuts[n, 0], cuts[n, 1] = begin, i
                    n += 1
        elif c > _SPACE and c != _COLON:
            counts[4] += 1
        i += 1
    return (WHOLE, N, n) if depth == 0 else (UNENDED, levels[depth - 1, 0], n)


def warm_up() -> None:
    """Compile the kernel, or load it from the cache, by calling it once."""
    text = np.frombuffer(b"[]", np.uint8)  # read-only, as a request's body is
    levels, brackets = np.empty((1, 3), np.int64), np.empty(1, np.uint8)
    scan(text, 1, levels, brackets, np.empty((4, 2), np.int64), np.zeros(COUNTS, np.int64))
