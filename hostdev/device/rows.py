"""Expand unique rows to the occurrences and bags of features, and sum gradients back to one per unique row."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hostdev.device.ops import get_ops
from hostdev.device.ops.uses import FeatureUses

__all__ = ["FeatureUses", "GroupUses", "pull"]


class GroupUses:
    """The occurrences of a batch's unique rows, shared by all tables of a group, which have the same ids.

    Args:
        features: The features that take their ids from the group.
        rows: U.
        in_order: Each row occurs, and rows are numbered by first occurrence over the concatenated features.
    """

    def __init__(self, features: Sequence[FeatureUses], rows: int, *, in_order: bool) -> None:
        self.features, self.rows, self.in_order = tuple(features), rows, in_order
        self._found: dict[tuple[bool, ...], Any] = {}  # by which features have a gradient (nearly always all)

    def sum(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Return each row's gradient float32 [U, D] from those of the features' outputs, as `Ops.sum_uses` does.

        A feature without a gradient counts as zeros: its occurrences are skipped, and 0 is added at the end. Returns
        None if no feature has a gradient.
        """
        given = tuple(grad is not None for grad in grads)
        present = [grad for grad in grads if grad is not None]
        if not present:
            return None
        ops = get_ops(present[0].device)
        if given not in self._found:
            features = [feature for feature, has in zip(self.features, given, strict=True) if has]
            self._found[given] = ops.uses_of(features, self.rows, in_order=self.in_order and all(given))
        sums = ops.sum_uses(present, self._found[given])
        return sums if all(given) else sums.add_(0.0)  # turns -0 into 0 for rows without occurrences

    def get_first_occurrences(self) -> Tensor:
        """Return the rows that occur, in order of first occurrence, int64 [any]; waits for the device."""
        inverse = torch.cat([feature.inverse for feature in self.features]).long()
        first = torch.full((self.rows,), len(inverse), dtype=torch.int64, device=inverse.device)
        first.scatter_reduce_(0, inverse, torch.arange(len(inverse), device=inverse.device), "amin")
        return inverse[first.sort().values[: int((first < len(inverse)).sum())]]

    def counts(self) -> Tensor:
        """Return the number of occurrences of each row, float32 [U]."""
        device = self.features[0].inverse.device
        counts = torch.zeros(self.rows, dtype=torch.float32, device=device)
        for feature in self.features:  # integers: the order of the sum does not matter
            ones = torch.ones(len(feature.inverse), dtype=torch.float32, device=device)
            counts.index_put_((feature.inverse.long(),), ones, accumulate=True)
        return counts


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, uses: GroupUses, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.uses = uses  # not a saved tensor: the first of several backward passes frees those
        ops, out = get_ops(rows.device), []
        for (inverse, offsets, weights, mean, _), dtype in zip(uses.features, dtypes, strict=True):
            if offsets is None:
                out.append(ops.gather(rows, inverse, weights, dtype))
            else:
                out.append(ops.pool(rows, inverse, offsets, weights, mean, dtype))
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        return ctx.uses.sum(grads), None, None


def pull(rows: Tensor, uses: GroupUses, dtypes: Sequence[torch.dtype] | None = None) -> tuple[Tensor, ...]:
    """Return each feature's rows: the sum or mean of each bag if it is pooled, else each occurrence's weighted row.

    The gradient of the rows is `GroupUses.sum`; weights get none. The single graph node survives a backward pass, so
    that several losses can be differentiated in turn.

    Args:
        rows: float32 [U, D].
        uses: The features' occurrences.
        dtypes: Output dtypes that replace the features' own: tables of a group may differ.

    Returns:
        For each feature, in its dtype, [B, D] or [N, D]; 0 for an empty bag.
    """
    dtypes = dtypes or [feature.dtype for feature in uses.features]
    out: tuple[Tensor, ...] = _Pull.apply(rows, uses, dtypes)  # type: ignore[no-untyped-call]
    return out
