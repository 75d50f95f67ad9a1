"""Settings of Python's garbage collector for a server's process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 20_000  # lists and the like, between two looks at the newest; a large request has thousands


@contextmanager
def settled() -> Iterator[None]:
    """Within the block, do not look for garbage again and again among all that was loaded before.

    Requests make many lists, so that the collector runs often; a server is about a tenth faster without these looks.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def paused() -> Iterator[None]:
    """Within the block, do not look for garbage: a parser makes none, and each look at its values takes long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
