"""Records which dense optimizers step with a loop's batches, since this decides when the tables are updated."""

from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType, WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer

from hostdev.runtime.table_optimizer import TableOptimizer
from hostdev.runtime.waiting import leaves_of, optimizers_of


class DenseSteps:
    """The record of a loop's optimizer steps, in total and for the current batch.

    Attributes:
        any: Whether an optimizer has stepped with an earlier batch of the loop.
        without: Number of the loop's batches that had gradients but no optimizer step.
        stepped: The `id` of each optimizer that stepped with the current batch after the last micro-batch was yielded.
    """

    def __init__(self) -> None:
        self.any, self.without = False, 0
        self._optimizers: WeakSet[Optimizer] = WeakSet()  # optimizers that have stepped in the loop
        self.begin_batch()

    def begin_batch(self) -> None:
        """Forget the steps of the previous batch."""
        self.stepped: set[int] = set()
        self._early: set[int] = set()  # as `stepped`, but before the last micro-batch was yielded
        self._parameters: list[ReferenceType[Tensor]] = []  # dense parameters that get gradients from the batch
        self._awaits: bool | None = None  # the result of `awaits`, if known

    def note(self, optimizer: Optimizer, *, early: bool) -> None:
        """Record an optimizer's step with the batch; `early`: whether the last micro-batch was not yet yielded."""
        (self._early if early else self.stepped).add(id(optimizer))
        if not isinstance(optimizer, TableOptimizer):
            self._optimizers.add(optimizer)

    def expect_backward(self, roots: Iterable[Any], rows: set[int]) -> None:
        """Record the dense parameters that get gradients from a `backward`.

        Args:
            roots: The tensors or graph edges on which `backward` is called.
            rows: The `id` of each tensor of rows; these are not dense parameters.
        """
        self._parameters += [ref(leaf) for leaf in leaves_of(roots) if id(leaf) not in rows]

    def forget_awaited(self) -> None:
        """Make `awaits` search again, because the batch has new gradients."""
        self._awaits = None

    def awaits(self) -> bool:
        """Return whether a dense optimizer has yet to step with the batch."""
        if self.without:
            return False
        if self._awaits is None:
            self._awaits = bool(self.find_waiting())
        return self._awaits

    def find_waiting(self) -> list[Optimizer]:
        """Return the optimizers that have stepped in the loop; if none has, those whose parameters have gradients."""
        if self.any:
            return list(self._optimizers)
        return optimizers_of([found for held in self._parameters if (found := held()) is not None])

    def require_on_time(self) -> None:
        """Raise ValueError if all optimizers of the step also stepped before the last micro-batch was yielded."""
        if self.stepped and self.stepped <= self._early:
            raise ValueError(
                "an optimizer stepped too early, before the last of the batches whose gradients are summed for a step; "
                "call optimizer.step() and zero_grad() only if rows.is_due"
            )

    def count_step(self) -> None:
        """Count the batch; raise ValueError if only some batches of the loop have an optimizer step."""
        missing = self.without if self.stepped else int(self.any)
        if missing:
            batches = "1 batch" if missing == 1 else f"{missing} batches"
            raise ValueError(
                f"{batches} with gradients had no optimizer step, but other batches had one. To "
                "sum the gradients of N batches before a step, use runtime.train(..., accumulate=N), which also sums "
                "the rows' gradients; to skip a batch, do not call backward(), or set the gradients of "
                "rows.parameters() to None"
            )
        if self.stepped:
            self.any = True
        else:
            self.without += 1
