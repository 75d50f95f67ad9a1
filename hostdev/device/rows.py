"""Unique rows to their uses in a batch, and the uses' gradients back to one per row."""

from typing import Any

import torch
from torch import Tensor

from hostdev.kernels.gather import gather_scaled, segment_sum_scaled
from hostdev.kernels.segment import segment_sum


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.rows = len(rows)
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        return sum_rows(grads[0], inverse, ctx.rows), None


def gather_rows(rows: Tensor, inverse: Tensor) -> Tensor:
    """Return each use's row: out[i] = rows[inverse[i]]; its gradient is summed per row in order of occurrence.

    rows     float32 [U, D]
    inverse  int32 or int64 [N], numbered in order of first occurrence
    returns  float32 [N, D]
    """
    out: Tensor = _GatherRows.apply(rows, inverse)  # type: ignore[no-untyped-call]
    return out


def sum_rows(grads: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """Return the sum of each row's gradients in order of occurrence.

    On CUDA the order is fixed, without atomics; for D = 1 and 32 or more uses of a row it is torch's and not that of
    occurrence. Host and device tables get the same sums, as both get them from here.

    grads    float32 [N, D]
    inverse  int32 or int64 [N], numbered in order of first occurrence
    returns  float32 [rows, D]
    """
    if grads.device.type == "cpu":
        out = torch.empty((rows, grads.shape[1]))
        segment_sum(grads.contiguous().numpy(), inverse.numpy(), out.numpy())
        return out
    # Unlike index_add_ it needs no deterministic mode: torch sorts the indices stably and adds by segment.
    zeros = torch.zeros((rows, grads.shape[1]), device=grads.device)
    return zeros.index_put_((inverse.long(),), grads, accumulate=True)


class _GatherScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(inverse, weights)
        ctx.rows = len(rows)
        if rows.device.type == "cpu":
            out = torch.empty((len(inverse), rows.shape[1]), dtype=dtype)
            gather_scaled(rows.detach().numpy(), inverse.numpy(), weights.numpy(), _bits(out))
            return out
        return (rows.index_select(0, inverse) * weights.unsqueeze(1)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        inverse, weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        if grad.device.type == "cpu":
            out = torch.empty((ctx.rows, grad.shape[1]))
            segment_sum_scaled(_bits(grad), inverse.numpy(), weights.numpy(), out.numpy())
        else:
            out = sum_rows(grad.float() * weights.unsqueeze(1), inverse, ctx.rows)
        return out, None, None, None


def _bits(tensor: Tensor) -> Any:
    """A tensor's memory for a kernel: float32, or bfloat16 as uint16, which numpy has."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.uint16).numpy()


def gather_scaled_rows(rows: Tensor, inverse: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each use's row times its weight, rounded to dtype; the gradient is summed per row in order of occurrence.

    rows     float32 [U, D]
    inverse  int32 [N], numbered in order of first occurrence
    weights  float32 [N], to which no gradient goes
    dtype    torch.float32 or torch.bfloat16
    returns  dtype [N, D]
    """
    out: Tensor = _GatherScaled.apply(rows, inverse, weights, dtype)  # type: ignore[no-untyped-call]
    return out
