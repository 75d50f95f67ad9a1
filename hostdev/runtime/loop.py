"""The loop that a user writes around a model: batches with their rows, and the gradients back to the tables."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hostdev.core.errors import UserError
from hostdev.core.signals import deferred
from hostdev.parallel.dense import DenseExchange
from hostdev.pipeline.flight import Flight, Gradients
from hostdev.pipeline.outcome import Outcome
from hostdev.runtime import scaling
from hostdev.runtime.batches import Loop, PredictLoop
from hostdev.runtime.finite import flag_gradients
from hostdev.runtime.reduction import Reduction
from hostdev.runtime.requests import Reader
from hostdev.runtime.rows import Leaf, Rows, flag_now


class NonFiniteError(UserError):
    """A gradient or a loss is not a number or infinite; the message says which, and that no row was updated.

    step  of the loop, from 1
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


__all__ = ["NonFiniteError", "PredictLoop", "TrainLoop"]


class TrainLoop(Loop):
    """Batches with their rows, whose gradients go to the tables; what `Runtime.train` returns.

    When the loop comes back for the next batch, the gradients that `backward` has brought are on their way to the
    tables behind its step; a batch without any is skipped, and changes nothing.
    """

    def __init__(
        self, runtime: Any, batches: Iterable[Any], reader: Reader, micro_batches: int = 0, *,
        reduce_early: bool = False, by_step: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(runtime, batches, reader, by_step=by_step)
        self._reduce_early = reduce_early
        self._micro_batches = micro_batches  # of a step; 0: what it has is not added in the order of a tree
        self.thread = threading.get_ident()
        self._flag = _scalar(0.0, runtime.device)  # not 0 from the first step on that is not finite
        self._one = _scalar(1.0, runtime.device)
        self._stepped: set[int] = set()  # optimizers, since the last batch of the flight was given out
        self._early: set[int] = set()  # those that took a step before
        self._any_steps = False  # of optimizers, in the loop so far
        self._rates: list[float] = []  # learning rates of the tables, for the flight
        self._without = 0  # flights with gradients and without such a step
        self._losses = 0  # that were scaled before the flight
        self._unscaled = False
        self._origin: scaling.Origin | None = None  # of the flight's gradients, where a loss was scaled
        self._overflow: Tensor | None = None  # found when the gradients were unscaled, float32 []
        self._dense = DenseExchange(
            runtime.dense_channel, micro_batches, runtime.dense_exchange, runtime.other_channels
        )
        self._late: list[Leaf] = []  # of a flight that was finished before the loop has come back

    def _open(self) -> Any:
        runtime = self._runtime
        runtime.begin_training(self)
        self._stack.callback(runtime.end_training)
        source = self._source()
        scaling.watch(self)
        return self._stack.enter_context(runtime.pipeline.train(self._reader.requests(source)))

    def __next__(self) -> Any:
        """Send the gradients of the batch before on their way, and return the next one with its rows."""
        self._require_thread()
        if self._runtime.predicting:
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

    def _flags(self) -> tuple[Tensor, Tensor] | None:
        return self._flag, self._one

    def _take(self, flight: Flight) -> None:
        super()._take(flight)
        if self._micro_batches > 1 or self._runtime.ranks is not None:
            leaves = [leaf for group in self._leaves for leaf in group]
            self._reduction = Reduction(
                leaves, self._micro_batches, (self._flag, self._one), self._runtime.ranks, self._dense, flight
            )  # fmt: skip
        self._stepped, self._early = set(), set()
        self._rates = self._runtime.learning_rates()
        self._losses = scaling.losses_scaled()
        self._unscaled, self._overflow, self._origin = False, None, None

    def _let_go(self) -> None:
        super()._let_go()
        self._late = []
        self._dense.close()
        scaling.forget(self)

    def _next_batch(self) -> tuple[Any, Rows]:
        if len(self._micros) == 1 and self._reduce_early:
            self._dense.expect_last()
        return super()._next_batch()

    def _require_thread(self) -> None:
        if threading.get_ident() != self.thread:
            raise ValueError(
                "one thread goes through a loop over `train`, and evaluates or writes back within it: its own"
            )

    def drop_gradients(self) -> None:
        """Forget the gradients of the current batch's rows."""
        for group in self._leaves:
            for leaf in group:
                leaf.drop_grad()
        if self._origin is not None:
            self._origin.forget()

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
        except BaseException as error:
            self._fail(error)
            raise

    def _was_stepped(self) -> bool:
        """Tell whether the body is done with the flight: an optimizer has taken its step, or the loop has none."""
        if self._reduction is not None and not (self._rows and self._rows[-1].reduced):
            return False
        return not self._micros and self._has_gradients() and (bool(self._stepped) or self._without > 0)

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
            return
        with deferred():  # or Ctrl-C would leave a step half taken
            gradients = self._gradients()
            flight, self._flight = self._flight, None
            self._forget()  # the rows, before more is allocated
            later = self._runtime.exchange_rates(self._rates)  # the body may have set others for the next step
            try:
                self._pass.finish(flight, gradients)
            finally:
                self._runtime.exchange_rates(later)

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
            come = [
                (leaf.table, grad)
                for leaves, group in zip(self._leaves, grads, strict=True)
                for leaf, grad in zip(leaves, group, strict=True) if grad is not None
            ]  # fmt: skip
            too_large = flag_gradients([table for table, _ in come], [grad for _, grad in come], self._flag)
            assert self._flight is not None
            guarded = self._flag, self._outcome(self._flight, too_large)
        return Gradients(grads, *guarded)

    def _parts(self, reduction: Reduction, guarded: Any) -> Gradients:
        """Return what this rank's micro-batches have come to, for the owners of the rows."""
        parts = iter(reduction.parts)
        if guarded is None:
            assert self._flight is not None
            guarded = self._flag, self._outcome(self._flight)
        return Gradients(
            (), guarded[0], guarded[1], [[next(parts) for _ in group] for group in self._leaves], reduction.count,
            reduction.in_two,
        )  # fmt: skip

    def _has_gradients(self) -> bool:
        """Tell whether gradients of the flight's rows have come, to whatever rank."""
        if self._reduction is not None and self._reduction.has_rows:
            return True
        return any(leaf.grads() for group in self._leaves for leaf in group)

    def _outcome(self, flight: Flight, too_large: Tensor | None = None) -> Outcome:
        """Return what tells the host whether the gradients were finite."""
        step, names = flight.position, ", ".join(repr(leaf.table.name) for group in self._leaves for leaf in group)

        def read(results: list[Any]) -> None:
            if results[0][0]:
                what = "is too large for its optimizer" if len(results) > 1 and results[1][0] else "is not finite"
                raise NonFiniteError(
                    f"step {step}: a gradient of the rows of {names} {what}; no row was updated. Look at the "
                    "loss before backward(), or use a smaller learning rate", step,
                )  # fmt: skip

        shown = [flag_now(self._flag)] if too_large is None else [flag_now(self._flag), too_large]
        return Outcome(shown, read, self._runtime.staging, flight.memory)

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

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """See `scaling.Watcher`."""
        if self._flight is not None:
            first = not self._stepped
            (self._early if self._micros else self._stepped).add(id(optimizer))
            if first:
                self._rates = self._runtime.learning_rates()
        if getattr(optimizer, "found_inf", None) is self._flag:
            del optimizer.found_inf  # type: ignore[attr-defined]  # of this step, by `Rows.guard`

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

    def leaves_out_rows(self, parameters: Sequence[Tensor]) -> bool:
        """See `scaling.Watcher`."""
        given = {id(parameter) for parameter in parameters}
        leaves = [leaf for group in self._leaves for leaf in group if leaf.grads()]
        return bool(leaves) and not any(leaf.is_among(given) for leaf in leaves)


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
