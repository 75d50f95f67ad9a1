"""Which dense optimizers step with the batches of a loop: these decide when the tables are updated."""

from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType, WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer

from hostdev.runtime.table_optimizer import TableOptimizer
from hostdev.runtime.waiting import leaves_of, optimizers_of


class DenseSteps:
    """The steps of optimizers, in the loop so far and with its batch.

    Attributes:
        any: Whether one has stepped in the loop.
        without: Batches with gradients and without such a step.
        stepped: Those that stepped with the batch, since its last micro-batch was yielded.
    """

    def __init__(self) -> None:
        self.any, self.without = False, 0
        self._optimizers: WeakSet[Optimizer] = WeakSet()  # that have stepped in the loop
        self.begin_batch()

    def begin_batch(self) -> None:
        """Begin with a batch."""
        self.stepped: set[int] = set()
        self._early: set[int] = set()  # those that stepped before its last micro-batch
        self._parameters: list[ReferenceType[Tensor]] = []  # of the dense side, to which the batch's losses lead
        self._awaits: bool | None = None  # None: unknown

    def note(self, optimizer: Optimizer, *, early: bool) -> None:
        """Note that an optimizer has stepped with the batch."""
        (self._early if early else self.stepped).add(id(optimizer))
        if not isinstance(optimizer, TableOptimizer):
            self._optimizers.add(optimizer)

    def expect_backward(self, roots: Iterable[Any], rows: set[int]) -> None:
        """Note the parameters that get gradients from these tensors; `rows` has the identities of the rows."""
        self._parameters += [ref(leaf) for leaf in leaves_of(roots) if id(leaf) not in rows]

    def forget_awaited(self) -> None:
        """Search again for an optimizer that has still to step: gradients have arrived."""
        self._awaits = None

    def awaits(self) -> bool:
        """Return whether a dense optimizer has still to step with the batch."""
        if self.without:
            return False
        if self._awaits is None:
            self._awaits = bool(self.find_waiting())
        return self._awaits

    def find_waiting(self) -> list[Optimizer]:
        """Return the dense optimizers that have gradients of the batch, before any has stepped."""
        if self.any:
            return list(self._optimizers)
        return optimizers_of([found for held in self._parameters if (found := held()) is not None])

    def require_on_time(self) -> None:
        """Raise ValueError where an optimizer has stepped before the last of the batches that are summed."""
        if self.stepped and self.stepped <= self._early:
            raise ValueError(
                "an optimizer has stepped with each of the batches whose gradients are summed; call optimizer.step() "
                "and zero_grad() only where rows.is_due"
            )

    def count_step(self) -> None:
        """Count the batch; ValueError where some batches of the loop have a dense step and some have none."""
        missing = self.without if self.stepped else int(self.any)
        if missing:
            raise ValueError(
                f"gradients of {missing} batches came without an optimizer's step, and those of others with one. To "
                "sum the gradients of N batches before a step, use runtime.train(..., accumulate=N), which sums those "
                "of the rows, too; to skip a batch, do not call backward(), or set the gradients of rows.parameters() "
                "to None"
            )
        if self.stepped:
            self.any = True
        else:
            self.without += 1
