"""Passes over batches: their interface, and the serial pass."""

import threading
from collections.abc import Iterable
from typing import Any, Protocol

from hostdev.kernels.arrays import AnyIds
from hostdev.pipeline.batch_ids import ReadBatch, Request
from hostdev.pipeline.context import Context
from hostdev.pipeline.path import End, PassOptions, Path, Waits, raise_held
from hostdev.pipeline.results import Gradients, StepBatch
from hostdev.pipeline.scheduling.in_flight import InFlight
from hostdev.pipeline.stages.look_up import reload
from hostdev.pipeline.stages.plan import read
from hostdev.pipeline.stages.step import begin_step, end_step
from hostdev.pipeline.stages.update import await_step


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
        """End the pass: update stepped batches, and drop all other batches. Raise the updater's error unless `failed`.

        Args:
            failed: Whether another error has ended the pass.
        """


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
        self._path = Path(context, options, Waits())
        self._batches = self._path.look_ahead(self._read)

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
        in_flight = InFlight(item.number)
        self._given = begin_step(self._context, self._path.fetch(item, in_flight), in_flight, self._update)
        return self._given

    def finish(self, batch: StepBatch, gradients: Gradients | None) -> None:
        """See `Pass`."""
        self._given = None
        stepped = end_step(self._context, batch, gradients)
        if not self._update:
            self._path.leave(stepped)
            return
        await_step(self._context, stepped)
        self._path.update(stepped)

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
        self._path.pins.close()
