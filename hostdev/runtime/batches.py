"""Batches in order, each with its rows: what loops to train and to predict have in common, and the latter."""

import atexit
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hostdev.device.rows import FeatureUses, GroupUses
from hostdev.distributed.process_group import PeerLostError
from hostdev.distributed.world import ALONE_WORLD
from hostdev.pipeline.results import Flight, Request
from hostdev.runtime.body import Body
from hostdev.runtime.finite import Flags
from hostdev.runtime.random_streams import Place
from hostdev.runtime.reading import Reading
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

    name = "train"  # the method of the runtime that returns it

    def __init__(
        self, runtime: Any, batches: Iterable[Any], reader: Reader, *, by_step: bool = False,
        background: bool = False, read_ahead: int | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        self._by_step, self.name = by_step, name or self.name
        self._number = 0  # of the last batch, or step, that was asked for
        self._background = background
        self._steps_ahead = None if read_ahead is None else read_ahead // reader.together
        self._reading: Reading | None = None  # None before the first batch and after the last
        self._runtime, self._reader, self._batches = runtime, reader, batches
        self._asks = (runtime.ranks or ALONE_WORLD).leads  # else other ranks have the rows of its samples
        self._stack = ExitStack()  # whose callbacks do not refer to the loop: it is to end when nobody holds it
        self._pass: Any = None  # None before the first batch and after the last
        self._ended = False
        self._length: int | None = None
        self._given = 0  # batches, or steps, so far
        self._what = "step" if self.name == "train" else "batch"
        self._flight: Flight | None = None
        self._micros: list[Micro] = []  # of the flight, to come
        self._hint = ""  # for a feature that was left out
        self._shares_rows = False  # the flight has rows that not each of its batches uses
        self._sent: list[Tensor] = []
        self._inverses: list[Tensor] = []
        self._leaves: list[list[Leaf]] = []
        self._rows: list[Rows] = []  # given out, of the flight
        self._reduction: Reduction | None = None  # of the flight's micro-batches
        self._losses_seen: list[Tensor] = []  # of the flight: 0 for a loss that is finite, else NaN, float32 []
        self._raised: bool | None = None  # whether the last body was left by an exception; None: it was not left
        self._abandoned = False  # the last `for` statement was left by an exception, and nobody has come back
        self._handled: int | None = None  # the exception that was being handled when the last batch was given out

    def __iter__(self) -> Body:
        """Return an iterator for one `for` statement. ValueError where the loop is over, as in a second epoch."""
        if self._ended or self._is_spent():
            raise ValueError(
                "this loop is over; call runtime.train(...) or predict(...) again for each epoch, or give a trainer "
                "runtime.train_loader(...), which begins a loop for each"
            )
        return Body(self)

    def left_body(self, *, raised: bool, abandoned: bool) -> None:
        """Note how a `for` statement over the loop was left; for `Body`.

        raised     its body has raised, and so has not come to its end
        abandoned  an exception has left the statement, from its body or from the loop
        """
        self._raised, self._abandoned = raised, abandoned

    @property
    def is_abandoned(self) -> bool:
        """Tell whether the loop was left by an exception, and nobody has come back since."""
        return self._abandoned and not self._ended

    @property
    def is_finished(self) -> bool:
        """Tell whether the last batch has been given out, and nothing waits for its end."""
        return False

    def _has_raised(self) -> bool:
        """Tell whether the body of the current batch was left by an exception, as far as can be known."""
        if self._raised is not None:
            return self._raised
        handled = sys.exception()
        return handled is not None and id(handled) != self._handled

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
        if self._raised is None:
            self._raised = error is not None
        self.close()

    def __len__(self) -> int:
        """Return the number of batches; TypeError where the loader has no length."""
        if self._length is None:
            self._length = self._reader.length(self._batches) // (self._reader.together if self._by_step else 1)
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
        ranks = self._runtime.ranks
        if ranks is not None and self._pass is not None:
            if ranks.have_parted:  # nobody takes part in what is on its way
                self._fail(PeerLostError("the ranks have parted"))
                return
            ranks.calls.leave(f"{self._text()}, left after {self._what} {self._number}")
        with torch.inference_mode(False):  # as in `__next__`
            try:
                self._end_flight(closing=True)
            finally:
                reading, self._reading = self._reading, None
                self._let_go()
                self._stack.close()
                if reading is not None:
                    reading.leave()

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
        self._pass, self._batches = None, ()
        if self._reading is not None:
            self._reading.end()
            self._reading = None
        _open_loops.discard(self)

    def _open(self) -> Any:
        raise NotImplementedError

    def _requests(self) -> Iterator[Request]:
        """Return what the loop wants of each batch; begins the loader."""
        with suppress(Exception):  # of anybody's loader; whoever asks for its length later hears of it
            self._length = len(self)
        runtime, together = self._runtime, self._reader.together
        keep = partial(runtime.read_ahead_of, train=self._is_training)
        self._reading = reading = Reading(self._batches, self._reader.program, keep)
        if not self._background:
            ahead = together > 1 or (runtime.reads_ahead and self._steps_ahead != 0)
            reading.watch(runtime.random_streams(self._first_place(reading), together), ahead=ahead)
        return self._reader.requests(reading)

    @property
    def _how(self) -> dict[str, Any]:
        """How the pipeline reads the requests."""
        return {"background": self._background, "read_ahead": self._steps_ahead}

    def _first_place(self, reading: Reading) -> Place | None:
        """Return where the batches go on, for their random streams; None where they begin."""
        return None if reading.kept is None else reading.kept.place

    @property
    def place(self) -> Place | None:
        """Where in its batches the loop is, for their random streams."""
        return None if self._reading is None else self._reading.place

    _is_training = False

    def _trains(self, table: Any) -> bool:
        raise NotImplementedError

    def _end_flight(self, *, closing: bool = False) -> None:
        raise NotImplementedError

    def _flags(self) -> Flags | None:
        """For `Rows.guard`."""
        return None

    def __next__(self) -> Any:
        """Finish the batch before, and return the next one with its rows, or the next step's."""
        if self._ended:
            raise StopIteration
        try:
            with torch.inference_mode(False):  # or tensors that a step changes would not allow it
                if self._by_step or not self._micros:
                    self._begin_next()
                    self._end_flight()
                self._raised, self._abandoned, self._handled = None, False, _identity(sys.exception())
                if self._by_step or not self._micros:
                    if self._pass is None:
                        self._pass = self._open()
                        _open_loops.add(self)
                        (self._runtime.ranks or ALONE_WORLD).note_loop(self)
                    flight = self._take_next()
                    if flight is None:
                        if self._reading is not None and self._reading.kept is not None:
                            self._runtime.read_out(self._reading.kept)
                        self._let_go()
                        self._stack.close()
                        raise StopIteration
                    self._take(flight)
                    if self._by_step:
                        self._given += 1
                        return Step(
                            flight.number, [micro.samples for micro in self._micros], self._next_batch, self._reduction
                        )
                self._given += 1
                return self._next_batch()
        except StopIteration:
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _text(self) -> str:
        return f"runtime.{self.name}()"

    def _begin_next(self) -> None:
        """Count another batch, or step, which all ranks are to ask for."""
        self._number += 1
        if (ranks := self._runtime.ranks) is None:
            return
        if self._pass is None:
            ranks.agree(self.name, self._text(), self._alike())
        else:
            ranks.calls.begin(self.name, f"{self._what} {self._number} of {self._text()}")

    def _alike(self) -> dict[str, Any]:
        """Return what all ranks are to have alike in this loop."""
        return {"micro_batches": self._reader.together, "by_step": self._by_step}

    def _take_next(self) -> Flight | None:
        """Return the next step's batches; None after the last."""
        found: Flight | None = self._pass.take()
        return found

    def _fail(self, error: BaseException) -> None:
        """End the loop with an error."""
        reading, self._reading = self._reading, None
        self._let_go()
        if reading is not None:
            with suppress(ValueError):  # the error is told already
                reading.leave()
        self._stack.__exit__(type(error), error, error.__traceback__)

    def _take(self, flight: Flight) -> None:
        self._flight = flight
        self._micros = list(flight.request.note)
        self._shares_rows = len(self._micros) > 1
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
            part.values.clear()

    def _next_batch(self) -> tuple[Any, Rows]:
        micro, flight, runtime = self._micros.pop(0), self._flight, self._runtime
        assert flight is not None
        assert self._reading is not None
        self._reading.give()
        order = list(dict.fromkeys(at for wanted in runtime.wanted for at in wanted.tables))
        uses, values = self._looked_up(flight, micro) if self._asks else ([], {})
        batch = micro.batch([self._sent.pop(0) for _ in micro.tensors])
        rows = Rows(
            flight, uses, self._leaves, values, order, runtime.staging, self._flags(), due=not self._micros,
            shares_rows=self._shares_rows, reduction=self._reduction, losses=self._losses_seen, hint=self._hint,
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
    """Batches with their rows, from which nothing is learned; what `Runtime.predict` returns.

    features  that are looked up; None: all of them
    """

    name = "predict"

    def __init__(self, *args: Any, features: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._features = features
        self._hint = "" if features is None else " in this loop over predict(..., features=...)"
        self._counted = ExitStack()  # it is one of the runtime's open ones
        self._next: list[Flight | BaseException | None] = []  # what comes after the last batch, where that is known

    def _open(self) -> Any:
        self._runtime.begin_prediction(self)
        requests = self._requests()
        self._stack.enter_context(self._counted)
        self._counted.callback(self._runtime.end_prediction)
        return self._stack.enter_context(self._runtime.pipeline.predict(requests, **self._how))

    @property
    def is_finished(self) -> bool:
        """Tell whether the last batch has been given out, and nothing waits for its end."""
        return self._next == [None] and not self._ended

    def left_body(self, *, raised: bool, abandoned: bool) -> None:
        """Note how a `for` statement was left, as for any loop; after the last batch the loop is over."""
        super().left_body(raised=raised, abandoned=abandoned)
        if self.is_finished:
            self.close()

    def _take_next(self) -> Flight | None:
        if not self._next:
            return super()._take_next()
        found = self._next.pop()
        if isinstance(found, BaseException):
            raise found
        return found

    def _take(self, flight: Flight) -> None:
        super()._take(flight)
        if self._given + (1 if self._by_step else len(self._micros)) == self._length:
            self._look_for_end()

    def _look_for_end(self) -> None:
        """Find out, with the last batch of a loader that has a length, whether the loop is at its end."""
        try:
            self._next.append(super()._take_next())
        except BaseException as error:
            self._next.append(error)
            return
        if self._next == [None]:
            self._counted.close()

    def _looked_up(self, flight: Flight, micro: Micro) -> tuple[list[GroupUses], dict[str, Any]]:
        uses, values = super()._looked_up(flight, micro)
        return uses, values if self._features is None else {name: values[name] for name in self._features}

    def _trains(self, table: Any) -> bool:
        return False

    def _end_flight(self, *, closing: bool = False) -> None:
        if self._flight is not None and self._pass is not None:
            flight, self._flight = self._flight, None
            self._pass.finish(flight, None)
            self._forget()


def _identity(error: BaseException | None) -> int | None:
    return None if error is None else id(error)  # not itself: it would hold its frames, and so the loop
