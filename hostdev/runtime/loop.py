"""The training loop around a user's model: yields batches with their rows, and applies gradients to the tables."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any, TypeAlias, TypeVar
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor

from hostdev.core.signals import deferred
from hostdev.distributed.dense import DenseExchange
from hostdev.host.key_plan import PlannedAheadError
from hostdev.pipeline.batch_ids import Request
from hostdev.pipeline.results import Gradients, StepBatch
from hostdev.runtime import clipping, scaling
from hostdev.runtime.batches import Loop, PredictLoop
from hostdev.runtime.features import Table
from hostdev.runtime.finite import Flags, NonFiniteError
from hostdev.runtime.loaders import PredictLoader
from hostdev.runtime.pending import Pending, gradients_left
from hostdev.runtime.random_streams import Place
from hostdev.runtime.reading import Reading
from hostdev.runtime.reduction import Reduction
from hostdev.runtime.replay import Replay
from hostdev.runtime.requests import Reader
from hostdev.runtime.row_parameter import RowParameter
from hostdev.runtime.step_gradients import make_gradients
from hostdev.runtime.watcher import TrainWatcher

__all__ = ["AnyPredictLoop", "AnyTrainLoop", "NonFiniteError", "PredictLoop", "TrainLoop", "trained", "trained_by"]

Item = TypeVar("Item")


class TrainLoop(Loop[Item]):
    """A loop over batches with their rows, whose gradients update the tables; the result of `Runtime.train`.

    When the next batch is requested, the gradients of the rows are applied to the tables in the background; a
    batch without gradients is skipped and changes nothing.

    If dense optimizers step in the loop, the tables are updated for each batch with which an optimizer has stepped.
    Otherwise they are updated at the end of each body in which `backward` has run, whether the loop continues, is left
    by `break` or is closed. A body that raises an exception has not reached its end, and changes nothing.
    """

    _is_training = True

    def __init__(
        self,
        runtime: Any,  # a `Runtime`, whose module imports this one
        batches: Iterable[Any],  # of any type, like `Item`
        reader: Reader,
        micro_batches: int = 0,
        *,
        reduce_early: bool = False,
        **reading: Any,  # options of `Loop`
    ) -> None:
        self._flags = Flags(runtime.device)
        super().__init__(runtime, batches, reader, flags=self._flags, **reading)
        self._reduce_early = reduce_early
        self._micro_batches = micro_batches  # per step; 0: batches are not micro-batches
        self.watcher = TrainWatcher(self._batch, runtime.settings, self._flags, runtime.ranks, runtime.loops.dense)
        self._of_pass = ExitStack()
        self._position = 0  # the position of the body's batch in the loop, from 1
        self._dense = DenseExchange(
            runtime.dense_channel, micro_batches, runtime.dense_exchange, runtime.other_channels
        )
        self._late: list[RowParameter] = []  # rows of a batch that `submit` finished before the loop continued
        self._keyed = list(runtime.pipeline.keyed)  # numbers of the groups of tables by key
        self._must_replan = False  # whether the batches read ahead must be planned again
        self._is_suspended = False  # whether the pass has ended meanwhile
        self._clipped = False  # whether the batch's rows were clipped with the parameters

    @property
    def thread(self) -> int:
        """The identifier of the loop's thread."""
        return self.watcher.thread

    @property
    def is_stepped(self) -> bool:
        """Whether an optimizer has taken the step of the body's batch, which the tables take later."""
        return self._batch.flight is not None and bool(self.watcher.steps.stepped) and self._was_stepped()

    def clipping_rows(self) -> "TrainLoop[Item]":
        """From now on, clip the rows whenever torch's functions clip parameters; return this loop."""
        clipping.add(self)
        return self

    def take_clipped(self, given: Sequence[Tensor]) -> list[Tensor]:
        """See `clipping.Clipped`."""
        gradients = [parameter.grad for parameter in given if parameter.grad is not None]
        if self._clipped or not self._batch.rows or self.watcher.clips_rows(gradients) is not False:
            return []
        self._clipped = True
        return self._batch.rows[-1].parameters()

    def _open(self) -> Any:
        self._runtime.loops.begin_training(self)
        self._stack.callback(self._runtime.loops.end_training)
        for number in self._keyed:
            self._stack.callback(self._runtime.group_specs[number].tables[0].report_evictions)
        self._wanted: Replay = Replay(self._requests())
        scaling.watch(self.watcher)
        self._stack.enter_context(self._of_pass)
        return self._open_pass()

    def _find_place(self, reading: Reading) -> Place | None:
        loaded: Place | None = self._runtime.loops.iterators.take_loaded()
        return super()._find_place(reading) or loaded

    def _open_pass(self) -> Any:
        """Open a pass over the remaining batches; if an earlier loop's gradients wait, over the first batch alone."""
        requests: Iterator[Request] = self._wanted
        self._must_replan = self._is_suspended = False
        for number in self._keyed:
            self._runtime.pipeline.keyed[number].trains = self._trains(self._runtime.group_specs[number].tables[0])
        self.watcher.first = first = self._runtime.loops.carried.first_batch()
        if first is not None:
            self._of_pass.callback(first.end)
            requests = map(first.request, islice(requests, 1))
        return self._of_pass.enter_context(self._runtime.pipeline.train(requests, position=self._position, **self._how))

    def _take_next(self) -> StepBatch | None:
        if self.watcher.first is not None and self._position:  # the first batch was alone in its pass, which is over
            self._of_pass.close()
            self._pass = self._open_pass()
        if self._must_replan:
            self._begin_again()
        for number in self._keyed:
            self._runtime.group_specs[number].tables[0].report_evictions()
        flight = None
        try:
            flight = super()._take_next()
        except PlannedAheadError:  # handled below, since an error that is handled becomes the context of later ones
            self._must_replan = True
        if self._must_replan:
            self._begin_again()
            flight = super()._take_next()
        if flight is not None:
            self._position += 1
            self._wanted.take()
        return flight

    def _begin_again(self) -> None:
        """Drop the batches that were read ahead, and begin a pass that plans them again."""
        self._of_pass.close()
        self._wanted.rewind()
        self._pass = self._open_pass()

    def replan(self) -> None:
        """From the next batch on, plan again what is planned ahead for tables by key."""
        self._must_replan = bool(self._keyed)

    def suspend(self, table: Table) -> None:
        """Drop what is planned ahead, so that the keys of a table can be changed; raise ValueError within a step."""
        if self._batch.flight is not None:
            raise ValueError(
                f"table {table.name!r}: its keys can be changed only after the batch's step (after backward() and the "
                "optimizer's step), or between loops"
            )
        self._of_pass.close()
        self._is_suspended = True
        self.replan()

    def __next__(self) -> Item:
        """Apply the previous batch's gradients in the background, and return the next batch with its rows."""
        self.watcher.require_thread()
        loops = self._runtime.loops
        if loops.predicting:
            self._runtime.close_loaders(PredictLoader)
        if loops.is_predicting():
            raise ValueError(
                "a loop over `predict` is open; end it, or call its close(), before the next step of `train`"
            )
        try:
            self._require_reduced()
        except ValueError as error:
            self._fail(error)
            raise
        return super().__next__()

    def _require_reduced(self) -> None:
        """Raise ValueError if a micro-batch has gradients that were not added to the step's sums."""
        batch = self._batch
        if batch.reduction is not None and not batch.is_reduced() and (batch.micros or batch.gradients):
            raise ValueError(
                "a micro-batch was not reduced: call rows.reduce(model.parameters()) after each backward()"
            )

    def _trains(self, table: Table) -> bool:
        return not self._runtime.settings.is_frozen(table)

    def _take(self, flight: StepBatch) -> None:
        super()._take(flight)
        runtime, batch = self._runtime, self._batch
        if self._micro_batches > 1 or runtime.ranks is not None:
            batch.reduction = Reduction(
                list(batch.all_leaves),
                self._micro_batches,
                self._flags,
                runtime.ranks,
                self._dense,
                flight,
                batch.losses,
                runtime.step_channel,
            )
        self.watcher.begin_batch()
        self._clipped = False

    def _get_settings(self) -> dict[str, Any]:
        return {**super()._get_settings(), "reduce_early": self._reduce_early}

    def _release(self) -> None:
        super()._release()
        self._late = []
        self._dense.close()
        scaling.forget(self.watcher)
        clipping.remove(self)

    def _next_batch(self) -> Any:
        if len(self._batch.micros) == 1 and self._reduce_early:
            self._dense.expect_last()
        return super()._next_batch()

    def wrote(self, table: Table, ids: Any) -> None:
        """Record that the program has written rows of a table: `ids`, int32 or int64 [N], or all rows if None."""
        if self.watcher.first is not None:
            self.watcher.first.wrote(table, ids)

    def drop_gradients(self) -> None:
        """Drop the gradients of the batch's rows, unless an optimizer has stepped with them."""
        self.watcher.forget_gradients()

    def submit(self) -> None:
        """Finish the body's batch if its step was taken, and wait until all updates of the tables are done."""
        self.watcher.require_thread()
        try:
            with torch.inference_mode(False):  # as in `__next__`
                if self._batch.flight is not None and self._was_stepped():
                    late = list(self._batch.all_leaves)
                    self._end_batch()
                    self._late = late
                if self._pass is not None and not self._is_suspended:
                    self._pass.drain()
                if self.watcher.first is not None and self._batch.flight is None:
                    self.watcher.first.end()
        except BaseException as error:
            self._fail(error)
            raise

    def _was_stepped(self) -> bool:
        """Return whether the body is done with its batch: an optimizer has stepped, or none steps in this loop."""
        batch, steps = self._batch, self.watcher.steps
        if batch.reduction is not None and not batch.is_reduced():
            return False
        if batch.micros or not batch.has_gradients():
            return False
        return bool(steps.stepped) or not (steps.any or self._body.has_raised() or steps.awaits())

    def _end_batch(self, *, closing: bool = False) -> None:
        if any(leaf.grads() for leaf in self._late):
            raise ValueError(
                "a batch got gradients after an evaluation, or a read of a table, had already finished the batch; call "
                "backward() before evaluations and reads"
            )
        self._late = []
        batch, runtime, watcher = self._batch, self._runtime, self.watcher
        if batch.flight is None or self._pass is None:
            return
        if closing and (not self._was_stepped() or self._has_reported()):
            self._keep_pending(batch.flight)
            return
        if self._body.raised and not watcher.steps.stepped:  # the loop continues after an error, so no step was taken
            self.drop_gradients()
        with deferred():  # otherwise Ctrl-C could interrupt a step
            rates = runtime.settings.learning_rates() if watcher.rates is None else watcher.rates
            gradients = make_gradients(batch, watcher, self._flags, runtime.staging, self)
            flight, batch.flight, cursor = batch.flight, None, batch.cursor
            self._forget()  # free the rows before more is allocated
            later = runtime.settings.exchange_rates(rates)  # the body may have set other rates for the next step
            if not all(_takes_step(flight, gradients, number) for number in self._keyed):
                self.replan()
            try:
                self._pass.finish(flight, gradients)
            finally:
                runtime.settings.exchange_rates(later)
            if cursor is not None:
                runtime.loops.cursor = cursor
        runtime.loops.count_step(runtime, flight.request.rows)

    def _has_reported(self) -> bool:
        """Return whether the error of a failed step was already raised in the body; then it is not raised again."""
        return any(rows.guarded is not None and rows.guarded[1].has_raised for rows in self._batch.rows)

    def _keep_pending(self, flight: StepBatch) -> None:
        """If the batch had no step, keep the rows' gradients for the next step, as `.grad` keeps dense gradients."""
        batch, watcher = self._batch, self.watcher
        steps, carried = watcher.steps, self._runtime.loops.carried
        if steps.stepped or batch.reduction is not None or not batch.has_gradients():
            return
        scaler = watcher.losses.waiting_scaler
        optimizers = [] if steps.without else steps.find_waiting()
        if not optimizers and (steps.any or not batch.shares_rows):
            return  # `zero_grad` was called, or a body without an optimizer raised an exception
        uses, more = [rows.uses for rows in batch.rows], None
        if watcher.first is not None and watcher.first.counts:
            more = watcher.first.places(batch.inverses)
        left = gradients_left(flight, batch.leaves, uses, more)
        carried.keep(Pending(left, optimizers, carried.apply, scaler))


def _takes_step(flight: StepBatch, gradients: Gradients, group: int) -> bool:
    """Return whether the table by key of a group takes the step that was planned for it, if any."""
    stepped = gradients.parts or gradients.grads  # the former with other ranks
    return not flight.groups[group].planned.plans_keys or stepped[group][0] is not None


AnyTrainLoop: TypeAlias = TrainLoop[Any]  # with batches of any type
AnyPredictLoop: TypeAlias = PredictLoop[Any]

trained: WeakKeyDictionary[Table, ReferenceType[AnyTrainLoop]] = WeakKeyDictionary()  # the open loop of each table


def trained_by(table: Table) -> AnyTrainLoop | None:
    """Return the open loop, of any runtime, that trains a table, or None."""
    loop = trained.get(table)
    return None if loop is None else loop()
