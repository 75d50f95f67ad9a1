"""The occurrences of a batch as tensors, and the sizes of its bags."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class FeatureUses(NamedTuple):
    """One feature's occurrences of one table's rows; tensors on the device.

    Attributes:
        inverse: int32 [N], the unique row of each occurrence.
        offsets: int32 [B + 1], the first occurrence of each bag; None if not pooled.
        weights: float32 [N], the weight of each occurrence; None for 1.
        mean: Whether to divide a bag's sum by its size.
        dtype: torch.float32 or torch.bfloat16, the dtype of the model's input, to which results are rounded once.
    """

    inverse: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    mean: bool
    dtype: torch.dtype = torch.float32


class Expansion(NamedTuple):
    """A feature's rows, which `Ops.pool` expands to bags or, if there are no offsets, `Ops.gather` to occurrences."""

    rows: Tensor
    inverse: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    mean: bool
    dtype: torch.dtype

    @property
    def samples(self) -> int:
        """B, the number of bags, or of occurrences if there are no bags."""
        return len(self.inverse) if self.offsets is None else len(self.offsets) - 1


def expand(one: Expansion, gather: Callable[..., Tensor], pool: Callable[..., Tensor]) -> Tensor:
    """Return the expanded rows of a feature, by `pool` if it has offsets, otherwise by `gather`."""
    rows, inverse, offsets, weights, mean, dtype = one
    if offsets is None:
        return gather(rows, inverse, weights, dtype)
    return pool(rows, inverse, offsets, weights, mean, dtype)


def get_bags(offsets: Tensor, uses: int) -> Tensor:
    """Return the index of each occurrence's bag, int32 [N], from offsets int32 [B + 1]; `uses` is N."""
    places = torch.arange(uses, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets, places, right=True, out_int32=True) - 1


def get_bag_sizes(offsets: Tensor) -> Tensor:
    """Return the size of each bag as a divisor, float32 [B, 1]: 1 for an empty bag."""
    return (offsets[1:] - offsets[:-1]).clamp_(min=1).float().unsqueeze(1)


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the features' tensors; a single tensor is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
