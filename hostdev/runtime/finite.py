"""Whether a step's gradients of rows may reach the tables: finite, and no larger than their optimizers take."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hostdev.kernels.finite import largest

TOO_LARGE = 1 << 12  # what is added to the flag for a gradient that is finite, and too large for its optimizer


def flag_gradients(tables: Sequence[Any], grads: Sequence[Tensor], flag: Tensor) -> None:
    """Add 1 to a flag for each gradient that is not finite, TOO_LARGE for others above the limit; nobody waits.

    tables  of each gradient its table
    grads   float32 [U, D], on the flag's device
    flag    float32 [], changed in place
    """
    for table, grad in zip(tables, grads, strict=True):
        limit = table.optimizer.largest_gradient
        if not grad.numel():
            continue
        if grad.device.type == "cpu" and grad.dtype == torch.float32:
            most = largest(grad.detach().contiguous().numpy())
            if most > limit:
                flag.add_(TOO_LARGE if math.isfinite(most) else 1)
            continue
        low, high = torch.aminmax(grad.detach())  # both NaN where one is
        flag.add_(~(low.isfinite() & high.isfinite()))
        flag.add_(TOO_LARGE * (torch.maximum(high, -low) > limit).logical_and_(low.isfinite() & high.isfinite()))
