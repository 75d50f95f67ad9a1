"""An iterator that is read ahead of a loop: what the loop did not come to is there for the next one."""

import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from hostdev.runtime.own_generators import Draw
from hostdev.runtime.random_streams import Place, RandomStreams

_OWN_REFERENCES = 2  # to the iterator: the field's, and that of the call which counts


class ReadAhead:
    """The batches of an iterator that were read, and not yet given out.

    A loop that is left early has read further than it has come, by its depth and the window of its caches. Where the
    next one goes on with the same iterator, it gets those first, so that no batch is lost.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.streams: RandomStreams | None = None  # of random numbers, as the last loop over it had them
        self.states: Any = None  # accelerate's, with each batch that is kept
        self.draws: deque[list[Draw]] = deque()  # of the loader's from generators of its own, for each that is kept
        self._kept: deque[Any] = deque()
        self._readers = 0
        self._reading = threading.Lock()  # a reader of before may still be in somebody's code

    @property
    def is_held(self) -> bool:
        """Tell whether somebody else has the iterator, and so may go on with it."""
        return sys.getrefcount(self.source) > _OWN_REFERENCES

    @property
    def place(self) -> Place | None:
        """Where in its batches the last loop over it is, for their random streams."""
        return None if self.streams is None else self.streams.place

    def batches(self) -> Iterator[Any]:
        """Yield what was kept, then what the iterator has; for one reader at a time."""
        with self._reading:
            again = deque(self._kept)
            self._readers += 1
            reader = self._readers
        while again:
            yield again.popleft()
        while True:
            with self._reading:
                if reader != self._readers:  # the next loop has begun
                    return
                try:
                    held = [next(self.source)]
                except StopIteration:
                    return
                self._kept.append(held[0])
                self.draws.append([])
            yield held.pop()  # not kept here: a batch lives no longer than the caller has it

    def given(self) -> None:
        """Note that the first of them has been given out."""
        self._kept.popleft()
        self.draws.popleft()


def require_read_ahead(read_ahead: Any, *, background: bool) -> None:
    """Raise ValueError for what is no number of batches, or has no effect."""
    if read_ahead is None:
        return
    if isinstance(read_ahead, bool) or not isinstance(read_ahead, int) or read_ahead < 0:
        raise ValueError(f"read_ahead is a number of batches, 0 or more, not {read_ahead!r}")
    if background:
        raise ValueError("read_ahead bounds what is read in the loop's thread; leave it out with background=True")
