"""A step's micro-batches together, for callers that choose the order of computation, as pipeline stages do."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hostdev.core.micro_batches import Node
from hostdev.distributed.dense import Grads
from hostdev.runtime.reduction import Reduction
from hostdev.runtime.rows import Rows

MicroBatchRows = tuple[Any, Rows]  # the result of `send`, of any type, with its rows


class Step:
    """The micro-batches of a step that this rank computes, fully or in part.

    Args:
        number: The step's number in the trace.
        sizes: Samples of each micro-batch; some may have none.
        following: Returns the next micro-batch with its rows.
        reduction: Sums the gradients; None in a loop that takes no steps.
    """

    def __init__(
        self,
        number: int,
        sizes: Sequence[int],
        following: Callable[[], MicroBatchRows],
        reduction: Reduction | None,
    ) -> None:
        self.number, self.sizes = number, list(sizes)
        self._following, self._reduction = following, reduction
        self._made: list[MicroBatchRows] = []

    def micro_batch(self, number: int) -> MicroBatchRows:
        """Return a micro-batch with its rows, which take device memory from now on.

        If the network begins on another rank, the rows are there, and this rank has none.
        """
        while len(self._made) <= number:
            self._made.append(self._following())
        return self._made[number]

    @property
    def last(self) -> Rows:
        """The last micro-batch's rows, which guard an optimizer."""
        return self.micro_batch(len(self.sizes) - 1)[1]

    def came(self, number: int) -> None:
        """Take the gradients of the rows after the `backward` of a micro-batch with samples, in any order."""
        assert self._reduction is not None
        self._reduction.rows_came(number)
        self._made[number][1].let_go()

    def reduce(
        self, parameters: Sequence[Tensor], nodes: Sequence[Node[Grads]], values: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Give all ranks the sums over all micro-batches of the step; see `Rows.reduce`.

        Args:
            parameters: The dense parameters that this rank has.
            nodes: Their gradients from this rank's micro-batches.
            values: The values of each micro-batch of this rank, or None if another rank has them.
        """
        assert self._reduction is not None
        self.last.reduced = True
        return self._reduction.add_step(parameters, nodes, values)
