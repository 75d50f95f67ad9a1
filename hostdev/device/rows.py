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


class FeatureUses:
    """Temporary."""

    def __init__(self, inverse: Tensor, offsets: Tensor | None, weights: Tensor | None, mean: bool) -> None:
        self.inverse, self.offsets, self.weights, self.mean = inverse, offsets, weights, mean


class GroupUses:
    """Temporary."""

    def __init__(self, features: Any, rows: int, *, in_order: bool) -> None:
        self.features, self.rows = features, rows
        self._uses = [Uses(f.inverse, rows, in_order=in_order and len(features) == 1) for f in features]

    def counts(self) -> Tensor:
        """Temporary."""
        out = torch.zeros(self.rows, device=self.features[0].inverse.device)
        for f in self.features:
            out.index_put_((f.inverse.long(),), torch.ones(len(f.inverse), device=out.device), accumulate=True)
        return out


def pull(rows: Tensor, uses: GroupUses, dtypes: Any) -> tuple[Tensor, ...]:
    """Temporary."""
    out = []
    for f, u, d in zip(uses.features, uses._uses, dtypes):
        got = gather_rows(rows, u, f.weights, torch.float32 if f.offsets is not None else d)
        if f.offsets is not None:
            n = f.offsets.diff()
            bag = torch.repeat_interleave(torch.arange(len(n), device=n.device), n.long())
            got = torch.zeros(len(n), rows.shape[1], device=n.device).index_add(0, bag, got)
            if f.mean:
                got = got / n.clamp(min=1).unsqueeze(1)
            got = got.to(d)
        out.append(got)
    return tuple(out)
