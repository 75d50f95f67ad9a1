"""Reads a loop's loader so that the program's code gives the same results at any depth, or raises an error.

The loader, `ids` and `send` are the program's code. They run in the loop's thread, but ahead of the body. Each problem
that this causes has its own module: random numbers (`random_streams`, `own_generators`), reused memory (`refills`),
prefetched batches that a loop did not use (`read_ahead`), and accelerate's state (`frameworks.accelerate`). This module
calls those modules when a batch is read and when the loop yields it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from hostdev.core.reading_ahead import reading_ahead
from hostdev.ext.frameworks import accelerate
from hostdev.runtime.own_generators import Draw, OwnGenerators, repeat
from hostdev.runtime.random_streams import Place, RandomStreams
from hostdev.runtime.read_ahead import ReadAhead
from hostdev.runtime.refills import InFlight


class Reading:
    """The batches of one loop, from its loader to its body.

    Args:
        batches: The loader, whose iterator is created here.
        program: The other functions that are called for each batch: `ids` and `send`.
        keep: Called with an iterator; returns its `ReadAhead`, from which a later loop may continue.
    """

    def __init__(
        self, batches: Iterable[Any], program: Sequence[Any], keep: Callable[[Iterator[Any]], ReadAhead]
    ) -> None:
        source = iter(batches)
        self.kept = kept = keep(source) if source is batches else None
        self._repeated = deque[list[Draw]]() if kept is None else kept.draws.copy()  # draws to repeat
        self._streams: RandomStreams | None = None
        self._in_flight: InFlight | None = None  # None: a batch is read after the previous one was yielded
        self._own: OwnGenerators | None = None
        self._states: accelerate.States | None = None
        self._drew: deque[Sequence[str]] = deque()  # for each prefetched batch, the global generators that it drew from
        self._roots = batches, *program
        self._source = source if kept is None else kept.batches()
        if accelerate.is_imported():
            self._states = accelerate.States() if kept is None or kept.states is None else kept.states
            self._source = self._states.reading(self._source)
            if kept is not None:
                kept.states = self._states

    def watch(self, streams: RandomStreams, *, ahead: bool) -> None:
        """Prepare to watch what the program's code does while batches are read.

        Args:
            streams: The batches' random streams.
            ahead: Whether batches are read before the body needs them.
        """
        self._streams = streams
        if ahead:
            self._in_flight = InFlight()
            self._own = OwnGenerators(*self._roots)
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
        if self._own is not None:
            self._own.before_read()
        try:
            with self._reading(number) as (held, drew):
                has_one = bool(held)
                yield held
        except BaseException:
            if self._own is not None:
                self._own.failed()
            raise
        if self._own is not None:
            self._own.after_read()
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
        is_new = not self._repeated
        if not is_new:
            repeat(self._repeated.popleft())
        for batch in self._source:
            if is_new and self.kept is not None and self._own is not None:
                self.kept.draws[-1] = self._own.loaded()
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
        if self._own is not None:
            self._own.give()
        if self._streams is not None:
            self._streams.give(self._drew.popleft())
        if self._states is not None:
            self._states.show()

    def leave(self) -> None:
        """Stop before the last batch; raise ValueError if random draws would differ from those at depth 0."""
        own = self._own
        self.end()
        if own is not None:
            own.leave()

    def end(self) -> None:
        """Release the batches."""
        self._source, self._in_flight, self._own = iter(()), None, None
        if self._states is not None:
            self._states.hide()
