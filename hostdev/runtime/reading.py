"""Reads a loop's loader so that the program's code gives the same results at any depth, or raises an error.

The loader, `ids` and `send` are the program's code. They run in the loop's thread, but ahead of the body. Each problem
that this causes has its own module: random numbers (`random_streams`, `own_generators`), reused memory (`refills`),
prefetched batches that a loop did not use (`read_ahead`). A framework whose loaders have a state that belongs to the
body's batch, such as accelerate, registers a `LoaderStates` under the name of the module that has these loaders.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from hostdev.core import registry
from hostdev.core.reading_ahead import reading_ahead
from hostdev.runtime.own_generators import LOADER_STATES
from hostdev.runtime.random_streams import Place, RandomStreams
from hostdev.runtime.read_ahead import ReadAhead
from hostdev.runtime.refills import InFlight


class LoaderStates(Protocol):
    """A framework's state for each batch that was read but not yet yielded; a loop creates it without arguments."""

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and record each one's state, unless an earlier loop has recorded it."""

    def show(self) -> None:
        """Show the framework the state of the batch that is about to be yielded."""

    def hide(self) -> None:
        """Show nothing any more, because the loop has ended."""


class Reading:
    """The batches of one loop, from its loader to its body.

    Args:
        batches: The loader, whose iterator is created here.
        keep: Called with an iterator; returns its `ReadAhead`, from which a later loop may continue.
    """

    def __init__(self, batches: Iterable[Any], keep: Callable[[Iterator[Any]], ReadAhead]) -> None:
        source = iter(batches)
        self.kept = kept = keep(source) if source is batches else None
        self._streams: RandomStreams | None = None
        self._in_flight: InFlight | None = None  # None: a batch is read after the previous one was yielded
        self._drew: deque[Sequence[str]] = deque()  # for each prefetched batch, the global generators that it drew from
        self._source = source if kept is None else kept.batches()
        self._states = [] if kept is None else kept.states
        if not self._states:
            names = [name for name in registry.names(LOADER_STATES) if name in sys.modules]
            self._states += [registry.find(LOADER_STATES, name)() for name in names]
        for states in self._states:
            self._source = states.reading(self._source)

    def watch(self, streams: RandomStreams, *, ahead: bool) -> None:
        """Prepare to watch what the program's code does while batches are read.

        Args:
            streams: The batches' random streams.
            ahead: Whether batches are read before the body needs them.
        """
        self._streams = streams
        if ahead:
            self._in_flight = InFlight()
        if self.kept is not None:
            self.kept.streams = streams

    @property
    def copies(self) -> bool:
        """Whether ids must be copied when they are read, because the loader may reuse their memory."""
        return self._in_flight is not None

    @property
    def place(self) -> Place | None:
        """The loop's position in its sequence of batches, which selects their random streams; None if unknown."""
        return None if self._streams is None else self._streams.place

    @contextmanager
    def batch(self, number: int) -> Iterator[list[Any]]:
        """Read the next batch for a `with` block, which calls `ids` and `send` with the batch.

        Args:
            number: Number of batches that were read before this one.

        Yields:
            A list with the batch, which the block removes from the list; an empty list after the last batch.
        """
        if self._in_flight is not None:
            self._in_flight.before_read()
        with self._reading(number) as (held, drew):
            has_one = bool(held)
            yield held
        if has_one:
            self._drew.append(drew)

    @contextmanager
    def _reading(self, number: int) -> Iterator[tuple[list[Any], Sequence[str]]]:
        """Read the next batch; the loader, and the `with` block, draw from the batch's own random streams."""
        streams = self._streams
        position = 0 if streams is None else streams.start + number
        is_first = streams is not None and streams.is_new and not number  # draws as a plain torch loop does
        with nullcontext() if self._in_flight is None or not number else reading_ahead():  # the first is not read ahead
            held = self._next() if is_first else []
            if is_first and not held:
                yield held, ()
                return
            with nullcontext(list[str]()) if streams is None else streams.reading(position) as drew:
                yield held if is_first else self._next(), drew

    def _next(self) -> list[Any]:
        """Return the loader's next batch in a list; the caller removes it, so that nothing keeps the batch alive."""
        for batch in self._source:
            return [batch]
        return []

    def has_read(self, batch: Any, number: int) -> None:
        """Record the memory of batch `number`; raise ValueError if reading this batch has changed an earlier one."""
        if self._in_flight is not None:
            self._in_flight.after_read(batch, number)

    def give(self) -> None:
        """Count the first prefetched batch as yielded; raise ValueError if reading a later batch has changed it."""
        if self.kept is not None:
            self.kept.given()
        if self._in_flight is not None:
            self._in_flight.given()
        if self._streams is not None:
            self._streams.give(self._drew.popleft())
        for states in self._states:
            states.show()

    def end(self) -> None:
        """Release the batches."""
        self._source, self._in_flight = iter(()), None
        for states in self._states:
            states.hide()
