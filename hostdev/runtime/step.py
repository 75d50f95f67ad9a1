"""All micro-batches of a step, for callers that compute them in an order of their own, such as pipeline stages."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hostdev.core.micro_batches import Node
from hostdev.distributed.dense import Grads
from hostdev.runtime.reduction import RankReduction
from hostdev.runtime.rows import Rows

MicroBatchRows = tuple[Any, Rows]  # a batch, or the result of `send`, with its rows


class Step:
    """The micro-batches of a step that this rank computes, fully or in part.

    Args:
        number: The step's number in the timeline.
        sizes: Number of samples in each micro-batch, 0 or more.
        following: Called for each micro-batch; returns the next one with its rows.
        reduction: Sums the micro-batches' gradients; None in a loop that takes no steps.
    """

    def __init__(
        self,
        number: int,
        sizes: Sequence[int],
        following: Callable[[], MicroBatchRows],
        reduction: RankReduction | None,
    ) -> None:
        self.number, self.sizes = number, list(sizes)
        self._following, self._reduction = following, reduction
        self._made: list[MicroBatchRows] = []

    def micro_batch(self, number: int) -> MicroBatchRows:
        """Return a micro-batch with its rows, which take device memory from the first call on.

        If the network's first part is on another rank, only that rank has the rows.
        """
        while len(self._made) <= number:
            self._made.append(self._following())
        return self._made[number]

    @property
    def last(self) -> Rows:
        """The last micro-batch's rows; their `guard` covers the whole step."""
        return self.micro_batch(len(self.sizes) - 1)[1]

    def came(self, number: int) -> None:
        """Take the gradients that the rows got from the `backward` of micro-batch `number`.

        Call this method for each micro-batch that has samples, in any order.
        """
        assert self._reduction is not None
        self._reduction.rows_came(number)
        self._made[number][1].let_go()

    def reduce(
        self, parameters: Sequence[Tensor], nodes: Sequence[Node[Grads]], values: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Sum the gradients of all micro-batches of the step, on all ranks; see `Rows.reduce`.

        Args:
            parameters: The dense parameters that this rank has.
            nodes: The sums of the parameters' gradients over this rank's micro-batches, as nodes of the summation tree.
            values: The values of each micro-batch of this rank, or None if another rank has them.
        """
        assert self._reduction is not None
        self.last.reduced = True
        return self._reduction.add_step(parameters, nodes, values)
