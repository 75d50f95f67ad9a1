"""Whether a step's gradients of rows may reach the tables: finite, and no larger than their optimizers take."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hostdev.kernels.finite import largest


def flag_gradients(tables: Sequence[Any], grads: Sequence[Tensor], flag: Tensor) -> Tensor:
    """Set a flag to 1 where a gradient may not reach its table; nobody waits for the device.

    tables   of each gradient its table
    grads    float32 [U, D], on the flag's device
    flag     float32 [], changed in place; 1 and no other number, as torch's optimizers compare it with that
    returns  float32 [1], 1 where a gradient is finite, and above what the optimizer of its table takes
    """
    too_large = torch.zeros(1, device=flag.device)
    for table, grad in zip(tables, grads, strict=True):
        limit = table.optimizer.largest_gradient
        if not grad.numel():
            continue
        if grad.device.type == "cpu" and grad.dtype == torch.float32:
            most = largest(grad.detach().contiguous().numpy())
            if most > limit:
                flag.fill_(1)
                too_large.fill_(float(math.isfinite(most)))
            continue
        low, high = torch.aminmax(grad.detach())  # both NaN where one is
        is_finite = low.isfinite() & high.isfinite()
        wrong = ~(is_finite & (low >= -limit) & (high <= limit))
        flag.copy_(torch.maximum(flag, wrong.to(flag.dtype)))
        too_large.copy_(torch.maximum(too_large, (wrong & is_finite).to(flag.dtype)))
    return too_large
