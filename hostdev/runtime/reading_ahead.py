"""A flag for user code that runs ahead of a training loop's body: the loader, and the callables `ids` and `send`.

How far ahead such code runs depends on the pipeline's depth and the cache; the values that it reads from a table would
then depend on them, too. Tables therefore refuse reads and writes while the flag is set.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Mark(threading.local):
    is_set = False


_mark = _Mark()


@contextmanager
def reading_ahead() -> Iterator[None]:
    """Set the flag for this thread within the block."""
    before, _mark.is_set = _mark.is_set, True
    try:
        yield
    finally:
        _mark.is_set = before


def is_reading_ahead() -> bool:
    """Return whether the flag is set for the calling thread."""
    return _mark.is_set
