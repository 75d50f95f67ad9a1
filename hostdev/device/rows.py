"""Expand unique rows to the occurrences and bags of features, and sum gradients back to one per unique row."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hostdev.device.ops import Ops, get_ops
from hostdev.device.ops.uses import FeatureUses, PoolCall

__all__ = ["FeatureUses", "GroupUses", "Lookup", "pull"]


class GroupUses:
    """The occurrences of a batch's unique rows, shared by all tables of a group, which have the same ids.

    Args:
        features: The features that take their ids from the group.
        rows: U.
        in_order: Whether each row occurs, and rows are numbered by first occurrence over the concatenated features.
    """

    def __init__(self, features: Sequence[FeatureUses], rows: int, *, in_order: bool) -> None:
        self.features, self.rows, self.in_order = tuple(features), rows, in_order
        self._found: dict[tuple[bool, ...], Any] = {}  # from `Ops.uses_of`, by which features have a gradient

    def select(self, grads: Sequence[Tensor | None], ops: Ops) -> tuple[list[Tensor], Any]:
        """Return the arguments of `Ops.sum_uses` for the features that have a gradient, at least one."""
        given = tuple(grad is not None for grad in grads)
        if given not in self._found:
            features = [feature for feature, has in zip(self.features, given, strict=True) if has]
            self._found[given] = ops.uses_of(features, self.rows, in_order=self.in_order and all(given))
        return [grad for grad in grads if grad is not None], self._found[given]

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


class Lookup(NamedTuple):
    """A table's rows and where its features use them.

    Attributes:
        rows: The table's unique rows, float32 [U, D].
        uses: The occurrences of the group's features.
        dtypes: The dtype of each feature's output, which replaces `FeatureUses.dtype`: tables of a group may differ.
    """

    rows: Tensor
    uses: GroupUses
    dtypes: Sequence[torch.dtype]


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, uses: Sequence[GroupUses], dtypes: Sequence[Sequence[torch.dtype]], *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.uses = uses  # not a saved tensor: the first of several backward passes frees these
        ops = get_ops(rows[0].device)
        gathered: dict[int, Tensor] = {}  # by position among the outputs
        pooled: dict[int, PoolCall] = {}
        for one, group, types in zip(rows, uses, dtypes, strict=True):
            for (inverse, offsets, weights, mean, _), dtype in zip(group.features, types, strict=True):
                position = len(gathered) + len(pooled)
                if offsets is None:
                    gathered[position] = ops.gather(one, inverse, weights, dtype)
                else:
                    pooled[position] = PoolCall(one, inverse, offsets, weights, mean, dtype)
        found = gathered | dict(zip(pooled, ops.pool_many(list(pooled.values())), strict=True))
        return tuple(found[position] for position in range(len(found)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        left = iter(grads)
        each = [[next(left) for _ in uses.features] for uses in ctx.uses]
        wanted = [
            number
            for number, mine in enumerate(each)
            if ctx.needs_input_grad[2 + number] and any(grad is not None for grad in mine)
        ]
        sums: list[Tensor | None] = [None] * len(each)
        if wanted:
            ops = get_ops(next(grad.device for grad in each[wanted[0]] if grad is not None))
            found = ops.sum_many([ctx.uses[number].select(each[number], ops) for number in wanted])
            for number, total in zip(wanted, found, strict=True):
                # A feature without a gradient counts as zeros: adding 0 turns -0, for rows without occurrences, into 0.
                sums[number] = total if all(grad is not None for grad in each[number]) else total.add_(0.0)
        return None, None, *sums


def pull(lookups: Sequence[Lookup]) -> list[tuple[Tensor, ...]]:
    """Return, for each table and feature, the bags of a pooled feature, otherwise each occurrence's weighted row.

    A bag is a sum or mean. The gradient of the rows is the sum over their occurrences, as `Ops.sum_uses` adds them;
    the occurrences' weights get no gradient. The single graph node survives a backward pass, so that several losses can
    be differentiated in turn.

    Returns:
        For each table and each of its features, a tensor [B, D] or [N, D] of the feature's dtype; an empty bag is 0.
    """
    found: dict[int, tuple[Tensor, ...]] = {}
    for trained in (True, False):  # frozen tables' outputs need no gradient
        chosen = {number: one for number, one in enumerate(lookups) if one.rows.requires_grad == trained}
        if chosen:
            rows, uses, dtypes = zip(*chosen.values(), strict=True)
            out = iter(_Pull.apply(uses, dtypes, *rows))  # type: ignore[no-untyped-call]
            found |= {number: tuple(next(out) for _ in one.uses.features) for number, one in chosen.items()}
    return [found[number] for number in range(len(lookups))]
