"""The base class of loops over batches with their rows, and the loop of `Runtime.predict`."""

import atexit
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch

from hostdev.distributed.channel import PeerLostError
from hostdev.pipeline.batch_ids import Request
from hostdev.pipeline.pipeline import Pipeline
from hostdev.pipeline.results import StepBatch
from hostdev.runtime.body_batch import BodyBatch, Step
from hostdev.runtime.features import Table
from hostdev.runtime.generators import find_unknown
from hostdev.runtime.random_streams import Place, make_streams
from hostdev.runtime.reading import Reading
from hostdev.runtime.reduction import Flags
from hostdev.runtime.requests import Reader

Item = TypeVar("Item")  # (batch, rows), or a `Step`
AnyItem = TypeVar("AnyItem")
_open_loops: WeakSet[Any] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the open loops before Python exits, while the loops' threads still exist and can finish the updates."""
    with ExitStack() as stack:
        for loop in list(_open_loops):
            stack.callback(loop.close)


def reads_ahead(pipeline: Pipeline) -> bool:
    """Return whether a pipeline reads batches before the body needs them."""
    return bool(pipeline.depth or any(group.window for group in pipeline.groups))


class Loop(Generic[Item]):
    """The base class of loops, which yield the loader's batches in order, each with its rows.

    Args:
        runtime: A `Runtime`, untyped because its module imports this one.
        batches: The loader.
        reader: Turns the loader's batches into requests.
        by_step: Whether to yield all batches of a step together, as a `Step`.
        background: Whether to read the batches in another thread.
        read_ahead: Maximum number of batches to read ahead of the body; True for as many as depth and caches need; None
            means True if the loader and the program's functions are known to have no random generators, else 0.
        name: The name of the runtime's method, for messages.
        features: The features that are looked up; None for all.
        flags: The flags that stop a step whose gradients or loss are not finite; None in a loop that takes no steps.
    """

    name = "train"
    _is_training = False

    def __init__(
        self,
        runtime: Any,
        batches: Iterable[Any],
        reader: Reader,
        *,
        by_step: bool = False,
        background: bool = False,
        read_ahead: int | bool | None = None,
        name: str | None = None,
        features: Sequence[str] | None = None,
        flags: Flags | None = None,
    ) -> None:
        self._ended = True  # until this method ends: if it raises, `__del__` has nothing to close
        self._by_step, self.name = by_step, name or self.name
        self._number = 0  # the number of the last batch, or step, that was requested
        self._reading: Reading | None = None  # None before the first batch and after the last
        self._runtime, self._reader, self._batches = runtime, reader, batches
        self._may_read: bool | None = None if read_ahead == 0 else True  # None: not determined
        if read_ahead is None and not background and not self._may_read_ahead():
            self._may_read, read_ahead = False, 0
        number = None if read_ahead is None or read_ahead is True else read_ahead // reader.together  # in requests
        self._how: dict[str, Any] = {"background": background, "read_ahead": number}
        # If several ranks have the same samples, only one of them looks up the rows.
        self._batch = BodyBatch(runtime, asks=runtime.world.leads, flags=flags, features=features)
        self._stack = ExitStack()  # its callbacks must not keep the loop alive: deleting a loop closes it
        self._pass: Any = None  # None before the first batch and after the last
        self._length: int | None = None
        self._given = 0  # number of batches, or steps, that were yielded
        self._what = "step" if self.name == "train" else "batch"
        self.is_left = False  # whether a `for` statement over the loop has ended, and the loop has not continued since
        self._is_replaced = False
        self._ended = False

    def __iter__(self) -> "LoopStatement[Item]":
        """Return an iterator for one `for` statement; raise ValueError if the loop is over, as in a second epoch."""
        spent = False
        with suppress(TypeError):  # raised if the loader has no length
            spent = 0 < self._given == len(self)
        if self._ended or spent:
            raise ValueError(
                "this loop is over; call runtime.train(...) or predict(...) again for each epoch, or pass "
                "runtime.train_loader(...), which opens a new loop for each epoch, to a framework's trainer"
            )
        return LoopStatement(self)

    @property
    def given(self) -> int:
        """Number of batches, or steps, that were yielded."""
        return self._given

    def replace(self) -> None:
        """End a loop that was left, because another one begins; `next` then raises ValueError."""
        if not self._ended:
            self._is_replaced = True
            self.close()

    @property
    def is_finished(self) -> bool:
        """Whether the last batch was yielded, and nothing is left to do after its body. Always False in this class."""
        return False

    def __enter__(self) -> "Loop[Item]":
        """Return the loop; it is closed at the end of the `with` statement."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of batches, or of steps with `by_step`; raise TypeError if the loader has no length."""
        if self._length is None:
            batches = len(self._batches)  # type: ignore[arg-type]  # raises TypeError if the loader has no length
            self._length = batches // (self._reader.together if self._by_step else 1)
        return self._length

    def __del__(self) -> None:
        if self._ended:
            return
        if self._pass is not None and self._pass.is_own(threading.current_thread()):  # a thread cannot wait for itself
            threading.Thread(target=self._close_unwatched).start()
        else:
            self._close_unwatched()

    def _close_unwatched(self) -> None:
        """Close a deleted loop. No caller can catch an error: Python prints it; the runtime's next call raises it."""
        try:
            self.close()
        except BaseException as error:
            self._runtime.loops.failed_late(error)
            raise

    def close(self) -> None:
        """End the loop early, after applying all finished steps to the tables; raise the error of a failed update."""
        self._ended = True
        world = self._runtime.world
        if self._pass is not None:
            if world.have_parted:  # other ranks no longer take part in exchanges
                self._fail(PeerLostError("the ranks have diverged"))
                return
            world.leave_loop(f"runtime.{self.name}(), left after {self._what} {self._number}")
        with torch.inference_mode(False):  # as in `__next__`
            try:
                self._end_batch(closing=True)
            finally:
                self._release()
                self._stack.close()

    def finish(self) -> None:
        """End the loop after the batch that was yielded last, as if it were the loader's last batch."""
        try:
            with torch.inference_mode(False):  # as in `__next__`
                self._end_batch()
        except BaseException as error:
            self._fail(error)
            raise
        self.close()

    def _release(self) -> None:
        """Release all batches at the loop's end."""
        self._ended = True
        self._forget()
        self._pass, self._batches = None, ()
        if self._reading is not None:
            self._reading.end()
            self._reading = None
        _open_loops.discard(self)

    def _requests(self) -> Iterator[Request]:
        """Start the loader, and return the requests for its batches."""
        with suppress(Exception):  # a user's loader may raise anything; later calls of len() get the error
            self._length = len(self)
        runtime, together = self._runtime, self._reader.together
        keep = partial(runtime.loops.iterators.get, train=self._is_training)
        self._reading = reading = Reading(self._batches, keep)
        if reading.kept is not None and self._may_read is not None:
            reading.kept.may_read_ahead = self._may_read
        if not self._how["background"]:
            ahead = together > 1 or (reads_ahead(runtime.pipeline) and self._how["read_ahead"] != 0)
            streams = make_streams(runtime.device, runtime.world, self._find_place(reading), together)
            reading.watch(streams, ahead=ahead)
        return self._reader.requests(reading)

    def _may_read_ahead(self) -> bool:
        """Return whether the loader and the program's functions are known to have no random generators; warn if not.

        If the pipeline does not read ahead, return True at once.
        """
        if not reads_ahead(self._runtime.pipeline):
            return True
        kept = self._runtime.loops.iterators.find(self._batches)  # the iterator's record, from an earlier loop
        if kept is not None and kept.may_read_ahead is not None:
            return bool(kept.may_read_ahead)
        unknown = find_unknown(self._batches, self._reader.program)
        if unknown is None:
            return True
        kind = type(unknown).__name__
        if kind not in self._runtime.loops.warned_of:
            self._runtime.loops.warned_of.add(kind)
            warnings.warn(
                f"the loop over runtime.{self.name}() does not read ahead, and is therefore slower: the loader, or a "
                f"function that it calls for each batch, uses a {kind}, which may be or have a random generator. If "
                f"nothing that reads a batch draws from a generator of its own, pass read_ahead=True, or set "
                "own_generators = False on the object or its class; read_ahead=0 avoids this warning",
                stacklevel=6,
            )
        return False

    def _find_place(self, reading: Reading) -> Place | None:
        """Return the position at which an earlier loop left the iterator, to continue its random streams; else None."""
        return None if reading.kept is None else reading.kept.place

    @property
    def place(self) -> Place | None:
        """The loop's position in its sequence of batches, which selects their random streams; None if unknown."""
        return None if self._reading is None else self._reading.place

    def __next__(self) -> Item:
        """Finish the previous batch, or step; return the next batch with its rows, or the next `Step`."""
        if self._ended:
            if self._is_replaced:
                raise ValueError("this loop ended when another one began after its `for` statement had been left")
            raise StopIteration
        self.is_left = False
        try:
            with torch.inference_mode(False):  # a step could not change tensors made in inference mode
                asks = self._by_step or not self._batch.micros
                if asks:
                    self._begin_next()
                    self._end_batch()
                    self._take_or_stop()
                self._given += 1
                item: Item = self._make_step() if self._by_step else self._next_batch()
                return item
        except StopIteration:
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _take_or_stop(self) -> None:
        """Take the pipeline's next batch; raise StopIteration after the last one."""
        if self._pass is None:
            self._pass = self._open()
            _open_loops.add(self)
            self._runtime.world.note_loop(self)
        step_batch = self._take_next()
        if step_batch is None:
            if self._reading is not None and self._reading.kept is not None:
                self._runtime.loops.iterators.remove(self._reading.kept)
            self._release()
            self._stack.close()
            raise StopIteration
        self._take(step_batch)

    def _make_step(self) -> Any:
        batch = self._batch
        assert batch.step_batch is not None
        sizes = [micro.samples for micro in batch.micros]
        return Step(batch.step_batch.number, sizes, self._next_batch, batch.reduction)  # type: ignore[arg-type]  # by ranks

    def _next_batch(self) -> Any:
        assert self._reading is not None
        self._reading.give()
        return self._batch.next()

    def _begin_next(self) -> None:
        """Count a request for the next batch, or step. With several ranks, all ranks must make the same request."""
        self._number += 1
        text, world = f"runtime.{self.name}()", self._runtime.world
        if self._pass is None:
            world.agree(self.name, text, self._get_settings())
        else:
            world.begin(self.name, f"{self._what} {self._number} of {text}")

    def _get_settings(self) -> dict[str, Any]:
        """Return the settings of this loop that must be equal on all ranks."""
        settings = {"micro_batches": self._reader.together, "by_step": self._by_step}
        has_window = any(group.window for group in self._runtime.pipeline.groups)
        return {**settings, "read_ahead": self._how["read_ahead"]} if has_window else settings

    def _fail(self, error: BaseException) -> None:
        """End the loop because of an error."""
        self._release()
        self._stack.__exit__(type(error), error, error.__traceback__)

    def _forget(self) -> None:
        """Release the body's batch."""
        for rows in self._batch.rows:
            rows.end()
        if self._batch.step_batch is not None and self._pass is not None:
            self._runtime.pipeline.abandon(self._batch.step_batch)
        self._batch.clear()

    def _take(self, step_batch: StepBatch) -> None:
        self._batch.take(step_batch, self._trains)

    def _take_next(self) -> StepBatch | None:
        """Return the next step's batches; None after the last step."""
        found: StepBatch | None = self._pass.take()
        return found

    def _open(self) -> Any:
        raise NotImplementedError

    def _trains(self, table: Table) -> bool:
        raise NotImplementedError

    def _end_batch(self, *, closing: bool = False) -> None:
        raise NotImplementedError


class LoopStatement(Iterator[AnyItem]):
    """The iterator of one `for` statement over a loop; it tells the loop when the statement has ended."""

    def __init__(self, loop: Loop[AnyItem]) -> None:
        self._loop, self._given = loop, -1

    def __iter__(self) -> "LoopStatement[AnyItem]":
        """Return a new iterator for each `for` statement; raise ValueError if the loop is over."""
        return iter(self._loop)

    def __next__(self) -> AnyItem:
        """Return the loop's next batch with its rows."""
        item = next(self._loop)
        self._given = self._loop.given
        return item

    def __len__(self) -> int:
        """Return the loop's number of batches; raise TypeError if the loader has no length."""
        return len(self._loop)

    def close(self) -> None:
        """Close the loop. Python also calls this when it closes a generator that is suspended in `yield from`."""
        self._loop.close()

    def __del__(self) -> None:
        if self._given == self._loop.given:  # otherwise the loop has continued elsewhere
            self._loop.is_left = True


class PredictLoop(Loop[Item]):
    """A loop over batches whose rows get no gradients; the result of `Runtime.predict`."""

    name = "predict"

    # `runtime` is a `Runtime`, whose module imports this one; `batches` are of any type; `options` are those of `Loop`.
    def __init__(self, runtime: Any, batches: Iterable[Any], reader: Reader, **options: Any) -> None:
        super().__init__(runtime, batches, reader, **options)
        self._counted = ExitStack()  # closing it unregisters this loop from the runtime
        # The pipeline's result or error after the last batch; empty if the pipeline was not asked yet.
        self._next: list[StepBatch | BaseException | None] = []

    def _open(self) -> Any:
        loops = self._runtime.loops
        loops.begin_prediction(self)
        requests = self._requests()
        self._stack.enter_context(self._counted)
        self._counted.callback(loops.end_prediction)
        return self._stack.enter_context(self._runtime.pipeline.predict(requests, **self._how))

    @property
    def is_finished(self) -> bool:
        """Whether the last batch was yielded, and nothing is left to do after its body."""
        return self._next == [None] and not self._ended

    def _take_next(self) -> StepBatch | None:
        if not self._next:
            return super()._take_next()
        found = self._next.pop()
        if isinstance(found, BaseException):
            raise found
        return found

    def _take(self, step_batch: StepBatch) -> None:
        super()._take(step_batch)
        if self._given + (1 if self._by_step else len(self._batch.micros)) == self._length:
            self._look_for_end()

    def _look_for_end(self) -> None:
        """After the last batch of a loader that has a length, ask the pipeline whether another batch follows."""
        try:
            self._next.append(super()._take_next())
        except BaseException as error:
            self._next.append(error)
            return
        if self._next == [None]:
            self._counted.close()

    def _trains(self, table: Table) -> bool:
        return False

    def _end_batch(self, *, closing: bool = False) -> None:
        if self._batch.step_batch is not None and self._pass is not None:
            step_batch, self._batch.step_batch = self._batch.step_batch, None
            self._pass.finish(step_batch, None)
            self._forget()
