"""The sparse optimizers' device twins: the same operations in the same order, each rounded once.

On the CPU the host's kernels work on the tensor's memory (torch's own square root is not correctly rounded there).
On an accelerator every operation is a torch op of its own, so no compiler fuses a multiplication with an addition,
and divisors are tensors, as torch turns a division by a number into a multiplication by its reciprocal. FTRL with
another power than -0.5 takes it in float64 and rounds: host and device differ only where their pow does, near a tie.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hostdev.kernels.adagrad import LANES
from hostdev.kernels.apply import apply_rows


def update_rows(
    primitive: str,
    block: Tensor,
    row_slots: Tensor,
    ids: Tensor,
    grads: Tensor,
    scalars: tuple[Any, ...],
    positions: Tensor | None = None,
) -> None:
    """Take one optimizer step on unique rows, in place; arguments as for `kernels.apply.apply_rows`, as tensors."""
    if block.device.type == "cpu":
        where = None if positions is None else positions.numpy()
        apply_rows(primitive, block.numpy(), row_slots.numpy(), ids.numpy(), grads.numpy(), scalars, where)
    else:
        if positions is not None:
            grads = grads.index_select(0, positions)
        update_with_torch(primitive, block, row_slots, ids, grads, scalars)


def update_with_torch(
    primitive: str, block: Tensor, row_slots: Tensor, ids: Tensor, grads: Tensor, scalars: tuple[Any, ...]
) -> None:
    """Do `update_rows` in torch operations, as on an accelerator."""
    ids = ids.long()  # index_copy_ takes no int32
    rows, per_row = block.index_select(0, ids), row_slots.index_select(0, ids)  # [U, 1 + S, D], [U, R]
    _TWINS[primitive](rows, per_row, grads, *scalars)
    block.index_copy_(0, ids, rows)
    row_slots.index_copy_(0, ids, per_row)


def _lazy_adam(
    rows: Tensor,
    per_row: Tensor,
    g: Tensor,
    lr_t: Any,
    beta1: Any,
    rest1: Any,
    beta2: Any,
    rest2: Any,
    eps: Any,
    nesterov: bool,
) -> None:
    w, m, v = rows.unbind(1)
    m.copy_(m * float(beta1) + g * float(rest1))
    v.copy_(v * float(beta2) + (g * g) * float(rest2))
    numerator = m * float(beta1) + g * float(rest1) if nesterov else m
    w.sub_((numerator * float(lr_t)) / (v.sqrt() + float(eps)))


def _ftrl(rows: Tensor, per_row: Tensor, g: Tensor, lr: Any, l1: Any, two_l2: Any, exponent: float) -> None:
    w, n, z = rows.unbind(1)
    lr_tensor = torch.full((), float(lr), device=rows.device)
    n1 = n + g * g
    root, old_root = _power(n1, exponent), _power(n, exponent)
    sigma = (root - old_root) / lr_tensor
    z.add_(g - sigma * w)
    n.copy_(n1)
    sign_l1 = torch.where(z > 0, float(l1), -float(l1))
    new_w = (sign_l1 - z) / (root / lr_tensor + float(two_l2))
    w.copy_(torch.where(z.abs() <= float(l1), 0.0, new_w))  # NaN stays visible


def _power(x: Tensor, exponent: float) -> Tensor:
    return x.sqrt() if exponent == 0.5 else x.double().pow(exponent).float()


def _sgd(rows: Tensor, per_row: Tensor, g: Tensor, lr: Any) -> None:
    rows[:, 0].sub_(g * float(lr))


def _adagrad(rows: Tensor, per_row: Tensor, g: Tensor, lr: Any, eps: Any) -> None:
    w, accum = rows.unbind(1)
    accum.add_(g * g)
    w.sub_((g * float(lr)) / (accum.sqrt() + float(eps)))


def _row_wise_adagrad(rows: Tensor, per_row: Tensor, g: Tensor, lr: Any, eps: Any, columns: Any) -> None:
    squares = torch.nn.functional.pad(g * g, (0, -g.shape[1] % LANES)).view(len(g), -1, LANES)
    lanes = squares[:, 0] + 0.0
    for part in range(1, squares.shape[1]):
        lanes.add_(squares[:, part])
    total = lanes[:, 0] + 0.0
    for lane in range(1, LANES):
        total.add_(lanes[:, lane])
    accum = per_row[:, 0]
    accum.add_(total / torch.full((), float(columns), device=g.device))
    rows[:, 0].sub_((g * float(lr)) / (accum.sqrt() + float(eps)).unsqueeze(1))


_TWINS: dict[str, Callable[..., None]] = {
    "FusedSparseAdagrad": _adagrad,
    "FusedSparseFtrl": _ftrl,
    "FusedSparseLazyAdam": _lazy_adam,
    "FusedSparseRowWiseAdagrad": _row_wise_adagrad,
    "FusedSparseSGD": _sgd,
}
