"""Sums the gradients of rows and of dense parameters over a step's micro-batches, in the order of a tree.

Checks that gradients of rows are finite, and small enough for an optimizer's arithmetic to stay finite.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hostdev.core.errors import NonFiniteError as NonFiniteError
from hostdev.core.micro_batches import Node, TreeSum
from hostdev.distributed.channel import Channel
from hostdev.distributed.dense import DenseExchange, DenseGradients, Grads, add_lists, take_grads
from hostdev.distributed.process_group import Ranks
from hostdev.kernels.norm import largest_of_each
from hostdev.pipeline.results import StepBatch
from hostdev.runtime import placement
from hostdev.runtime.row_parameter import RowParameter


class Flags:
    """Flags on the device, each a float32 scalar: 0 until the flag is set, then more than 0.

    Attributes:
        stop: Set if a gradient or a loss is not finite, or a gradient of rows is too large; then no row may change.
        not_finite: Set if a gradient of rows is not finite.
        loss: Set if a loss is not finite.
    """

    def __init__(self, device: torch.device) -> None:
        self.stop, self.not_finite, self.loss = (
            torch.full((), 0.0, dtype=torch.float32, device=device) for _ in range(3)
        )

    def check(self, grads: Sequence[Tensor], tables: Sequence[Any], losses: Sequence[Tensor] = ()) -> None:
        """Set the flags by a check of gradients of rows and of losses, without a device sync.

        Args:
            grads: Each table's row gradients, float32 [U, D]; a value too large for the table's optimizer sets `stop`.
            tables: The table of each of `grads`.
            losses: For each loss on which `backward` was called, a float32 scalar: 0 if it is finite, else NaN.
        """
        if losses:
            torch._amp_foreach_non_finite_check_and_unscale_(list(losses), self.loss, _power(0, self.loss.device))
            self.check_others(losses)
        if self.stop.device.type == "cpu":
            found = largest_of_each([grad.detach().contiguous().numpy() for grad in grads])
            for most, table in zip(found, tables, strict=True):
                if most > table.optimizer.largest_gradient:
                    self.stop.fill_(1.0)
                    self.not_finite.fill_(float(math.isinf(most)) or self.not_finite.item())
            return
        by_scale: dict[int, list[Tensor]] = {}
        for grad, table in zip(grads, tables, strict=True):
            by_scale.setdefault(_scale(table), []).append(grad)
        for scale, some in by_scale.items():  # scaling by powers of 2 is exact unless it overflows
            up, down = (_power(power, self.stop.device) for power in (scale, -scale))
            torch._amp_foreach_non_finite_check_and_unscale_(some, self.not_finite, up)
            torch._amp_foreach_non_finite_check_and_unscale_(some, self.stop, down)

    def check_others(self, tensors: Sequence[Tensor]) -> None:
        """Set `stop` if a value in these tensors is not finite."""
        # GradScaler's check with a factor of 1: one pass, no device sync
        torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), self.stop, _power(0, self.stop.device))

    def now(self) -> Tensor:
        """Return a copy of all flags, float32 [3]: later steps may change the flags before the host reads the copy."""
        return torch.stack([self.stop, self.not_finite, self.loss])

    def set(self, values: Tensor) -> None:
        """Set all flags to `values`, float32 [3], in the order of `now`."""
        for flag, value in zip((self.stop, self.not_finite, self.loss), values, strict=True):
            flag.copy_(value)


def _scale(table: Any) -> int:
    """Return p such that a gradient too large for the table's optimizer overflows float32 if multiplied by 2**p."""
    return 128 - math.floor(math.log2(table.optimizer.largest_gradient))


@cache
def _power(power: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), 2.0**power, dtype=torch.float32, device=device)


class Reduction:
    """The sums of the gradients of a step's micro-batches, if this process computes all of them.

    Args:
        leaves: The unique rows of each table.
        count: Number of the step's micro-batches on this rank.
    """

    def __init__(self, leaves: Sequence[RowParameter], count: int) -> None:
        self._leaves, self.count = leaves, count
        self._rows: TreeSum[Grads] = TreeSum(add_lists)
        self._dense: TreeSum[Grads] = TreeSum(add_lists)
        self._next = 0  # number of the next micro-batch in the step
        self._parameters: list[Tensor] = []
        self._values: list[Tensor | None] = []
        self.in_two = False  # whether rows' gradients are sent in two parts, as all ranks know which rows go first
        self.parts: list[list[Tensor] | None] = []  # by leaf, gradients of this rank's nodes; None if no rank has any

    def has_sums(self, *, reduced: bool) -> bool:
        """Return whether the rows have the gradients of the whole step; with other ranks, always False.

        Args:
            reduced: Whether the last yielded micro-batch was reduced.
        """
        return reduced and self._next >= self.count

    def require_sums(self, *, reduced: bool) -> None:
        """Raise ValueError if this process does not have the step's summed gradients of the rows."""
        if not self.has_sums(reduced=reduced):
            raise ValueError(
                "rows.parameters() was called before the step's gradients were summed; call it after the last reduce() "
                "of the step"
            )

    @property
    def has_rows(self) -> bool:
        """Whether any table's rows have gradients on any rank; False if this process computes all micro-batches."""
        return any(part is not None for part in self.parts)

    def add(self, parameters: Iterable[Tensor], values: Tensor | None) -> Tensor | None:
        """See `Rows.reduce`."""
        given = list(parameters)
        if self._values and [id(one) for one in given] != [id(one) for one in self._parameters]:
            raise ValueError(
                "reduce() got different parameters for micro-batches of one step; pass the same parameters each time"
            )
        self._parameters = given
        if values is not None and values.ndim > 1:
            raise ValueError(f"the values given to reduce() must be of shape [] or [n], not {list(values.shape)}")
        self._values.append(None if values is None else values.detach().float())
        self._rows.put(Node(self._next, 1, take_grads([leaf.rows for leaf in self._leaves])))
        return self._add_dense(given)

    def _add_dense(self, given: Sequence[Tensor]) -> Tensor | None:
        """Add a micro-batch's gradients of the parameters; after the last one, set the sums and return all values."""
        self._dense.put(Node(self._next, 1, take_grads(given)))
        self._next += 1
        if self._next < self.count:
            return None
        # Ranks send zeros for missing gradients, which turn -0 into 0. Adding 0.0 gives the same bits in one process.
        for leaf, total in zip(self._leaves, self._rows.total() or (), strict=False):
            leaf.rows.grad = None if total is None else total.add_(0.0)
        for parameter, total in zip(given, self._dense.total() or (), strict=False):
            parameter.grad = None if total is None else total.add_(0.0)
        return _stacked(self._values)


class RankReduction(Reduction):
    """The sums of the gradients of a step's micro-batches, if each rank computes some of them.

    Args:
        leaves: The unique rows of each table.
        count: Number of the step's micro-batches on this rank.
        flags: The flags that stop a step whose gradients or loss are not finite.
        ranks: The ranks that have the other micro-batches.
        dense: Exchanges the gradients of parameters with other ranks.
        step_batch: The step's batch.
        losses: For each loss on which `backward` was called, a float32 scalar: 0 if the loss is finite, else NaN.
        steps: The channel to other ranks for small values of each step.
    """

    def __init__(
        self,
        leaves: Sequence[RowParameter],
        count: int,
        flags: Flags,
        ranks: Ranks,
        dense: DenseExchange,
        step_batch: StepBatch,
        losses: Sequence[Tensor],
        steps: Channel,
    ) -> None:
        super().__init__(leaves, count)
        self._step_batch, self._losses, self._steps = step_batch, losses, steps
        self._flags, self._ranks, self._exchange = flags, ranks, dense
        self._next = self._first = ranks.share()[0] * count
        self._rows_come: dict[int, Grads] = {}  # the rows' gradients by micro-batch, which may finish out of order

    def has_sums(self, *, reduced: bool) -> bool:
        """See `Reduction.has_sums`."""
        return False

    def require_sums(self, *, reduced: bool) -> None:
        """Raise ValueError, because no rank has the step's summed gradients of the rows."""
        raise ValueError(
            "each rank has only the gradients of its own rows, so no rank can compute the total norm: "
            "with ranks, clip only model.parameters()"
        )

    def rows_came(self, number: int) -> None:
        """See `Step.came`."""
        self._rows_come[number] = take_grads([leaf.rows for leaf in self._leaves])
        while self._next - self._first in self._rows_come:
            self._put_rows(self._rows_come.pop(self._next - self._first))

    def _put_rows(self, grads: Grads) -> None:
        self._rows.put(Node(self._next, 1, grads))
        self._next += 1

    def add_step(
        self, parameters: Sequence[Tensor], nodes: Sequence[Node[Grads]], values: Sequence[Tensor | None]
    ) -> Tensor | None:
        """See `Step.reduce`."""
        if self._ranks.leads:  # a micro-batch without samples adds nothing, but is counted
            for number in range(self._next - self._first, self.count):
                self._put_rows(self._rows_come.pop(number, [None] * len(self._leaves)))
        self._values = [None if value is None else value.detach().float() for value in values]
        dense = self._exchange.of(list(parameters))
        return self._exchanged(self._ranks, dense, dense.put_nodes(nodes))

    def _add_dense(self, given: Sequence[Tensor]) -> Tensor | None:
        """Take a micro-batch's gradients of the parameters; after the last one, sum over all ranks."""
        trained = [one for one in given if one.requires_grad]
        if self._exchange.is_of_all and self._exchange.is_new(trained):
            self._ranks.agree("parameters", "the first rows.reduce()", placement.get_parameters(trained))
        dense = self._exchange.of(trained)
        has_dense = dense.put()
        self._next += 1
        return None if has_dense is None else self._exchanged(self._ranks, dense, has_dense)

    def _exchanged(self, ranks: Ranks, dense: DenseGradients, has_dense: Sequence[bool]) -> Tensor | None:
        ranks.calls.begin("reduce", f"rows.reduce() of step {self._step_batch.position}")
        rows = self._rows.nodes
        has_rows = [
            any(node.value is not None and node.value[leaf] is not None for node in rows)
            for leaf in range(len(self._leaves))
        ]
        shape = next((value.shape for value in self._values if value is not None), None)
        size, single = (0, False) if shape is None else (shape.numel(), not shape)
        not_ready = self._step_batch.first is None
        same = self._exchange.is_of_all  # otherwise other ranks have other parameters
        given_dense: Sequence[int] = has_dense if same else self._exchange.reduce_flags(has_dense)
        marks = placement.make_marks([leaf.table for leaf in self._leaves], [not leaf.trained for leaf in self._leaves])
        telling = [*has_rows, *(has_dense if same else ()), size, single, not_ready, *ranks.contributed, *marks]
        telling.append(ranks.calls.last.number)
        told = _largest(self._steps, telling)
        ranks.calls.catch_up(told.pop())
        told, marks = told[: -placement.MARKS], told[-placement.MARKS :]
        placement.require_marks(marks, self._step_batch.position)
        given_rows, told = told[: len(has_rows)], told[len(has_rows) :]
        if same:
            given_dense, told = told[: len(has_dense)], told[len(has_dense) :]
        size, single, self.in_two, ranks.reduced = told[0], bool(told[1]), not told[2], told[3:]
        pairs = [pair for node in rows for pair in zip(node.value or (), self._leaves, strict=False)]
        found = [(part, leaf.table) for part, leaf in pairs if part is not None]
        flag = self._flags.stop
        if found:  # dense gradients are not checked here: one that is not finite shows in its sum
            parts, tables = zip(*found, strict=True)
            self._flags.check(parts, tables, self._losses)
        self.parts = [
            [_or_zeros(node.value, number, leaf.rows) for node in rows] if has else None
            for number, (leaf, has) in enumerate(zip(self._leaves, given_rows, strict=True))
        ]
        M = ranks.mesh.data * self.count
        all_values = torch.zeros((M, size), device=flag.device)
        for number, value in enumerate(self._values, self._first):
            if value is not None:
                all_values[number] = value.view(-1)
        if not same:  # ranks with other parameters do not have these sums
            dense.finish(given_dense)
            summed = [one.grad for one in dense.parameters if one.grad is not None]
            if summed:
                self._flags.check_others(summed)
        known = self._exchange.small(dense, torch.cat([all_values.view(-1), self._flags.now()])).to(flag.device)
        self._flags.set(known[-3:])
        if same:
            dense.finish(given_dense)
        shape = torch.Size([] if single else [size])
        return known[:-3].view(M, *shape) if size else None


def _largest(channel: Channel, telling: Sequence[int]) -> list[int]:
    """Return the maximum of each number over all ranks."""
    rows = np.repeat(np.array([telling], np.int64), channel.ranks, axis=0)
    found: list[int] = channel.exchange_counts(rows).max(0).tolist()
    return found


def _or_zeros(grads: Grads | None, number: int, like: Tensor) -> Tensor:
    found = None if grads is None else grads[number]
    return torch.zeros_like(like, requires_grad=False) if found is None else found


def _stacked(values: Sequence[Tensor | None]) -> Tensor | None:
    """Return the values of all micro-batches, with 0 for missing ones; None if all are missing."""
    given = next((value for value in values if value is not None), None)
    if given is None:
        return None
    return torch.stack([torch.zeros_like(given) if value is None else value for value in values])
