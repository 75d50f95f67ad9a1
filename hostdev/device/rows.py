"""Unique rows to their uses in a batch, and the uses' gradients back to one per row."""

from typing import Any

import torch
from torch import Tensor

from hostdev.device.ops import ops_for


class Uses:
    """Which row each use of a batch has; what its sums need is found once for all tables.

    inverse   int32 or int64 [N] on the device, each in [0, rows), every row with a use
    rows      U
    in_order  they are numbered in order of first occurrence
    """

    def __init__(self, inverse: Tensor, rows: int, *, in_order: bool = True) -> None:
        self.inverse, self.rows = inverse, rows
        self._in_order = in_order
        self._sorted: Any = None

    def sum(self, grads: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return each row's sum of gradients float32 or bfloat16 [N, D] times weights [N]; see `Ops.sum_uses`."""
        ops = ops_for(grads.device)
        if self._sorted is None:
            self._sorted = ops.uses_of(self.inverse, self.rows, in_order=self._in_order)
        return ops.sum_uses(grads, self._sorted, weights, self.rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, uses: Uses, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.uses, ctx.weights = uses, weights
        return ops_for(rows.device).gather(rows, uses.inverse, weights, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.uses.sum(grads[0], ctx.weights), None, None, None


def gather_rows(rows: Tensor, uses: Uses, weights: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return each use's row times its weight, rounded to dtype; its gradient is summed per row, see `Ops.sum_uses`.

    rows     float32 [U, D]
    weights  float32 [N], to which no gradient goes; None for 1
    dtype    torch.float32 or torch.bfloat16
    returns  dtype [N, D]
    """
    out: Tensor = _Gather.apply(rows, uses, weights, dtype)  # type: ignore[no-untyped-call]
    return out
