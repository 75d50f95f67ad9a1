"""A mark for the parts of a user's program that run ahead of the loop's body: the loader, `ids` and `send`.

How far ahead they run depends on the pipeline's depth and on the cache, and so would the rows that they read from a
table. Tables therefore refuse reads and writes while the mark is set.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Mark(threading.local):
    is_set = False


_mark = _Mark()


@contextmanager
def reading_ahead() -> Iterator[None]:
    """Set the mark for this thread within a block that runs further ahead than at depth 0 without a cache."""
    before, _mark.is_set = _mark.is_set, True
    try:
        yield
    finally:
        _mark.is_set = before


def is_reading_ahead() -> bool:
    """Return whether the mark is set for the calling thread."""
    return _mark.is_set
