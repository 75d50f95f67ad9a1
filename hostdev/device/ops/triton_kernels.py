"""Row operations on CUDA: the Triton kernels of `hostdev.device.triton`, and torch operations for the rest."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hostdev.device.ops import torch_operations
from hostdev.device.ops.catch_up import Clocks
from hostdev.device.ops.uses import Expansion, FeatureUses, concatenate, expand, get_bag_sizes, get_bags
from hostdev.device.triton import ops as fused
from hostdev.kernels.clock import Clock

lookup = fused.lookup
assemble = fused.assemble
gather = fused.gather_scaled
pool = fused.pool
clip_rows = torch_operations.clip_rows
round_rows = torch_operations.round_rows


def expand_many(features: Sequence[Expansion]) -> list[Tensor]:
    """See `host_kernels`."""
    return [expand(one, gather, pool) for one in features]


def stack(features: Sequence[Expansion]) -> Tensor:
    """See `host_kernels`."""
    return torch.stack(expand_many(features), 1)


class TritonUses(NamedTuple):
    """A batch's occurrences of rows in several features; the features' gradients are concatenated."""

    by_row: fused.SortedUses
    source: Tensor | None  # int32 [N], the gradient's row for each occurrence; None if it is row i for occurrence i
    weights: Tensor | None  # float32, one per occurrence
    sizes: list[Tensor | None]  # float32 [B, 1] for each feature, the divisors of its bags' gradients


def uses_of(features: Sequence[FeatureUses], rows: int, *, in_order: bool) -> TritonUses:
    """See `host_kernels`."""
    pooled = any(feature.offsets is not None for feature in features)
    weighted = any(feature.weights is not None for feature in features)
    sources, weights, begin = [], [], 0
    for inverse, offsets, scales, _, _ in features:
        N, there = len(inverse), inverse.device
        if pooled:
            own = torch.arange(N, dtype=torch.int32, device=there) if offsets is None else get_bags(offsets, N)
            sources.append(own + begin if begin else own)
        if weighted:
            weights.append(torch.ones(N, dtype=torch.float32, device=there) if scales is None else scales)
        begin += N if offsets is None else len(offsets) - 1
    return TritonUses(
        fused.sort_uses(concatenate([feature.inverse for feature in features]), rows),
        concatenate(sources) if pooled else None,
        concatenate(weights) if weighted else None,
        [
            get_bag_sizes(feature.offsets) if feature.mean and feature.offsets is not None else None
            for feature in features
        ],
    )


def sum_uses(grads: Sequence[Tensor], uses: TritonUses) -> Tensor:
    """See `host_kernels`; rows with more than 64 occurrences are summed in segments (see `triton.ops.sum_uses`)."""
    grads = [grad if n is None else grad.float() / n for grad, n in zip(grads, uses.sizes, strict=True)]
    if len({grad.dtype for grad in grads}) > 1:
        grads = [grad.float() for grad in grads]
    return fused.sum_uses(concatenate(grads).contiguous(), uses.by_row, uses.source, uses.weights)


def sum_many(calls: Sequence[tuple[Sequence[Tensor], TritonUses]]) -> list[Tensor]:
    """See `host_kernels`."""
    return [sum_uses(*call) for call in calls]


def update(
    primitive: str,
    block: Tensor,
    row_slots: Tensor,
    ids: Tensor,
    grads: Tensor,
    scalars: tuple[Any, ...],
    skip: Tensor | None = None,
    admitted: Tensor | None = None,
    admitted_row_slots: Tensor | None = None,
    clock: Clock | None = None,
    clocks: Clocks | None = None,
) -> None:
    """See `host_kernels`."""
    given = primitive, block, row_slots, ids, grads, scalars, skip, admitted, admitted_row_slots
    if clock is None and fused.supports(primitive, scalars):
        fused.update(*given)
    else:
        torch_operations.update(*given, clock, clocks)


def exchange(
    block: Tensor, row_slots: Tensor, slots: Tensor, leaving: int, admitted: Tensor, admitted_row_slots: Tensor
) -> tuple[Tensor, Tensor]:
    """See `host_kernels`; evicted rows overwrite admitted rows."""
    fused.exchange(block, row_slots, slots, leaving, admitted, admitted_row_slots)
    stay = len(slots) - leaving
    return admitted[stay:], admitted_row_slots[stay:]


def place(rows: Tensor, positions: Tensor, values: Tensor) -> None:
    """See `host_kernels`."""
    none = torch.empty((len(rows), 0), dtype=torch.float32, device=rows.device)
    block, new = (part.view(len(part), 1, -1) for part in (rows, values))
    fused.exchange(block, none, positions, 0, new, none[: len(values)])
