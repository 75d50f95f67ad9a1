"""Batches in order, each with its rows: what loops to train and to predict have in common, and the latter."""

import atexit
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hostdev.device.rows import FeatureUses, GroupUses
from hostdev.frameworks import accelerate
from hostdev.pipeline.flight import Flight
from hostdev.runtime.read_ahead import ReadAhead
from hostdev.runtime.reduction import Reduction
from hostdev.runtime.requests import Micro, Reader
from hostdev.runtime.rows import Leaf, Order, Rows, values_of
from hostdev.runtime.step import Step

_open_loops: WeakSet[Any] = WeakSet()


@atexit.register
def _close_all() -> None:
    """End the loops that are open when Python ends: later their threads stand still, and nobody could wait for them."""
    with ExitStack() as stack:
        for loop in list(_open_loops):
            stack.callback(loop.close)


class Loop:
    """Batches in order, each with its rows."""

    def __init__(self, runtime: Any, batches: Iterable[Any], reader: Reader, *, by_step: bool = False) -> None:
        self._by_step = by_step
        self._runtime, self._reader, self._batches = runtime, reader, batches
        self._asks = runtime.ranks is None or runtime.ranks.leads  # else other ranks have the rows of its samples
        self._stack = ExitStack()  # whose callbacks do not refer to the loop: it is to end when nobody holds it
        self._pass: Any = None  # None before the first batch and after the last
        self._ended = False
        self._ahead: ReadAhead | None = None  # where the batches are an iterator
        self._states: accelerate.States | None = None  # where accelerate is used, its state with each batch
        self._length: int | None = None
        self._given = 0  # batches, so far
        self._flight: Flight | None = None
        self._micros: list[Micro] = []  # of the flight, to come
        self._sent: list[Tensor] = []
        self._inverses: list[Tensor] = []
        self._leaves: list[list[Leaf]] = []
        self._rows: list[Rows] = []  # given out, of the flight
        self._reduction: Reduction | None = None  # of the flight's micro-batches

    def __iter__(self) -> Any:
        """Return itself: a loop is gone through once. ValueError where it is over, as in a second epoch."""
        if self._ended or self._is_spent():
            raise ValueError(
                "this loop is over; call runtime.train(...) or predict(...) again for each epoch, or give a trainer "
                "runtime.train_loader(...), which begins a loop for each"
            )
        return self

    def _is_spent(self) -> bool:
        """Tell whether the last batch was given out, as far as the loader's length says."""
        try:
            return 0 < self._given == len(self)
        except TypeError:  # it has none
            return False

    def __enter__(self) -> Any:
        """Close it at the end of a `with`."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of batches; TypeError where the loader has no length."""
        if self._length is None:
            self._length = self._reader.length(self._batches)
        return self._length

    def __del__(self) -> None:
        if self._ended:
            return
        if self._pass is not None and self._pass.is_own(threading.current_thread()):  # which cannot wait for itself
            threading.Thread(target=self._close_unwatched).start()
        else:
            self._close_unwatched()

    def _close_unwatched(self) -> None:
        """Close it where nobody can catch an error, which Python only prints; the runtime's next call raises it."""
        try:
            self.close()
        except BaseException as error:
            self._runtime.failed_late(error)
            raise

    def close(self) -> None:
        """End the loop early: what has been stepped is updated. Raises what a late update has raised."""
        self._ended = True
        with torch.inference_mode(False):  # as in `__next__`
            try:
                self._end_flight(closing=True)
            finally:
                self._let_go()
                self._stack.close()

    def finish(self) -> None:
        """End the loop with the batch that was given out last, as if it were the last one of the loader."""
        try:
            with torch.inference_mode(False):  # as in `__next__`
                self._end_flight()
        except BaseException as error:
            self._fail(error)
            raise
        self.close()

    def _let_go(self) -> None:
        """Let go of all batches: the loop is over."""
        self._ended = True
        self._forget()
        self._pass, self._batches, self._ahead = None, (), None
        if self._states is not None:
            self._states.hide()
        _open_loops.discard(self)

    def _open(self) -> Any:
        raise NotImplementedError

    def _source(self) -> Iterator[Any]:
        """Return an iterator over the batches; what it has read, and the loop not come to, is there for the next."""
        source = iter(self._batches)
        if source is not self._batches:
            return self._noting(source, accelerate.States() if accelerate.is_imported() else None)
        self._ahead = self._runtime.read_ahead_of(source)
        if self._ahead.states is None and accelerate.is_imported():
            self._ahead.states = accelerate.States()
        return self._noting(self._ahead.batches(), self._ahead.states)

    def _noting(self, source: Iterator[Any], states: accelerate.States | None) -> Iterator[Any]:
        self._states = states
        return source if states is None else states.reading(source)

    def _trains(self, table: Any) -> bool:
        raise NotImplementedError

    def _end_flight(self, *, closing: bool = False) -> None:
        raise NotImplementedError

    def _flags(self) -> tuple[Tensor, Tensor] | None:
        """For `Rows.guard`: what is not 0 from the first step on that is not finite, and 1; both on the device."""
        return None

    def __next__(self) -> Any:
        """Finish the batch before, and return the next one with its rows, or the next step's."""
        if self._ended:
            raise StopIteration
        try:
            with torch.inference_mode(False):  # or tensors that a step changes would not allow it
                if self._by_step or not self._micros:
                    self._end_flight()
                    if self._pass is None:
                        self._pass = self._open()
                        _open_loops.add(self)
                    flight = self._pass.take()
                    if flight is None:
                        if self._ahead is not None:
                            self._runtime.read_out(self._ahead)
                        self._let_go()
                        self._stack.close()
                        raise StopIteration
                    self._take(flight)
                    if self._by_step:
                        return Step(
                            flight.number, [micro.samples for micro in self._micros], self._next_batch, self._reduction
                        )
                return self._next_batch()
        except StopIteration:
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """End the loop with an error."""
        self._let_go()
        self._stack.__exit__(type(error), error, error.__traceback__)

    def _take(self, flight: Flight) -> None:
        self._flight = flight
        self._micros = list(flight.request.note)
        flight.request.note.clear()  # the loader's batches live no longer than the caller's
        self._sent = list(flight.tensors)
        self._inverses = [part.inverse for part in flight.groups]
        staging = self._runtime.staging
        self._leaves = []
        for group, part in zip(self._runtime.pipeline.groups, flight.groups, strict=True):
            order = None if part.own_places is None else Order(part.own_places, staging, flight.memory)
            self._leaves.append([
                Leaf(embedding.table, values, order, trained=self._trains(embedding.table))
                for embedding, values in zip(group.embeddings, part.values, strict=True)
            ])  # fmt: skip
            part.values = []

    def _next_batch(self) -> tuple[Any, Rows]:
        micro, flight, runtime = self._micros.pop(0), self._flight, self._runtime
        assert flight is not None
        self._given += 1
        if self._ahead is not None:
            self._ahead.given()
        if self._states is not None:
            self._states.show()
        order = list(dict.fromkeys(at for wanted in runtime.wanted for at in wanted.tables))
        uses, values = self._looked_up(flight, micro) if self._asks else ([], {})
        batch = micro.batch([self._sent.pop(0) for _ in micro.tensors])
        rows = Rows(
            flight, uses, self._leaves, values, order, runtime.staging, self._flags(), due=not self._micros,
            reduction=self._reduction,
        )  # fmt: skip
        self._rows.append(rows)
        return batch, rows

    def _looked_up(self, flight: Flight, micro: Micro) -> tuple[list[GroupUses], dict[str, Any]]:
        """Return where a micro-batch uses the rows, and these by feature."""
        runtime, located = self._runtime, []
        for ids, wanted in zip(micro.ids, runtime.wanted, strict=True):
            offsets = self._sent.pop(0) if ids.offsets is not None else None
            weights = self._sent.pop(0) if ids.weights is not None else None
            located.append((offsets, weights, wanted.feature.pooling == "mean"))
        uses = [self._uses(flight, group, micro, located) for group in range(len(runtime.group_specs))]
        with torch.set_grad_enabled(any(leaf.trained for group in self._leaves for leaf in group)):
            features = [spec.features for spec in runtime.group_specs]
            values = values_of(runtime.wanted, features, self._leaves, uses, [ids.shape for ids in micro.ids])
        return uses, values

    def _uses(self, flight: Flight, group: int, micro: Micro, located: list[Any]) -> GroupUses:
        part, features, left = flight.groups[group], [], self._inverses[group]
        numbers = self._runtime.group_specs[group].features
        for number in numbers:
            size = len(micro.ids[number].values)
            features.append(FeatureUses(left[:size], *located[number]))
            left = left[size:]
        self._inverses[group] = left
        alone = len(flight.request.ids[group]) == len(numbers)
        return GroupUses(features, part.own_size, in_order=alone and part.own_places is None)

    def _forget(self) -> None:
        """Let go of the flight."""
        for rows in self._rows:
            rows.end()
        if self._flight is not None and self._pass is not None:
            self._runtime.pipeline.abandon(self._flight)
        self._flight = None
        self._micros, self._sent, self._inverses, self._leaves, self._rows = [], [], [], [], []
        self._reduction = None


class PredictLoop(Loop):
    """Batches with their rows, from which nothing is learned; what `Runtime.predict` returns."""

    def _open(self) -> Any:
        self._runtime.begin_prediction()
        source = self._source()
        self._stack.callback(self._runtime.end_prediction)
        return self._stack.enter_context(self._runtime.pipeline.predict(self._reader.requests(source)))

    def _trains(self, table: Any) -> bool:
        return False

    def _end_flight(self, *, closing: bool = False) -> None:
        if self._flight is not None and self._pass is not None:
            flight, self._flight = self._flight, None
            self._pass.finish(flight, None)
            self._forget()
