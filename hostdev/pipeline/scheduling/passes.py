"""Passes over batches: the interface, the serial pass, and the look-ahead that all passes share."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from hostdev.kernels.arrays import AnyIds
from hostdev.pipeline import remote
from hostdev.pipeline.batch_ids import ReadBatch, Request, UniqueBatch
from hostdev.pipeline.context import Context
from hostdev.pipeline.results import Gradients, StepBatch
from hostdev.pipeline.scheduling.in_flight import InFlight
from hostdev.pipeline.scheduling.queues import End, Stopped
from hostdev.pipeline.stages.deduplicate import announce, deduplicate
from hostdev.pipeline.stages.look_up import look_up, reload, take_memory
from hostdev.pipeline.stages.plan import plan
from hostdev.pipeline.stages.read import read
from hostdev.pipeline.stages.send import send
from hostdev.pipeline.stages.step import begin_step, end_step
from hostdev.pipeline.stages.update import await_step, receive_sums, release, unpin, update
from hostdev.pipeline.tiers import PassPins


class PassOptions(NamedTuple):
    """Options of a pass: where it begins, and how far it runs ahead."""

    depth: int  # the pipeline's depth
    window: int  # number of batches that the caches know in advance, in addition to those that are looked up ahead
    number: int  # number of the batch before the first
    position: int  # position of that batch in the caller's loop
    update: bool  # whether steps update the tables
    background: bool  # whether a background thread reads the batches, instead of the caller's thread
    ahead_of_step: int  # number of batches looked up ahead, at most `depth`, if the caller's thread reads them


class Pass(Protocol):
    """A pass, which gives the caller batches in order for its steps. A single thread must call `take` and `finish`."""

    def take(self) -> StepBatch | None:
        """Return the next batch with its rows on the device, or None after the last, when all updates are finished."""

    def finish(self, batch: StepBatch, gradients: Gradients | None) -> None:
        """End a step; gradients are None in a pass that updates nothing."""

    def drain(self) -> None:
        """Wait until the updates of all stepped batches are finished."""

    def reload(self, table: Any, ids: AnyIds | None) -> None:
        """After `drain` and a write to a table, look up again its rows that were looked up ahead.

        This has an effect only in the thread that takes the batches.

        Args:
            table: The table that was written.
            ids: int32 or int64 [N]; None for all rows.
        """

    def is_own(self, thread: threading.Thread) -> bool:
        """Return whether a thread belongs to the pass."""

    def close(self, *, failed: bool = False) -> None:
        """End the pass: update stepped batches, and drop the others. Raise the updater's error unless `failed`.

        Args:
            failed: Whether another error has ended the pass.
        """


def raise_held(held: list[BaseException | None]) -> None:
    """Remove the error, if any, from a list and raise it; in the list, it would form a reference cycle."""
    if held[0] is not None:
        raise held.pop()  # type: ignore[misc]


def look_ahead(
    context: Context, take: Callable[[], ReadBatch | End], options: PassOptions, pins: PassPins
) -> Iterator[UniqueBatch | End]:
    """Yield deduplicated batches in order, and then an `End`. Batches are announced to the caches a window ahead.

    Args:
        context: The pipeline's context.
        take: Called without arguments; returns the next batch that was read, or an `End`.
        options: The pass's options.
        pins: The rows of tables on disk that the pass's batches need.
    """
    update, position = options.update, options.position
    window = options.window if update else 0
    waiting: list[UniqueBatch] = []
    announced = [0] * len(context.groups)
    ends: list[End] = []
    while True:
        while not ends and len(waiting) <= window:
            try:
                item = take()
                if isinstance(item, ReadBatch):
                    position += 1
                    is_first = item.number == options.number + 1
                    waiting.append(deduplicate(context, item, position, update, is_first=is_first))
                    if update:
                        announce(context, waiting, announced)
                else:
                    if item.error is None and context.exchanges:
                        context.exchanges[update].end()
                    ends.append(item)
                del item  # otherwise a finished batch would live until the next one is read
            except Stopped:
                raise
            except Exception as error:  # batches that were read earlier come first
                ends.append(End(error))
        if waiting:
            if update:
                announce(context, waiting, announced)
            announced = [max(0, count - 1) for count in announced]
            pins.announce(waiting)
            yield waiting.pop(0)
        else:
            yield ends.pop()  # not kept: an error holds the frames that it passed through, including this one
            return


class SerialPass:
    """Runs the stages one after the other in the caller's thread. The overlapped pass must give the same results.

    Args:
        context: The pipeline's context.
        source: The requests.
        options: The pass's options.
    """

    def __init__(self, context: Context, source: Iterable[Request], options: PassOptions) -> None:
        self._context, self._update, self.number = context, options.update, options.number
        self._source = iter(source)
        self._caller = threading.get_ident()
        self._given: StepBatch | None = None  # the batch in the caller's step
        self._pins = PassPins(context.tiers, options.update)
        self._batches = look_ahead(context, self._read, options, self._pins)

    def _read(self) -> ReadBatch | End:
        batch = read(self._context, self._source, self.number + 1)
        if batch is None:
            return End(None)
        self.number += 1
        return batch

    def take(self) -> StepBatch | None:
        """See `Pass`."""
        item = next(self._batches)
        if isinstance(item, End):
            held = [item.error]
            del item
            raise_held(held)
            return None
        context, update = self._context, self._update
        planned = plan(context, item, update, None)
        in_flight = InFlight(item.number)
        if self._pins:
            self._pins.try_pin(item.number, planned.groups)
            in_flight.pins = self._pins.take(item.number)
            in_flight.pins.await_rows()
        looked_up = look_up(context, planned, take_memory(context, planned))
        if context.exchanges and context.on_host:
            early = remote.exchange_early(context, looked_up, None, None, update=update, overlapped=False)
            looked_up = looked_up._replace(early=early)
        in_flight.rows = looked_up.rows
        self._given = begin_step(context, send(context, looked_up), in_flight, update)
        return self._given

    def finish(self, batch: StepBatch, gradients: Gradients | None) -> None:
        """See `Pass`."""
        self._given = None
        context = self._context
        stepped = end_step(context, batch, gradients)
        if not self._update:
            await_step(context, stepped)
            release(stepped)
            unpin(stepped)
            return
        context.before_stage("update", batch.number)
        await_step(context, stepped)
        receive_sums(context, stepped)
        update(context, stepped, None)

    def drain(self) -> None:
        """See `Pass`."""

    def reload(self, table: Any, ids: AnyIds | None) -> None:
        """See `Pass`."""
        if self._given is not None and threading.get_ident() == self._caller:
            assert self._given.in_flight.rows is not None
            reload(self._context, self._given.in_flight.rows, table, ids, in_step=True)

    def is_own(self, thread: threading.Thread) -> bool:
        """See `Pass`."""
        return False

    def close(self, *, failed: bool = False) -> None:
        """See `Pass`."""
        self._given = None
        self._batches.close()  # type: ignore[attr-defined]
        self._pins.close()
