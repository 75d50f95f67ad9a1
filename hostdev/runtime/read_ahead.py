"""Keeps the batches that a loop has read ahead from an iterator but not used, for the next loop over the iterator."""

import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from hostdev.runtime.random_streams import Place, RandomStreams

_OWN_REFERENCES = 2  # references to the iterator: the field, and the argument of the counting call


class ReadAhead:
    """The batches of an iterator that were read but not used yet.

    A loop that ends early has read more batches than its body has used, because of the depth and the window of the
    caches. The next loop over the same iterator gets these batches first, so that none is lost.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.streams: RandomStreams | None = None  # random streams of the last loop over the iterator
        self.states: list[Any] = []  # the `reading.LoaderStates` of the kept batches
        self.may_read_ahead: bool | None = None  # whether it is known to have no generators; None: no loop has asked
        self._kept: deque[Any] = deque()
        self._readers = 0
        self._reading = threading.Lock()  # an earlier reader may still run the loader's code

    @property
    def is_held(self) -> bool:
        """Whether other code holds the iterator, and may continue with it."""
        return sys.getrefcount(self.source) > _OWN_REFERENCES

    @property
    def place(self) -> Place | None:
        """The position of the last loop over the iterator, which selects the random streams; None if unknown."""
        return None if self.streams is None else self.streams.place

    def batches(self) -> Iterator[Any]:
        """Yield the kept batches, then new ones from the iterator, until `batches` is called again."""
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
            yield held.pop()  # popped, so that only the caller keeps a batch alive

    def given(self) -> None:
        """Remove the first kept batch, which the loop has yielded."""
        self._kept.popleft()


class Iterators:
    """The iterators that a runtime's loops have read ahead, and their positions."""

    def __init__(self) -> None:
        self._held: list[ReadAhead] = []
        self._last: ReadAhead | None = None  # the iterator of the last loop over `train`
        self._loaded: Place | None = None  # a loaded checkpoint's position

    def get(self, source: Iterator[Any], *, train: bool) -> ReadAhead:
        """Return an iterator's record, which has the batches that an earlier loop has read but not used."""
        self._held = [one for one in self._held if one.is_held or one is self._last]
        found = self.find(source)
        if found is None:
            found = ReadAhead(source)
            self._held.append(found)
        if train:
            self._last = found
        return found

    def find(self, source: Any) -> ReadAhead | None:
        """Return an iterator's record, if an earlier loop has read it."""
        return next((one for one in self._held if one.source is source), None)

    def remove(self, ahead: ReadAhead) -> None:
        """Forget an iterator that is at its end."""
        self._held = [one for one in self._held if one is not ahead]
        if self._last is ahead:
            self._last = None

    def clear(self) -> None:
        """Forget all iterators."""
        self._held, self._last = [], None

    @property
    def place(self) -> Place | None:
        """The position where the last loop over `train` left its iterator."""
        return None if self._last is None else self._last.place

    def continue_at(self, place: Place | None) -> None:
        """Make the next loop over `train` begin at a checkpoint's position in the batches."""
        self._loaded = place

    def take_loaded(self) -> Place | None:
        """Return a loaded checkpoint's position at the first call after loading; else None."""
        place, self._loaded = self._loaded, None
        return place


def require_read_ahead(read_ahead: Any, *, background: bool) -> None:
    """Raise ValueError unless `read_ahead` is None, True, or a number of batches; `background` allows only None."""
    if read_ahead is None or (read_ahead is True and not background):
        return
    if read_ahead is not True and (isinstance(read_ahead, bool) or not isinstance(read_ahead, int) or read_ahead < 0):
        raise ValueError(f"read_ahead must be True, or a number of batches, 0 or more, not {read_ahead!r}")
    if background:
        raise ValueError("read_ahead has no effect with background=True; leave out one of them")
