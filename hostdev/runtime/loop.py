"""The training loop around a user's model: yields batches with their rows, and applies gradients to the tables."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from weakref import ReferenceType, WeakKeyDictionary

import torch

from hostdev.core.signals import deferred
from hostdev.device.staging import Staging
from hostdev.distributed.dense import DenseExchange
from hostdev.host.key_plan import PlannedAheadError
from hostdev.pipeline.results import Gradients, Outcome, StepBatch
from hostdev.runtime import torch_tools
from hostdev.runtime.batches import Loop, LoopStatement, PredictLoop
from hostdev.runtime.body_batch import BodyBatch
from hostdev.runtime.features import Table
from hostdev.runtime.loaders import PredictLoader
from hostdev.runtime.random_streams import Place
from hostdev.runtime.reading import Reading, require_read_ahead
from hostdev.runtime.reduction import Flags, NonFiniteError, RankReduction, Reduction
from hostdev.runtime.requests import GetCursor, GetIds, Reader, Replay
from hostdev.runtime.row_parameter import RowParameter
from hostdev.runtime.watcher import TrainWatcher

__all__ = ["AnyPredictLoop", "AnyTrainLoop", "NonFiniteError", "PredictLoop", "TrainLoop", "trained", "trained_by"]

Item = TypeVar("Item")


class TrainLoop(Loop[Item]):
    """A loop over batches with their rows, whose gradients update the tables; the result of `Runtime.train`.

    When the next batch is requested, the gradients of the rows are applied to the tables in the background; a
    batch without gradients is skipped and changes nothing.

    If dense optimizers step in the loop, the tables are updated for each batch with which an optimizer has stepped.
    Otherwise they are updated for each batch in whose body `backward` has run. A loop that is left before the
    optimizer's step, or the next batch, drops the gradients of its last batch; the next use of the tables warns.
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
        self.watcher = TrainWatcher(self._batch, runtime.settings, self._flags, runtime.world, runtime.loops.dense)
        self._of_pass = ExitStack()
        self._position = 0  # the position of the body's batch in the loop, from 1
        self._dense = DenseExchange(
            runtime.dense_channel, micro_batches, runtime.dense_exchange, runtime.other_channels
        )
        self._late: list[RowParameter] = []  # rows of a batch that `submit` finished before the loop continued
        self._keyed = list(runtime.pipeline.keyed)  # numbers of the groups of tables by key
        self._must_replan = False  # whether the batches read ahead must be planned again
        self._is_suspended = False  # whether `suspend` has ended the pass, and no new pass has begun

    @property
    def thread(self) -> int:
        """The identifier of the loop's thread."""
        return self.watcher.thread

    @property
    def is_stepped(self) -> bool:
        """Whether an optimizer has taken the step of the body's batch, which the tables take later."""
        return self._batch.step_batch is not None and self._was_stepped()

    def clipping_rows(self) -> "TrainLoop[Item]":
        """From now on, clip the rows' gradients whenever torch's functions clip parameters; return this loop."""
        self.watcher.adds_rows_to_clips = True
        return self

    def _open(self) -> Any:
        self._runtime.loops.begin_training(self)
        self._stack.callback(self._runtime.loops.end_training)
        for number in self._keyed:
            self._stack.callback(self._runtime.group_specs[number].tables[0].report_evictions)
        self._wanted: Replay = Replay(self._requests())
        torch_tools.watch(self.watcher)
        self._stack.enter_context(self._of_pass)
        return self._open_pass()

    def _find_place(self, reading: Reading) -> Place | None:
        loaded: Place | None = self._runtime.loops.iterators.take_loaded()
        return super()._find_place(reading) or loaded

    def _open_pass(self) -> Any:
        """Open a pass over the remaining batches."""
        self._must_replan = self._is_suspended = False
        for number in self._keyed:
            self._runtime.pipeline.keyed[number].trains = self._trains(self._runtime.group_specs[number].tables[0])
        opened = self._runtime.pipeline.train(self._wanted, position=self._position, **self._how)
        return self._of_pass.enter_context(opened)

    def _take_next(self) -> StepBatch | None:
        if self._must_replan:
            self._begin_again()
        for number in self._keyed:
            self._runtime.group_specs[number].tables[0].report_evictions()
        step_batch = None
        try:
            step_batch = super()._take_next()
        except PlannedAheadError:  # handled below, since an error that is handled becomes the context of later ones
            self._must_replan = True
        if self._must_replan:
            self._begin_again()
            step_batch = super()._take_next()
        if step_batch is not None:
            self._position += 1
            self._wanted.take()
        return step_batch

    def _begin_again(self) -> None:
        """Drop the batches that were read ahead, and begin a pass that plans them again."""
        self._of_pass.close()
        self._wanted.rewind()
        self._pass = self._open_pass()

    def replan(self) -> None:
        """If there are tables by key, plan all prefetched batches again before the next batch is taken."""
        self._must_replan = bool(self._keyed)

    def suspend(self, table: Table) -> None:
        """Drop the plans of later batches, so that a table's keys can be changed; raise ValueError within a step."""
        if self._batch.step_batch is not None:
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

    def _take(self, step_batch: StepBatch) -> None:
        super()._take(step_batch)
        runtime, batch = self._runtime, self._batch
        if runtime.world.size > 1:
            how = self._flags, runtime.world, self._dense, step_batch, batch.losses, runtime.step_channel
            batch.reduction = RankReduction(batch.all_leaves, self._micro_batches, *how)
        elif self._micro_batches > 1:
            batch.reduction = Reduction(batch.all_leaves, self._micro_batches)
        self.watcher.begin_batch()

    def _get_settings(self) -> dict[str, Any]:
        return {**super()._get_settings(), "reduce_early": self._reduce_early}

    def _release(self) -> None:
        super()._release()
        self._late = []
        self._dense.close()
        torch_tools.forget(self.watcher)

    def _next_batch(self) -> Any:
        if len(self._batch.micros) == 1 and self._reduce_early:
            self._dense.expect_last()
        return super()._next_batch()

    def __iter__(self) -> LoopStatement[Item]:
        """Return an iterator for one `for` statement; drop gradients that the previous one left without a step."""
        statement = super().__iter__()
        is_open = self.is_left and self._batch.step_batch is not None
        if is_open and self._batch.has_gradients() and not self._was_stepped():
            self._runtime.loops.left.note(self._position)
            self._runtime.loops.left.report()
            self.drop_gradients()
        return statement

    def drop_gradients(self) -> None:
        """Drop the gradients of the batch's rows, unless an optimizer has stepped with them."""
        self.watcher.forget_gradients()

    def submit(self) -> None:
        """Finish the body's batch if its step was taken, and wait until all updates of the tables are done."""
        self.watcher.require_thread()
        try:
            with torch.inference_mode(False):  # as in `__next__`
                if self._batch.step_batch is not None and self._was_stepped():
                    late = self._batch.all_leaves
                    self._end_batch()
                    self._late = late
                if self._pass is not None and not self._is_suspended:
                    self._pass.drain()
        except BaseException as error:
            self._fail(error)
            raise

    def _was_stepped(self) -> bool:
        """Return whether an optimizer has taken the step of the body's batch."""
        batch = self._batch
        if batch.reduction is not None and not batch.is_reduced():
            return False
        return bool(self.watcher.steps.stepped) and not batch.micros and batch.has_gradients()

    def _end_batch(self, *, closing: bool = False) -> None:
        if any(leaf.grads() for leaf in self._late):
            raise ValueError(
                "a batch got gradients after an evaluation, or a read of a table, had already finished the batch; call "
                "backward() before evaluations and reads"
            )
        self._late = []
        batch, runtime, watcher = self._batch, self._runtime, self.watcher
        if batch.step_batch is None or self._pass is None:
            return
        if closing and any(rows.guarded is not None and rows.guarded[1].has_raised for rows in batch.rows):
            return  # the body has raised the error of the failed step
        if closing and not self._was_stepped():
            if batch.has_gradients():
                runtime.loops.left.note(self._position)
            return
        with deferred():  # otherwise Ctrl-C could interrupt a step
            rates = runtime.settings.learning_rates() if watcher.rates is None else watcher.rates
            gradients = _make_gradients(batch, watcher, self._flags, runtime.staging, self, is_last=closing)
            step_batch, batch.step_batch, cursor = batch.step_batch, None, batch.cursor
            self._forget()  # free the rows before more is allocated
            later = runtime.settings.exchange_rates(rates)  # the body may have set other rates for the next step
            if not all(_takes_step(step_batch, gradients, number) for number in self._keyed):
                self.replan()
            try:
                self._pass.finish(step_batch, gradients)
            finally:
                runtime.settings.exchange_rates(later)
            if cursor is not None:
                runtime.loops.cursor = cursor
        runtime.loops.count_step(runtime, step_batch.request.rows)


def _takes_step(step_batch: StepBatch, gradients: Gradients, group: int) -> bool:
    """Return whether the table by key of a group takes the step that was planned for it; True if none was planned."""
    stepped = gradients.parts or gradients.grads  # `parts` with other ranks
    return not step_batch.groups[group].planned.plans_keys or stepped[group][0] is not None


def _make_gradients(
    batch: BodyBatch, watcher: TrainWatcher, flags: Flags, staging: Staging, owner: object, *, is_last: bool
) -> Gradients:
    """Return the step's gradients, and remove them from the rows.

    Args:
        batch: The batch in the body.
        watcher: The loop's watcher.
        flags: The flags that stop a step whose gradients or loss are not finite.
        staging: Copies the flags to the host.
        owner: An object that stands for an optimizer: a scaler records an overflow under its `id`.
        is_last: Whether the loop is left after this step.

    Raises:
        ValueError: The dense parameters and the tables would take different steps.
    """
    nothing = [[None] * len(group) for group in batch.leaves]
    guarded = next((rows.guarded for rows in reversed(batch.rows) if rows.guarded is not None), None)
    if not batch.has_gradients():
        return Gradients(nothing, check=None if guarded is None else guarded[1])
    watcher.steps.require_on_time()
    if watcher.losses.skips_step(owner):
        return Gradients(nothing)
    watcher.steps.count_step(is_last=is_last)
    assert batch.step_batch is not None
    if batch.reduction is not None and batch.reduction.parts:
        guarded = guarded or (flags.stop, _make_outcome(batch, batch.step_batch, flags, staging))
        reduction, parts = batch.reduction, iter(batch.reduction.parts)
        chunks = [[next(parts) for _ in group] for group in batch.leaves]
        return Gradients((), *guarded, chunks, reduction.count, reduction.in_two)
    grads = [[leaf.take_grad() for leaf in group] for group in batch.leaves]
    if guarded is None:
        flat = zip([grad for group in grads for grad in group], batch.all_leaves, strict=True)
        found, tables = zip(*[(grad, leaf.table) for grad, leaf in flat if grad is not None], strict=True)
        flags.check(found, tables, batch.losses)
        guarded = flags.stop, _make_outcome(batch, batch.step_batch, flags, staging)
    return Gradients(grads, *guarded)


def _make_outcome(batch: BodyBatch, step_batch: StepBatch, flags: Flags, staging: Staging) -> Outcome:
    """Return the outcome that raises an error on the host if the flags stop the step."""
    step, tables = step_batch.position, [leaf.table for leaf in batch.all_leaves]

    def read(results: list[Any]) -> None:
        stop, not_finite, loss = results[0]
        if not stop:
            return
        names = ", ".join(repr(table.name) for table in tables)
        if not_finite:
            what = f"a gradient of the rows of {names} is not finite"
        elif loss:
            what = "a loss is not finite"
        else:
            what = f"a gradient of the rows of {names} is too large for the table's optimizer"
        advice = "Look at the loss before backward(), or use a smaller learning rate"
        raise NonFiniteError(f"step {step}: {what}; no row was updated. {advice}", step)

    return Outcome([flags.now()], read, staging, step_batch.memory)


AnyTrainLoop: TypeAlias = TrainLoop[Any]  # with batches of any type
AnyPredictLoop: TypeAlias = PredictLoop[Any]

trained: WeakKeyDictionary[Table, ReferenceType[AnyTrainLoop]] = WeakKeyDictionary()  # the loop that trains each table


def trained_by(table: Table) -> AnyTrainLoop | None:
    """Return the open loop, of any runtime, that trains a table, or None."""
    loop = trained.get(table)
    return None if loop is None else loop()


Program = tuple[GetIds[Any] | None, Callable[[Any], Any] | None, GetCursor[Any] | None]  # `ids`, `send` and `cursor`


@dataclass(frozen=True)
class StepOptions:
    """The options of `Runtime.train` about the batches of a step."""

    accumulate: int
    micro_batches: int | None
    by_step: bool
    reduce_early: bool


def make_train_loop(
    runtime: Any,  # a `Runtime`, whose module imports this one
    batches: Iterable[Any],
    program: Program,
    options: StepOptions,
    reading: dict[str, Any],
) -> TrainLoop[Any]:
    """Return the loop; raise ValueError for options that contradict each other.

    Args:
        reading: The options `read_ahead` and `background`.
    """
    ids, send, cursor = program
    accumulate, micro_batches = options.accumulate, options.micro_batches
    if accumulate < 1:
        raise ValueError(f"accumulate must be a number of batches, 1 or more, not {accumulate}")
    require_read_ahead(**reading)
    tables = runtime.bindings, runtime.group_specs
    by_rank = runtime.world.micro_batches
    if micro_batches is None and by_rank is None:
        if options.reduce_early:
            raise ValueError("reduce_early requires micro_batches=N")
        return TrainLoop(runtime, batches, Reader(*tables, ids, send, accumulate, cursor=cursor), **reading)
    if micro_batches is None and accumulate != 1:
        raise ValueError(f"with other ranks, give micro_batches={accumulate} instead of accumulate={accumulate}")
    micro_batches = by_rank if micro_batches is None else micro_batches
    if micro_batches < 1 or accumulate != 1:
        raise ValueError(
            f"micro_batches must be a number of batches, 1 or more, not {micro_batches}"
            if micro_batches < 1
            else "micro_batches and accumulate both set the number of batches per step; give only one of them"
        )
    if options.by_step and by_rank is None:
        raise ValueError("by_step requires other ranks, but this process is alone")
    reader = Reader(*tables, ids, send, micro_batches, whole=True, asks=runtime.world.leads, cursor=cursor)
    how = {"reduce_early": options.reduce_early, "by_step": options.by_step}
    return TrainLoop(runtime, batches, reader, micro_batches, **how, **reading)
