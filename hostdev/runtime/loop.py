"""The loop that a user writes around a model: batches with their rows, and the gradients back to the tables."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from hostdev.core.signals import deferred
from hostdev.distributed.dense import DenseExchange
from hostdev.pipeline.outcome import Outcome
from hostdev.pipeline.results import Flight, Gradients
from hostdev.runtime import clipping, scaling
from hostdev.runtime.batches import Loop, PredictLoop
from hostdev.runtime.finite import Flags, NonFiniteError
from hostdev.runtime.loaders import PredictLoader
from hostdev.runtime.pending import FirstBatch, Pending, gradients_left
from hostdev.runtime.random_streams import Place
from hostdev.runtime.reading import Reading
from hostdev.runtime.reduction import Reduction
from hostdev.runtime.requests import Reader
from hostdev.runtime.rows import Leaf, Rows
from hostdev.runtime.waiting import leaves_of, optimizers_of

__all__ = ["NonFiniteError", "PredictLoop", "TrainLoop", "trained", "trained_by"]


class TrainLoop(Loop):
    """Batches with their rows, whose gradients go to the tables; what `Runtime.train` returns.

    When the loop comes back for the next batch, the gradients that `backward` has brought are on their way to the
    tables behind its step; a batch without any is skipped, and changes nothing.

    A loop with an optimizer of the dense side updates the tables for a batch in which that has stepped. A loop without
    one updates them at the end of each body that `backward` has brought gradients in, whether the loop comes back,
    is left by `break` or is closed; a body that raises has not come to its end, and changes nothing.
    """

    def __init__(
        self, runtime: Any, batches: Iterable[Any], reader: Reader, micro_batches: int = 0, *,
        reduce_early: bool = False, **reading: Any,
    ) -> None:  # fmt: skip
        super().__init__(runtime, batches, reader, **reading)
        self._reduce_early = reduce_early
        self._micro_batches = micro_batches  # of a step; 0: what it has is not added in the order of a tree
        self.thread = threading.get_ident()
        self._finite = Flags(runtime.device)
        self._stepped: set[int] = set()  # optimizers, since the last batch of the flight was given out
        self._early: set[int] = set()  # those that took a step before
        self._any_steps = False  # of optimizers, in the loop so far
        self._rates: list[float] | None = None  # learning rates of the tables, for the flight; None: those at its end
        self._backward = -1  # torch's number of the backward pass that has brought gradients last
        self._parameters: list[ReferenceType[Tensor]] = []  # of the dense side, to which the flight brings gradients
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()  # that have stepped in the loop
        self._awaits_optimizer: bool | None = None  # whether one has still to step; None: not looked at
        self._without = 0  # flights with gradients and without such a step
        self._losses = 0  # that were scaled before the flight
        self._unscaled = False
        self._origin: scaling.Origin | None = None  # of the flight's gradients, where a loss was scaled
        self._overflow: Tensor | None = None  # found when the gradients were unscaled, float32 []
        self._of_pass = ExitStack()
        self._first: FirstBatch | None = None  # the flight is alone, and has rows whose gradients are pending
        self._position = 0  # of the flight in the loop, from 1
        self._dense = DenseExchange(
            runtime.dense_channel, micro_batches, runtime.dense_exchange, runtime.other_channels
        )
        self._late: list[Leaf] = []  # of a flight that was finished before the loop has come back
        self._clipped = False  # the rows of the flight, with the parameters

    def clipping_rows(self) -> "TrainLoop":
        """Clip the rows with the parameters wherever torch's functions clip these; return the loop."""
        clipping.add(self)
        return self

    def take_clipped(self, given: Sequence[Tensor]) -> list[Tensor]:
        """See `clipping.Clipped`."""
        gradients = [parameter.grad for parameter in given if parameter.grad is not None]
        if self._clipped or not self._rows or self.clips_rows(gradients) is not False:
            return []
        self._clipped = True
        return self._rows[-1].parameters()

    _is_training = True

    def _open(self) -> Any:
        runtime = self._runtime
        runtime.begin_training(self)
        self._stack.callback(runtime.end_training)
        self._wanted = self._requests()
        scaling.watch(self)
        self._stack.enter_context(self._of_pass)
        return self._open_pass()

    def _first_place(self, reading: Reading) -> Place | None:
        loaded = self._runtime.take_loaded_place()
        return super()._first_place(reading) or loaded

    def _open_pass(self) -> Any:
        """Open a pass over the batches to come; where gradients of an earlier loop are pending, over the first one."""
        requests, self._first = self._wanted, self._runtime.first_batch()
        if self._first is not None:
            self._of_pass.callback(self._first.end)
            requests = map(self._first.request, islice(requests, 1))
        return self._of_pass.enter_context(self._runtime.pipeline.train(requests, position=self._position, **self._how))

    def _take_next(self) -> Flight | None:
        if self._first is not None and self._position:  # the one that was alone has been updated
            self._of_pass.close()
            self._pass = self._open_pass()
        flight = super()._take_next()
        if flight is not None:
            self._position += 1
        return flight

    def __next__(self) -> Any:
        """Send the gradients of the batch before on their way, and return the next one with its rows."""
        self._require_thread()
        if self._runtime.predicting:
            self._runtime.close_loaders(PredictLoader)
        if self._runtime.is_predicting():
            raise ValueError("a loop over `predict` is open; end it, or close it, before the next step of `train`")
        try:
            self._require_reduced()
        except ValueError as error:
            self._fail(error)
            raise
        return super().__next__()

    def _require_reduced(self) -> None:
        """ValueError where gradients of a micro-batch have come, and were not added to the step's."""
        if self._reduction is None or (self._rows and self._rows[-1].reduced):
            return
        if self._micros or any(leaf.grads() for group in self._leaves for leaf in group):
            raise ValueError(
                "a micro-batch was not added up: call rows.reduce(model.parameters()) after the backward() of each"
            )

    def _trains(self, table: Any) -> bool:
        return not self._runtime.is_frozen(table)

    def _flags(self) -> Flags | None:
        return self._finite

    def _take(self, flight: Flight) -> None:
        super()._take(flight)
        self._losses_seen = []
        if self._micro_batches > 1 or self._runtime.ranks is not None:
            leaves = [leaf for group in self._leaves for leaf in group]
            self._reduction = Reduction(
                leaves, self._micro_batches, self._finite, self._runtime.ranks, self._dense, flight,
                self._losses_seen, self._runtime.step_channel,
            )  # fmt: skip
        self._stepped, self._early = set(), set()
        self._rates, self._awaits_optimizer, self._parameters = None, None, []
        self._runtime.learning_rates()  # raises those that cannot be before the step
        if self._first is not None:
            self._shares_rows = True
        if self._first is not None or not self._any_steps:
            for leaf in (leaf for group in self._leaves for leaf in group if leaf.trained):
                leaf.rows.register_post_accumulate_grad_hook(partial(_came, ref(self)))  # type: ignore[no-untyped-call]
        self._losses = scaling.losses_scaled()
        self._unscaled, self._overflow, self._origin = False, None, None
        self._clipped = False

    def _alike(self) -> dict[str, Any]:
        return {**super()._alike(), "reduce_early": self._reduce_early}

    def _let_go(self) -> None:
        super()._let_go()
        self._late = []
        self._dense.close()
        scaling.forget(self)
        clipping.remove(self)

    def _next_batch(self) -> tuple[Any, Rows]:
        if len(self._micros) == 1 and self._reduce_early:
            self._dense.expect_last()
        return super()._next_batch()

    def _require_thread(self) -> None:
        if threading.get_ident() != self.thread:
            raise ValueError(
                "one thread goes through a loop over `train`, and evaluates or writes back within it: its own"
            )

    def wrote(self, table: Any, ids: Any) -> None:
        """Let what somebody has written to a table's rows count; int32 or int64 [N], None for all."""
        if self._first is not None:
            self._first.wrote(table, ids)

    def drop_gradients(self) -> None:
        """Forget the gradients of the current batch's rows; those that were stepped with are the tables' by then."""
        if self._stepped:  # `zero_grad` at the end of a body takes back no step of the dense side either
            return
        for group in self._leaves:
            for leaf in group:
                leaf.drop_grad()
        if self._origin is not None:
            self._origin.forget()
        self._losses_seen.clear()

    def submit(self) -> None:
        """Finish the current batch now, if it has been stepped, and wait for all updates, so that others see them."""
        self._require_thread()
        try:
            with torch.inference_mode(False):  # as in `__next__`
                if self._flight is not None and self._was_stepped():
                    late = [leaf for group in self._leaves for leaf in group]
                    self._end_flight()
                    self._late = late
                if self._pass is not None:
                    self._pass.drain()
                if self._first is not None and self._flight is None:
                    self._first.end()
        except BaseException as error:
            self._fail(error)
            raise

    def _was_stepped(self) -> bool:
        """Tell whether the body is done with the flight: an optimizer has taken its step, or the loop has none."""
        if self._reduction is not None and not (self._rows and self._rows[-1].reduced):
            return False
        if self._micros or not self._has_gradients():
            return False
        if self._stepped:
            return True
        return not (self._any_steps or self._has_raised() or self._awaits())

    def _awaits(self) -> bool:
        """Tell whether an optimizer of the dense side has still to step with the batch."""
        if self._without:
            return False
        if self._awaits_optimizer is None:
            self._awaits_optimizer = bool(self._waiting_optimizers())
        return self._awaits_optimizer

    def _waiting_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the dense side that have gradients of the flight, before any has stepped."""
        if self._any_steps:
            return list(self._optimizers)
        return optimizers_of([found for held in self._parameters if (found := held()) is not None])

    def expect_backward(self, roots: Sequence[Any]) -> None:
        """See `scaling.Watcher`."""
        if self._first is not None:
            self._first.pending.is_kept()  # or a `zero_grad` before it would not be seen any more
        if self._flight is None or self._any_steps or self._without:
            return
        own = {id(leaf.rows) for group in self._leaves for leaf in group}
        self._parameters += [ref(leaf) for leaf in leaves_of(roots) if id(leaf) not in own]

    def gradients_came(self) -> None:
        """Take the rates for the batch: those that are set from now on are for the next one, unless more comes."""
        if self._first is not None:
            self._first.came(self._leaves, self._inverses)
        backward = torch._C._current_graph_task_id()
        if backward == self._backward or self._stepped:
            return
        self._backward, self._awaits_optimizer = backward, None
        try:
            self._rates = self._runtime.learning_rates()
        except ValueError:  # which the end of the flight raises again: here it would seem to come from `backward`
            self._rates = None

    def _is_known_to_fail(self) -> bool:
        """Tell whether the body has read that the step came to nothing: it need not be told again."""
        return any(rows.guarded is not None and rows.guarded[1].has_raised for rows in self._rows)

    def _end_flight(self, *, closing: bool = False) -> None:
        if any(leaf.grads() for leaf in self._late):
            raise ValueError("gradients of a batch came after an evaluation that has seen it as finished")
        self._late = []
        if self._flight is None or self._pass is None:
            return
        if closing and (not self._was_stepped() or self._is_known_to_fail()):
            self._keep_pending()
            return
        if self._raised and not self._stepped:  # the loop is gone on with after an error: the body made no step
            self.drop_gradients()
        with deferred():  # or Ctrl-C would leave a step half taken
            rates = self._runtime.learning_rates() if self._rates is None else self._rates
            gradients = self._gradients()
            flight, self._flight = self._flight, None
            self._forget()  # the rows, before more is allocated
            later = self._runtime.exchange_rates(rates)  # the body may have set others for the next step
            try:
                self._pass.finish(flight, gradients)
            finally:
                self._runtime.exchange_rates(later)

    def _keep_pending(self) -> None:
        """Let gradients that have come without a step count in the next one, as those of the dense side do."""
        assert self._flight is not None
        if self._stepped or self._reduction is not None or not self._has_gradients():
            return
        is_scaled = self._origin is not None and self._origin.has_scaled and not self._unscaled
        scaled = scaling.scaler_since(self._losses) if is_scaled else None
        optimizers = [] if self._without else self._waiting_optimizers()
        if not optimizers and (self._any_steps or not self._shares_rows):
            return  # `zero_grad` has been called; or a body without an optimizer has raised
        uses, more = [rows.uses for rows in self._rows], None
        if self._first is not None and self._first.counts:
            more = self._first.places(self._inverses)
        left = gradients_left(self._flight, self._leaves, uses, more)
        self._runtime.keep_pending(Pending(
            left, optimizers, self._runtime.apply_pending, scaled[0] if scaled is not None else None
        ))  # fmt: skip

    def _gradients(self) -> Gradients:
        """Return what the flight's step has come to."""
        nothing = [[None] * len(group) for group in self._leaves]
        guarded = next((rows.guarded for rows in reversed(self._rows) if rows.guarded is not None), None)
        if not self._has_gradients():
            return Gradients(nothing, check=None if guarded is None else guarded[1])
        if not self._require_step():
            return Gradients(nothing)
        if self._reduction is not None and self._runtime.ranks is not None:
            return self._parts(self._reduction, guarded)
        grads = [[leaf.take_grad() for leaf in group] for group in self._leaves]
        if guarded is None:
            come = [(grad, leaf.table) for taken, group in zip(grads, self._leaves, strict=True)
                    for grad, leaf in zip(taken, group, strict=True) if grad is not None]  # fmt: skip
            found, tables = zip(*come, strict=True)
            self._finite.check(found, tables, self._losses_seen)
            assert self._flight is not None
            guarded = self._finite.stop, self._outcome(self._flight)
        return Gradients(grads, *guarded)

    def _parts(self, reduction: Reduction, guarded: Any) -> Gradients:
        """Return what this rank's micro-batches have come to, for the owners of the rows."""
        parts = iter(reduction.parts)
        if guarded is None:
            assert self._flight is not None
            guarded = self._finite.stop, self._outcome(self._flight)
        return Gradients(
            (), guarded[0], guarded[1], [[next(parts) for _ in group] for group in self._leaves], reduction.count,
            reduction.in_two,
        )  # fmt: skip

    def _has_gradients(self) -> bool:
        """Tell whether gradients of the flight's rows have come, to whatever rank."""
        if self._reduction is not None and self._reduction.has_rows:
            return True
        return any(leaf.grads() for group in self._leaves for leaf in group)

    def _outcome(self, flight: Flight) -> Outcome:
        """Return what tells the host whether the gradients were finite."""
        step, names = flight.position, ", ".join(repr(leaf.table.name) for group in self._leaves for leaf in group)

        def read(results: list[Any]) -> None:
            stop, not_finite, loss = results[0]
            if not stop:
                return
            if not_finite:
                what = f"a gradient of the rows of {names} is not finite"
            elif loss:
                what = "a loss is not finite"
            else:
                what = f"a gradient of the rows of {names} is too large for its optimizer"
            raise NonFiniteError(
                f"step {step}: {what}; no row was updated. Look at the loss before backward(), or use a smaller "
                "learning rate", step,
            )  # fmt: skip

        return Outcome([self._finite.now()], read, self._runtime.staging, flight.memory)

    def _require_step(self) -> bool:
        """Tell whether the gradients are to be applied; ValueError where the dense side and the tables would part."""
        assert self._flight is not None
        if self._stepped and self._stepped <= self._early:
            raise ValueError(_EARLY)
        scaled = scaling.scaler_since(self._losses) if self.is_scaled() else None
        if scaled is not None:
            scaler, _ = scaled
            for found in self.unscale(scaler).values():  # no optimizer's check has come by: nobody else would tell it
                self.overflowed(found)
                if found.item():
                    scaling.report(scaler, self, self._runtime.device)
            if self._overflow is not None and self._overflow.item():
                return False
        if self._stepped:
            if self._without:
                raise ValueError(_ACCUMULATE.format(self._without))
            self._any_steps = True
        elif self._any_steps:
            raise ValueError(_ACCUMULATE.format(1))
        else:
            self._without += 1
        return True

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `scaling.Watcher`. Raises ValueError for rates that cannot be, before the dense side has stepped."""
        if self._flight is not None and not self._stepped:
            self._rates = self._runtime.learning_rates()
            if self._first is not None and not self._micros and self._first.pending.waits_for(optimizer):
                self._first.came(self._leaves, self._inverses)  # it steps, though no gradients of the batch have come

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """See `scaling.Watcher`."""
        if self._flight is not None:
            (self._early if self._micros else self._stepped).add(id(optimizer))
            self._optimizers.add(optimizer)
        if getattr(optimizer, "found_inf", None) is self._finite.stop:
            del optimizer.found_inf  # type: ignore[attr-defined]  # of this step, by `Rows.guard`

    def gradients_version(self) -> int | None:
        """See `scaling.Watcher`."""
        if self._flight is None:
            return None
        return sum(1 + grad._version + id(grad) for group in self._leaves for leaf in group for grad in leaf.grads())

    def backward(self, losses: Sequence[Tensor], version: int | None) -> None:
        """See `scaling.Watcher`."""
        if version is None or version == self.gradients_version():
            return
        if not version and self._reduction is None:  # gradients of before have been given up, and not added up
            self._losses_seen.clear()
        if self._origin is None or not self._origin.has_scaled:  # an overflow of those is the scaler's business
            self._losses_seen += [(loss - loss).float().to(self._finite.stop.device) for loss in losses]

    def scaled(self, losses: Any) -> None:
        """See `scaling.Watcher`."""
        if self._origin is None:
            leaves = [leaf for group in self._leaves for leaf in group]
            self._origin = scaling.Origin(plain=any(leaf.grads() for leaf in leaves))
            for leaf in leaves:
                if leaf.trained:
                    self._origin.watch(leaf.rows)
        self._origin.expect(losses)

    def is_scaled(self) -> bool:
        """See `scaling.Watcher`."""
        return self._origin is not None and self._origin.is_scaled()

    def unscale(self, scaler: Any) -> dict[torch.device, Tensor]:
        """See `scaling.Watcher`."""
        if self._unscaled or not self.is_scaled():
            return {}
        scaled = scaling.scaler_since(self._losses)
        if scaled is None or scaled[0] is not scaler:
            return {}
        if self._runtime.ranks is not None:
            raise ValueError(_SCALED)
        grads = [grad for group in self._leaves for leaf in group for grad in leaf.grads()]
        if not grads:
            return {}
        self._unscaled = True
        found = _scalar(0.0, self._runtime.device)
        factor = _scalar(scaling.inverse(scaled[1]), self._runtime.device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
        return {self._runtime.device: found}

    def overflowed(self, found: Tensor) -> None:
        """See `scaling.Watcher`."""
        self._overflow = found if self._overflow is None else self._overflow + found.to(self._overflow.device)

    def clips_rows(self, gradients: Sequence[Tensor]) -> bool | None:
        """See `scaling.Watcher`."""
        given = {id(gradient) for gradient in gradients}
        own = [gradient for group in self._leaves for leaf in group for gradient in leaf.grads()]
        return any(id(gradient) in given for gradient in own) if own else None


trained: WeakKeyDictionary[Any, ReferenceType[TrainLoop]] = WeakKeyDictionary()  # tables, by loops that are open


def trained_by(table: Any) -> TrainLoop | None:
    """Return the open loop, of any runtime, that trains a table."""
    loop = trained.get(table)
    return None if loop is None else loop()


def _came(loop: ReferenceType[TrainLoop], _: Tensor) -> None:
    if (held := loop()) is not None:
        held.gradients_came()


def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


_ACCUMULATE = (
    "gradients of {} batches have come without a step of an optimizer, and those of others with one. To let the "
    "gradients of N batches add up before a step, say runtime.train(..., accumulate=N), so that those of the rows add "
    "up, too; to skip a batch, do not call backward(), or let the gradients of rows.parameters() be None"
)
_SCALED = (
    "a loss was scaled, and the gradients of its rows go to other ranks, which would have to know of an overflow here; "
    "leave GradScaler out with ranks: bfloat16 needs none"
)
_EARLY = (
    "an optimizer has taken a step with each of the batches that are to add up; call optimizer.step() and "
    "zero_grad() where rows.is_due"
)
