"""Passes over batches: the stages one after the other, or those of neighbouring batches at once; the same bits.

The in-flight rule. A batch sees a row only after every earlier batch's update of it. When a batch is planned, the rows
that an unfinished batch will update are found: rows of the batch right before it are updated first when that one's
gradients arrive, and delivered late; rows of an older one are delivered after that one's update; all others are fetched
at once. Only the update stage writes the tables, in the order of the batches, so no row is locked.

Threads of an overlapped pass: a fetcher (unique, plan, lookup, send), the caller's (reading and the step) and an
updater; a reader besides, for batches that may be read in the background. What they share is under one condition; a
batch carries its state, and an exception goes where its batch would have gone.

Reading calls somebody's program. In the caller's thread it never runs beside the body of the loop, so that both may use
the same objects. How far it runs ahead depends on the depth and the caches' window only, and not on time.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from hostdev.core.signals import insist
from hostdev.kernels.pool import urgent
from hostdev.pipeline.flight import End, Flight, Gradients, Queue, Request, Stopped
from hostdev.pipeline.groups import Ids
from hostdev.pipeline.line import Line
from hostdev.pipeline.stages import Stages, ahead

_LOOK_SECONDS = 0.2  # after which who waits for other ranks looks whether they come
_LONGEST_JOIN = 0.8  # seconds; a reader may be inside somebody's code


class Pass(Protocol):
    """Batches in their order, each to be stepped by the caller; one thread calls."""

    def take(self) -> Flight | None:
        """Return the next batch with its rows on the device; None after the last, when all has been updated."""

    def finish(self, flight: Flight, gradients: Gradients | None) -> None:
        """Take a step's gradients; None in a pass that updates nothing."""

    def drain(self) -> None:
        """Wait until what has been stepped is updated."""

    def reload(self, table: Any, ids: Ids | None) -> None:
        """Look rows of a table up again that were looked up ahead; after `drain` and a write to the table.

        ids  int32 or int64 [N]; None for all rows. Another thread than the one that goes through the pass has no effect
        """

    def is_own(self, thread: threading.Thread) -> bool:
        """Tell whether a thread is one of the pass's own."""

    def close(self, *, failed: bool = False) -> None:
        """End: what has been stepped is updated, the rest forgotten. Raises the updater's error if it has failed.

        failed  another error has ended the pass
        """


def _raise(held: list[BaseException | None]) -> None:
    """Raise an error that a list holds, if it does, and let go of it: its frames would hold it, and it them."""
    if held[0] is not None:
        raise held.pop()  # type: ignore[misc]


class SerialPass:
    """The stages one after the other, in the caller's thread: the reference.

    window  batches that the caches know in advance
    number  of the batch before the first
    """

    def __init__(
        self, stages: Stages, source: Iterable[Request], *, window: int, number: int, update: bool
    ) -> None:  # fmt: skip
        self._stages, self._update = stages, update
        self._source = iter(source)
        self._caller = threading.get_ident()
        self._given: Flight | None = None  # in the caller's step
        self.number = number
        self._ahead = ahead(stages, self._read, window, update)

    def _read(self) -> Flight | End:
        item = self._stages.read(self._source, self.number + 1)
        self.number += isinstance(item, Flight)
        return item

    def take(self) -> Flight | None:
        """See `Pass`."""
        item = next(self._ahead)
        if isinstance(item, End):
            held = [item.error]
            del item
            _raise(held)
            return None
        self._stages.fetch(item, None, self._update)
        self._stages.begin_step(item, None, self._update)
        self._given = item
        return item

    def finish(self, flight: Flight, gradients: Gradients | None) -> None:
        """See `Pass`."""
        self._given = None
        self._stages.end_step(flight, gradients)
        if self._update:
            self._stages.update(flight, None)
        else:
            self._stages.await_step(flight)
            flight.release()

    def drain(self) -> None:
        """See `Pass`."""

    def reload(self, table: Any, ids: Ids | None) -> None:
        """See `Pass`."""
        if self._given is not None and threading.get_ident() == self._caller:
            self._stages.reload(self._given, table, ids, in_step=True)

    def is_own(self, thread: threading.Thread) -> bool:
        """See `Pass`."""
        return False

    def close(self, *, failed: bool = False) -> None:
        """See `Pass`."""
        self._given = None
        self._ahead.close()  # type: ignore[attr-defined]


class OverlappedPass:
    """Neighbouring batches at once, at most depth + 2 of them alive beside those of which only the ids are known.

    window         batches that the caches know in advance, beside those that are looked up ahead
    number         of the batch before the first
    background     read in a thread, and not in the caller's
    ahead_of_step  how many batches are looked up ahead, the depth at most; for those read in the caller's thread
    """

    def __init__(
        self, stages: Stages, source: Iterable[Request], *, depth: int, window: int, number: int, update: bool,
        background: bool, ahead_of_step: int, in_vain: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._in_vain = in_vain  # tells whether other ranks do not come
        self._stages, self._update = stages, update
        self._timeline = stages.timeline
        self.number = number
        window = window if update else 0
        self._line = line = Line(depth, window, number, update=update)
        self._caller = threading.get_ident()
        self._before: int | None = None  # the batch that the caller has been given
        self._closed = False
        self._first, self._reads_behind = number + 1, background
        self._window, self._ahead = window, ahead_of_step
        self._taken = 0  # batches that the caller has asked for
        self._source: Iterator[Request] | None = None if background else iter(source)  # None, too, after its end
        flights = ahead(stages, self._take_read, window, update)
        work: list[Any] = [("fetcher", self._fetch, line.fetched, flights), ("updater", self._update_next, None)]
        if background:
            work.insert(0, ("reader", self._read, line.read, iter(source)))
        self._threads = [
            threading.Thread(target=self._serve, args=(stage, out, *arguments), name=f"hostdev-{name}", daemon=True)
            for name, stage, out, *arguments in work
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> Flight | None:
        """See `Pass`."""
        line = self._line
        if self._before is not None:  # the caller has come back, and is done with it
            line.let_go(self._before)
            self._before = None
        self._taken += 1
        self._read_ahead()
        with self._timeline.stall("step"):
            line.wait(lambda: line.fetched or line.update_error)
        item = line.fetched.popleft() if line.update_error is None else End(None)
        while isinstance(item, Flight):
            with self._timeline.stall("step"):
                line.wait(lambda: self._may_step(item) or (line.deliverable() is item))
            if self._may_step(item):
                break
            with urgent():  # the device has nothing to do
                self._stages.deliver(item, line)
        self._raise_update_error()
        if isinstance(item, End):
            held = [item.error]
            del item
            self._join_updater()
            self._raise_update_error()
            _raise(held)
            return None
        self._stages.begin_step(item, line, self._update)
        self._before = item.number
        return item

    def _read_ahead(self) -> None:
        """Read in the caller's thread, for the batch that it asks for: one batch at first, then as far as it may.

        The first batch does not wait for more to be read than it needs.
        """
        most = self._taken + self._window + min(self._ahead, self._taken - 1)
        while self._source is not None and self.number - self._first + 1 < most:
            try:
                held: list[Flight | End] = [self._stages.read(self._source, self.number + 1)]
            except Exception as error:  # it comes where its batch would have come
                held = [End(error)]
            if isinstance(held[0], Flight):
                self.number += 1
                with self._line.changed:
                    self._line.flights[self.number] = held[0]
            else:
                self._source = None
            self._line.put(self._line.read, held)

    def _may_step(self, flight: Flight) -> bool:
        return not flight.missing or self._line.update_error is not None

    def finish(self, flight: Flight, gradients: Gradients | None) -> None:
        """See `Pass`."""
        self._stages.end_step(flight, gradients)
        if self._update:
            self._line.finished = flight.number
            self._line.put(self._line.stepped, [flight])
            return
        self._stages.await_step(flight)
        flight.release()
        self._line.let_go(flight.number)

    def drain(self) -> None:
        """See `Pass`."""
        line = self._line
        with self._timeline.stall("step"):
            line.wait(lambda: line.update_error or line.updated >= line.finished)
        self._raise_update_error()

    def reload(self, table: Any, ids: Ids | None) -> None:
        """See `Pass`."""
        line = self._line
        if threading.get_ident() != self._caller:
            return
        with line.look_up_again():  # what is looked up later sees what was written
            with line.changed:
                flights = list(line.flights.values())
            for flight in flights:
                self._stages.reload(flight, table, ids, in_step=flight.number == self._before)

    def is_own(self, thread: threading.Thread) -> bool:
        """See `Pass`."""
        return thread in self._threads

    def _raise_update_error(self) -> None:
        """Raise what has ended the updater; it is not kept, as it holds its frames. Then the pass is to be closed."""
        held, self._line.update_error = [self._line.update_error], None
        _raise(held)

    def _join_updater(self) -> None:
        self._line.put(self._line.stepped, [End(None)])
        with self._timeline.stall("step"):
            self._threads[-1].join()

    def close(self, *, failed: bool = False) -> None:
        """See `Pass`."""
        if self._closed:
            return
        self._closed = True
        line = self._line
        line.put(line.stepped, [End(None)])  # what has been stepped is updated
        together = bool(self._stages.exchanges)
        if together and not failed and line.update_error is None:  # every rank takes part in what another has begun
            failed = not self._joined(self._threads[-1:])
            if self._before is not None:
                line.let_go(self._before)
            line.close()
            if not self._reads_behind:
                line.end_reading()
            failed = failed or not self._joined(self._threads[:-1])
        with line.changed:
            line.stopping = True
            line.changed.notify_all()
        self._source = None
        for thread in self._threads[self._reads_behind :]:
            if together and failed:  # it may wait for a rank that does not come any more
                thread.join(_LONGEST_JOIN)
            else:
                insist(thread.join)  # who closes goes on to write what they write
        if self._reads_behind:
            self._threads[0].join(_LONGEST_JOIN)
        with line.changed:
            line.read.clear()
            line.fetched.clear()
        if not failed:
            self._raise_update_error()  # whoever closes is told, too
        line.update_error = None

    def _joined(self, threads: list[threading.Thread]) -> bool:
        """Wait for threads that exchange something; tell whether they have ended, and other ranks have come."""

        def wait() -> None:
            for thread in threads:
                while thread.is_alive() and not self._in_vain():
                    thread.join(_LOOK_SECONDS)

        insist(wait)
        return not any(thread.is_alive() for thread in threads)

    def _serve(self, stage: Any, out: Queue | None, *arguments: Any) -> None:
        """A thread: repeat its stage until the batches end; an exception goes on as the last item."""
        self._stages.staging.enter_thread()
        try:
            self._repeat(stage, out, arguments)
        finally:
            if out is self._line.read:
                self._line.end_reading()

    def _repeat(self, stage: Any, out: Queue | None, arguments: Any) -> None:
        try:
            while stage(*arguments):
                pass
        except Stopped:
            return
        except BaseException as error:
            if out is not None:
                self._line.put(out, [End(error)])
                return
            self._line.fail_update(error)

    def _read(self, source: Iterator[Request]) -> bool:
        line = self._line
        with self._timeline.stall("read"):
            line.wait(lambda: len(line.flights) < line.most_read)
        held = [self._stages.read(source, self.number + 1)]
        more = isinstance(held[0], Flight)
        with line.changed:
            if line.stopping:  # it was in somebody's code for so long that the next pass may have begun
                raise Stopped
            if isinstance(held[0], Flight):
                self.number += 1
                line.flights[self.number] = held[0]
        line.put(line.read, held)
        return more

    def _take_read(self) -> Flight | End:
        with self._timeline.stall("unique"):
            return self._line.take(self._line.read)

    def _fetch(self, flights: Iterator[Flight | End]) -> bool:
        line = self._line
        held = [next(flights)]
        if more := isinstance(held[0], Flight):
            number = held[0].number
            with self._timeline.stall("lookup"):
                line.wait(lambda: number - next(iter(line.flights)) < line.most)
            self._stages.fetch(held[0], line, self._update)
        line.put(line.fetched, held)
        return more

    def _update_next(self) -> bool:
        line = self._line
        with self._timeline.stall("update"):
            line.wait(lambda: line.stepped or line.deliverable(), finish=True)
            item = line.stepped.popleft() if line.stepped else None
            if isinstance(item, End):
                return False
            if item is not None:
                self._stages.await_step(item)
        if item is not None:
            self._stages.update(item, line)
            number = item.number
            del item
            line.let_go(number)
        elif (flight := line.deliverable()) is not None:
            self._stages.deliver(flight, line)
        return True
