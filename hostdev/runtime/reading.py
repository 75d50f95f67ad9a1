"""How a loop reads its loader: what a program's own code does there is the same at any depth, or refused.

The loader, `ids` and `send` are somebody's program. They run in the loop's own thread, but batches ahead of the body.
What follows from that has an owner each: random numbers (`random_streams`, `own_generators`), memory that is filled
again (`refills`), batches that a loop was left before (`read_ahead`), and what accelerate tells the body. This is where
a batch passes them all, once as it is read and once as it is given out.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from hostdev.core.reading_ahead import reading_ahead
from hostdev.frameworks import accelerate
from hostdev.runtime.own_generators import Draw, OwnGenerators, repeat
from hostdev.runtime.random_streams import Place, RandomStreams
from hostdev.runtime.read_ahead import ReadAhead
from hostdev.runtime.refills import InFlight


class Reading:
    """The batches of one loop, from its loader to its body.

    batches  the loader, which begins here
    program  what else of the program is called for each batch: `ids` and `send`
    keep     returns what is kept of an iterator, in which another loop may go on where this one is left
    """

    def __init__(
        self, batches: Iterable[Any], program: Sequence[Any], keep: Callable[[Iterator[Any]], ReadAhead]
    ) -> None:  # fmt: skip
        source = iter(batches)
        self.kept = kept = keep(source) if source is batches else None
        self._repeated = deque[list[Draw]]() if kept is None else kept.draws.copy()  # of batches of earlier loops
        self._streams: RandomStreams | None = None
        self._in_flight: InFlight | None = None  # None: nothing is read before the batch before it is given out
        self._own: OwnGenerators | None = None
        self._states: accelerate.States | None = None
        self._drew: deque[Sequence[str]] = deque()  # the global generators that each batch's reading drew from
        self._roots = batches, *program
        self._source = source if kept is None else kept.batches()
        if accelerate.is_imported():
            self._states = accelerate.States() if kept is None or kept.states is None else kept.states
            self._source = self._states.reading(self._source)
            if kept is not None:
                kept.states = self._states

    def watch(self, streams: RandomStreams, *, ahead: bool) -> None:
        """Let reading be seen: the program's own code runs in it.

        streams  of random numbers, for the batches
        ahead    batches are read before the loop comes to them
        """
        self._streams = streams
        if ahead:
            self._in_flight = InFlight()
            self._own = OwnGenerators(*self._roots)
        if self.kept is not None:
            self.kept.streams = streams

    @property
    def copies(self) -> bool:
        """Tell whether ids are to be copied when they are read: the loader may write to its own again."""
        return self._in_flight is not None

    @property
    def place(self) -> Place | None:
        """Where in its batches the loop is, for their random streams."""
        return None if self._streams is None else self._streams.place

    @contextmanager
    def batch(self, number: int) -> Iterator[list[Any]]:
        """Read the next batch, and what the block makes of it; the list has it, to be taken out, or nothing at the end.

        number  of batches that were read before it
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
        """Read the next batch with random streams of its own: the loader's, and what of the program comes after it."""
        streams = self._streams
        position = 0 if streams is None else streams.start + number
        is_first = streams is not None and streams.is_new and not number  # it draws as in a loop of plain torch
        with nullcontext() if self._in_flight is None or not number else reading_ahead():  # the first is not
            held = self._next() if is_first else []
            if is_first and not held:
                yield held, ()
                return
            with nullcontext(list[str]()) if streams is None else streams.reading(position) as drew:
                yield held if is_first else self._next(), drew

    def _next(self) -> list[Any]:
        """Return the loader's next batch in a list, out of which it is taken so that nothing keeps it alive."""
        is_new = not self._repeated
        if not is_new:
            repeat(self._repeated.popleft())
        for batch in self._source:
            if is_new and self.kept is not None and self._own is not None:
                self.kept.draws[-1] = self._own.loaded()
            return [batch]
        return []

    def has_read(self, batch: Any, number: int) -> None:
        """Note the memory of a batch; ValueError where reading it has changed one before it.

        number  of the batch, for the message
        """
        if self._in_flight is not None:
            self._in_flight.after_read(batch, number)

    def give(self) -> None:
        """Give out the first of the batches that were read; ValueError where what came after it has changed it."""
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
        """End before the last batch; ValueError for draws that would have been others at depth 0."""
        own = self._own
        self.end()
        if own is not None:
            own.leave()

    def end(self) -> None:
        """Let go of the batches."""
        self._source, self._in_flight, self._own = iter(()), None, None
        if self._states is not None:
            self._states.hide()
