"""The overlapped pass: stages of neighbouring batches run concurrently, with results bit-identical to the serial pass.

The in-flight rule: a batch sees a row only after every earlier batch's update of it. Planning a batch finds its rows
that an unfinished batch will write. Rows shared with the previous batch are updated first, as soon as that batch's
gradients arrive, and then looked up. Rows shared with an older batch are looked up after that batch's update. All other
rows are looked up immediately. Only the updater writes the tables, in the order of the batches, so no row is locked.

Threads: a fetcher (deduplicate, plan, look up, send), the caller's thread (read and step) and an updater; also a
reader, if batches may be read in the background. They share their state under one condition variable. A batch carries
its own results. An exception is passed on in place of the batch that caused it.

On a CPU, a step may run alone if this is faster (`context.Turns`): the fetcher then works only while the caller waits
for a batch, after the previous batch's update, so that no row is in conflict.

Reading a batch calls the user's code. If batches are read in the caller's thread, this code never runs at the same time
as the loop's body, so both may use the same objects. How far reading runs ahead then depends only on the depth and the
caches' windows, not on timing.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hostdev.core.signals import uninterruptible
from hostdev.kernels.arrays import AnyIds
from hostdev.kernels.pool import urgent
from hostdev.pipeline.batch_ids import Request
from hostdev.pipeline.context import Context
from hostdev.pipeline.path import End, PassOptions, raise_held
from hostdev.pipeline.results import Gradients, SentBatch, StepBatch
from hostdev.pipeline.scheduling.in_flight import InFlight
from hostdev.pipeline.scheduling.workers import PassWorkers, PipelineQueues
from hostdev.pipeline.stages.look_up import reload
from hostdev.pipeline.stages.step import begin_step, end_step

_POLL_SECONDS = 0.2  # seconds between checks that other ranks still run, while a thread waits for them
LONGEST_JOIN = 0.8  # seconds to wait for a thread that may be inside the user's code or wait for a failed rank


class OverlappedPass:
    """Runs at most depth + 2 neighbouring batches concurrently; batches beyond these are only read and deduplicated.

    Args:
        context: The pipeline's context.
        source: The requests.
        options: The pass's options.
        are_ranks_gone: Called without arguments; returns whether other ranks will no longer answer.
    """

    def __init__(
        self, context: Context, source: Iterable[Request], options: PassOptions, are_ranks_gone: Callable[[], bool]
    ) -> None:
        self._context, self._update, self._timeline = context, options.update, context.timeline
        self._are_ranks_gone = are_ranks_gone
        self._window, self._ahead = options.window if options.update else 0, options.ahead_of_step
        self._queues = PipelineQueues(options.number)
        self._caller = threading.get_ident()
        self._given: int | None = None  # number of the batch that the caller has
        self._closed = False
        self._before_first, self._reads_behind = options.number, options.background
        self._taken = 0  # number of batches that the caller has asked for
        self._source: Iterator[Request] | None = None if options.background else iter(source)  # None after its end
        self._workers = PassWorkers(context, self._queues, source if options.background else None, options)

    @property
    def number(self) -> int:
        """The number of the last batch that was read."""
        return self._workers.number

    def take(self) -> StepBatch | None:
        """See `Pass`."""
        queues = self._queues
        if self._given is not None:  # the caller asks for the next batch, and no longer holds this one
            queues.in_flight.release(self._given)
            self._given = None
        self._taken += 1
        if queues.alone:  # the step runs alone: first finish earlier updates, as at depth 0
            with self._timeline.stall("step"):
                queues.wait(lambda: queues.update_error or queues.in_flight.updated >= queues.finished)
        self._read_ahead()
        with self._timeline.stall("step"):
            item = queues.take_fetched() or End(None)
        if isinstance(item, SentBatch):
            in_flight = queues.in_flight.by_number[item.planned.number]
            self._await_rows(in_flight)
        self._raise_update_error()
        if isinstance(item, End):
            held = [item.error]
            del item
            self._join_updater()
            self._raise_update_error()
            raise_held(held)
            return None
        batch = begin_step(self._context, item, in_flight, self._update)
        if self._context.on_host and self._context.staging.copies:
            queues.in_flight.gather(batch.number, self._context.staging.mark())
        self._given = batch.number
        if self._update:
            turns = self._context.turns
            turns.begin_step()
            queues.alone = turns.alone
        return batch

    def _read_ahead(self) -> None:
        """Read in the caller's thread: at first only what the first step needs, then as far ahead as allowed.

        The first step needs its own batch and the batches of the caches' windows.
        """
        most = self._taken + self._window + min(self._ahead, self._taken - 1)
        while self._source is not None and self.number - self._before_first < most:
            if not self._workers.read_here(self._source):
                self._source = None

    def _await_rows(self, batch: InFlight) -> None:
        """Wait until all rows of a batch are sent, and look up its conflicting rows meanwhile."""
        queues = self._queues
        while True:
            with self._timeline.stall("step"):
                queues.wait(lambda: self._may_step(batch) or queues.in_flight.find_ready() is batch)
            if self._may_step(batch):
                return
            with urgent():  # the device is idle meanwhile
                self._workers.deliver(batch)

    def _may_step(self, batch: InFlight) -> bool:
        return not batch.missing or self._queues.update_error is not None

    def finish(self, batch: StepBatch, gradients: Gradients | None) -> None:
        """See `Pass`."""
        held = [end_step(self._context, batch, gradients)]
        if self._update:
            self._queues.finished = batch.number
            self._queues.put(self._queues.stepped, held)
            return
        self._workers.path.leave(held[0])
        self._queues.in_flight.release(batch.number)

    def drain(self) -> None:
        """See `Pass`."""
        queues = self._queues
        with self._timeline.stall("step"):
            queues.wait(lambda: queues.update_error or queues.in_flight.updated >= queues.finished)
        self._raise_update_error()

    def reload(self, table: Any, ids: AnyIds | None) -> None:
        """See `Pass`."""
        queues = self._queues
        if threading.get_ident() != self._caller:
            return
        with queues.looking_up_again():  # lookups after this see the written rows
            with queues.changed:
                batches = list(queues.in_flight.by_number.values())
            for batch in batches:
                if batch.rows is not None:
                    reload(self._context, batch.rows, table, ids, in_step=batch.number == self._given)

    def is_own(self, thread: threading.Thread) -> bool:
        """See `Pass`."""
        return thread in self._workers.threads

    def _raise_update_error(self) -> None:
        """Raise the updater's error, if any, and drop it, since it keeps frames alive. The pass must then be closed."""
        held, self._queues.update_error = [self._queues.update_error], None
        raise_held(held)

    def _join_updater(self) -> None:
        self._queues.put(self._queues.stepped, [End(None)])
        with self._timeline.stall("step"):
            self._workers.threads[-1].join()

    def close(self, *, failed: bool = False) -> None:
        """See `Pass`."""
        if self._closed:
            return
        self._closed = True
        queues, threads = self._queues, self._workers.threads
        queues.put(queues.stepped, [End(None)])  # the updater ends after the stepped batches
        together = bool(self._context.exchanges)
        if together and not failed and queues.update_error is None:  # each rank finishes what others have begun
            failed = not self._joined(threads[-1:])
            if self._given is not None:
                queues.in_flight.release(self._given)
            queues.close()
            if not self._reads_behind:
                queues.end_reading()
            failed = failed or not self._joined(threads[:-1])
        queues.stop()
        self._source = None

        def join() -> None:
            for thread in threads[self._reads_behind :]:
                thread.join()

        try:
            if together and failed:  # a thread may wait for a rank that has failed
                for thread in threads[self._reads_behind :]:
                    thread.join(LONGEST_JOIN)
            else:
                uninterruptible(join)  # the caller of `close` will write the same memory as these threads
            if self._reads_behind:
                threads[0].join(LONGEST_JOIN)
        finally:  # also after an interrupt, which is raised once all threads have ended
            queues.clear()
            self._workers.path.pins.close()
            if self._update and self._context.forwarding is not None:
                self._context.forwarding.clear()
        if not failed:
            self._raise_update_error()
        queues.update_error = None

    def _joined(self, threads: list[threading.Thread]) -> bool:
        """Wait for threads that exchange rows, while other ranks still run; return whether the threads have ended."""

        def wait() -> None:
            for thread in threads:
                while thread.is_alive() and not self._are_ranks_gone():
                    thread.join(_POLL_SECONDS)

        uninterruptible(wait)
        return not any(thread.is_alive() for thread in threads)
