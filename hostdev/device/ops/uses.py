"""The uses of a batch, as tensors, and what the ways without kernels of their own need to know of its bags."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class FeatureUses(NamedTuple):
    """One feature's uses of one table's rows; tensors on the device.

    inverse  int32 [N], which of the table's unique rows each use has
    offsets  int32 [B + 1], where each bag's uses begin; None: unpooled, a row for each use
    weights  float32 [N], by which the rows are multiplied; None for 1
    mean     a bag is divided by the number of its uses
    dtype    torch.float32 or torch.bfloat16, of what the model gets; rounded once, at the end
    """

    inverse: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    mean: bool
    dtype: torch.dtype = torch.float32


def bag_of_each(offsets: Tensor, uses: int) -> Tensor:
    """Return the bag of each use, int32 [N], from where each bag's begin, int32 [B + 1]."""
    places = torch.arange(uses, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets, places, right=True, out_int32=True) - 1


def sizes_of(offsets: Tensor) -> Tensor:
    """Return how many uses each bag has, float32 [B, 1], as a divisor: 1 for an empty one."""
    return (offsets[1:] - offsets[:-1]).clamp_(min=1).float().unsqueeze(1)


def end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """Return the features' tensors as one; that of a single feature is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
