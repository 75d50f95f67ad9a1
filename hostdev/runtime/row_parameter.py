"""The unique rows of a batch as a parameter with a gradient."""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hostdev.device.staging import PinnedBuffer, Staging
from hostdev.runtime.features import Table


class RowOrder:
    """The position of each id's row, if a cache or other ranks reorder the rows; sent to the device at first use.

    Args:
        places: int32 [U], the position of each id's row.
        staging: Sends the positions to the device.
        memory: The batch's host memory, from which the positions are sent.
    """

    def __init__(self, places: npt.NDArray[np.int32], staging: Staging, memory: PinnedBuffer) -> None:
        self._places, self._staging, self._memory = places, staging, memory
        self._there: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """The positions on the device, int64 [U]."""
        if self._there is None:
            [there], mark = self._staging.send([torch.from_numpy(self._places)], self._memory)
            self._staging.await_sent([mark], [there])
            self._there = there.long()
        return self._there

    def in_ids(self, values: Tensor) -> Tensor:
        """Reorder values [U, ...] from the order of the rows to the order of the ids."""
        return values.index_select(0, self.places)

    def in_rows(self, values: Tensor) -> Tensor:
        """Reorder values [U, ...] from the order of the ids to the order of the rows."""
        out = torch.empty_like(values)
        out[self.places] = values  # an assignment, since a sum would lose the sign of a zero
        return out


class RowParameter:
    """A batch's unique rows of one table, float32 [U, D] on the device, and their gradient.

    A cache or other ranks may reorder the rows. Sums over rows, such as a norm, must still follow the order of the ids:
    `parameter` has the gradient in that order, and `take_grad` returns it in the order of the rows.

    Args:
        table: The table.
        values: The rows, float32 [U, D], in the pipeline's order.
        order: The positions of the ids' rows; None if the rows are in the order of the ids.
        trained: Whether the rows get a gradient.
    """

    def __init__(self, table: Table, values: Tensor, order: RowOrder | None, *, trained: bool) -> None:
        self.table, self._order = table, order
        self.rows = values.requires_grad_() if trained else values
        self._parameter: Tensor | None = None  # in the order of the ids, once requested

    @property
    def trained(self) -> bool:
        """Whether the rows get a gradient."""
        return self.rows.requires_grad

    def grads(self) -> list[Tensor]:
        """Return a list with the gradient, or an empty list if there is none.

        The gradient is in the order of the ids once `parameter` was called, and before that in the order of the rows.
        """
        held = self.rows if self._parameter is None else self._parameter
        return [] if held.grad is None else [held.grad]

    def take_grad(self) -> Tensor | None:
        """Remove the gradient, and return it, float32 [U, D] in the order of the rows; None if there is none."""
        held = self.rows if self._parameter is None else self._parameter
        grad, held.grad = held.grad, None
        if grad is None:
            return None
        grad = grad.detach().contiguous()  # the program may have assigned any tensor of this shape
        return grad if self._order is None or self._parameter is None else self._order.in_rows(grad)

    def drop_grad(self) -> None:
        """Forget the gradient."""
        self.rows.grad = None
        if self._parameter is not None:
            self._parameter.grad = None

    def parameter(self) -> Tensor:
        """Return a tensor whose `grad` is the gradient in the order of the ids.

        The program may change this gradient in place or replace it, and later backward passes add to it.
        """
        if self._order is None:
            return self.rows
        if self._parameter is None:
            self._parameter = self._order.in_ids(self.rows.detach()).requires_grad_()
            forward_grad = partial(_forward_grad, self._parameter, self._order)
            self.rows.register_post_accumulate_grad_hook(forward_grad)  # type: ignore[no-untyped-call]
            if self.rows.grad is not None:
                forward_grad(self.rows)
        return self._parameter

    def in_ids(self) -> Tensor:
        """Return the rows in the order of the ids, as a differentiable tensor."""
        if self._order is None:
            return self.rows
        out: Tensor = _InOrderOfIds.apply(self.rows, self._order)  # type: ignore[no-untyped-call]
        return out

    def select(self, places: Tensor) -> Tensor:
        """Return the rows at `places`, int64 [P] without duplicates, as a differentiable tensor."""
        out: Tensor = _Select.apply(self.rows, places)  # type: ignore[no-untyped-call]
        return out

    def reordered(self, values: Tensor) -> Tensor:
        """Reorder values [U] from the order of the rows to the order of the ids."""
        return values if self._order is None else self._order.in_ids(values)


def _forward_grad(parameter: Tensor, order: RowOrder, rows: Tensor) -> None:
    """Add the rows' gradient to that of `parameter`, whose rows are in the order of the ids, and clear it in `rows`."""
    if rows.grad is None:  # the backward pass gave gradients only to other tables
        return
    grad, rows.grad = order.in_ids(rows.grad), None
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class _InOrderOfIds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return order.in_ids(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.order.in_rows(grads[0]), None


class _Select(torch.autograd.Function):
    """Selects rows; like `device.rows.pull`, it allows a second backward pass over the same graph."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.places, ctx.size = places, len(rows)
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].new_zeros(ctx.size, grads[0].shape[1])
        return out.index_copy_(0, ctx.places, grads[0]), None
