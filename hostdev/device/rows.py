"""Unique rows to their uses in a batch, and the uses' gradients back to one per row."""

from typing import Any

import torch
from torch import Tensor

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
    # Deterministic algorithms are on: torch sorts the indices stably and adds by segment.
    zeros = torch.zeros((rows, grads.shape[1]), device=grads.device)
    return zeros.index_add_(0, inverse.long(), grads)
