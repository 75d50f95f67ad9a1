"""A step's micro-batches at once, for who takes them in an order of his own, as stages do."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hostdev.core.micro_batches import Node
from hostdev.distributed.dense import Grads
from hostdev.runtime.reduction import Reduction
from hostdev.runtime.rows import Rows


class Step:
    """The micro-batches of a step that this rank computes, or a part of which.

    number  in the trace
    sizes   samples of each; some may have none
    """

    def __init__(
        self, number: int, sizes: Sequence[int], following: Callable[[], tuple[Any, Rows]],
        reduction: Reduction | None,
    ) -> None:  # fmt: skip
        self.number, self.sizes = number, list(sizes)
        self._following, self._reduction = following, reduction
        self._made: list[tuple[Any, Rows]] = []

    def micro_batch(self, number: int) -> tuple[Any, Rows]:
        """Return one with its rows, which take memory on the device from now on.

        Where the network begins on another rank the rows are there, and none are here.
        """
        while len(self._made) <= number:
            self._made.append(self._following())
        return self._made[number]

    @property
    def last(self) -> Rows:
        """The last one's rows, by which an optimizer is guarded."""
        return self.micro_batch(len(self.sizes) - 1)[1]

    def came(self, number: int) -> None:
        """Take the gradients of the rows, after a micro-batch's `backward`; in any order of those that have samples."""
        assert self._reduction is not None
        self._reduction.rows_came(number)
        self._made[number][1].let_go()

    def reduce(
        self, parameters: Sequence[Tensor], nodes: Sequence[Node[Grads]], values: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Give all ranks the sums over all micro-batches of the step; see `Rows.reduce`.

        parameters  of the dense side that this rank has
        nodes       what the micro-batches here have come to for these
        values      of each micro-batch here, or None where another rank has them
        """
        assert self._reduction is not None
        self.last.reduced = True
        return self._reduction.add_step(parameters, nodes, values)
