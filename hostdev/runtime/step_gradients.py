"""Passes a step's gradients from a loop's body to the pipeline's updates."""

from typing import Any

from hostdev.device.staging import Staging
from hostdev.pipeline.outcome import Outcome
from hostdev.pipeline.results import Gradients, StepBatch
from hostdev.runtime.body_batch import BodyBatch
from hostdev.runtime.finite import Flags, NonFiniteError
from hostdev.runtime.watcher import TrainWatcher


def make_gradients(batch: BodyBatch, watcher: TrainWatcher, flags: Flags, staging: Staging, owner: object) -> Gradients:
    """Return the step's gradients, and remove them from the rows.

    Args:
        batch: The batch in the body.
        watcher: The loop's watcher.
        flags: The flags that stop a step whose gradients or loss are not finite.
        staging: Copies the flags to the host.
        owner: An object that stands for an optimizer: a scaler records an overflow under its `id`.

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
    watcher.steps.count_step()
    assert batch.flight is not None
    if batch.reduction is not None and batch.reduction.parts:
        guarded = guarded or (flags.stop, _make_outcome(batch, batch.flight, flags, staging))
        reduction, parts = batch.reduction, iter(batch.reduction.parts)
        chunks = [[next(parts) for _ in group] for group in batch.leaves]
        return Gradients((), *guarded, chunks, reduction.count, reduction.in_two)
    grads = [[leaf.take_grad() for leaf in group] for group in batch.leaves]
    if guarded is None:
        flat = zip([grad for group in grads for grad in group], batch.all_leaves, strict=True)
        found, tables = zip(*[(grad, leaf.table) for grad, leaf in flat if grad is not None], strict=True)
        flags.check(found, tables, batch.losses)
        guarded = flags.stop, _make_outcome(batch, batch.flight, flags, staging)
    return Gradients(grads, *guarded)


def _make_outcome(batch: BodyBatch, flight: StepBatch, flags: Flags, staging: Staging) -> Outcome:
    """Return the outcome that raises an error on the host if the flags stop the step."""
    step, names = flight.position, ", ".join(repr(leaf.table.name) for leaf in batch.all_leaves)

    def read(results: list[Any]) -> None:
        stop, not_finite, loss = results[0]
        if not stop:
            return
        if not_finite:
            what = f"a gradient of the rows of {names} is not finite"
        elif loss:
            what = "a loss is not finite"
        else:
            what = f"a gradient of the rows of {names} is too large for the table's optimizer"
        advice = "Look at the loss before backward(), or use a smaller learning rate"
        raise NonFiniteError(f"step {step}: {what}; no row was updated. {advice}", step)

    return Outcome([flags.now()], read, staging, flight.memory)
