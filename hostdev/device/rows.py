"""Build each feature's output from a batch's unique rows: a vector for each occurrence, or for each bag.

The backward pass sums the outputs' gradients into one gradient for each unique row.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hostdev.device.ops import Ops, get_ops
from hostdev.device.ops.uses import Expansion, FeatureUses

__all__ = ["FeatureUses", "GroupUses", "Lookup", "pull"]


class GroupUses:
    """The occurrences of a batch's unique rows; all tables of a group share them, because they have the same ids.

    Args:
        features: The features that look up the group's tables.
        rows: U, the number of unique rows.
        in_order: Whether every row occurs, and rows are numbered by first occurrence in the concatenated features.
    """

    def __init__(self, features: Sequence[FeatureUses], rows: int, *, in_order: bool) -> None:
        self.features, self.rows, self.in_order = tuple(features), rows, in_order
        self._found: dict[tuple[int, ...], Any] = {}  # results of `Ops.uses_of`, by the features that have a gradient

    def select(self, grads: Sequence[Tensor | None], ops: Ops) -> tuple[list[Tensor], Any]:
        """Return the arguments of `Ops.sum_uses` for the features that have a gradient; there must be at least one."""
        given = tuple([number for number, grad in enumerate(grads) if grad is not None])
        if given not in self._found:
            features = [self.features[number] for number in given]
            in_order = self.in_order and len(given) == len(self.features)
            self._found[given] = ops.uses_of(features, self.rows, in_order=in_order)
        return [cast(Tensor, grads[number]) for number in given], self._found[given]

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
        for feature in self.features:  # the sums are integers, so the order does not matter
            ones = torch.ones(len(feature.inverse), dtype=torch.float32, device=device)
            counts.index_put_((feature.inverse.long(),), ones, accumulate=True)
        return counts


class Lookup(NamedTuple):
    """A table's rows and where its features use them.

    Attributes:
        rows: The table's unique rows, float32 [U, D].
        uses: The occurrences of the group's features.
        dtypes: The dtype of each feature's output. It replaces `FeatureUses.dtype`, because the outputs of a group's
            tables may have different dtypes.
    """

    rows: Tensor
    uses: GroupUses
    dtypes: Sequence[torch.dtype]


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        uses: Sequence[GroupUses],
        dtypes: Sequence[Sequence[torch.dtype]],
        stacks: Sequence[Sequence[int]],
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.uses = uses  # not as saved tensors: the first of several backward passes would free them
        ctx.stacks = stacks
        ctx.ops = ops = get_ops(rows[0].device)
        every = [
            (trained, Expansion(one, *feature[:4], dtype))
            for trained, one, group, types in zip(ctx.needs_input_grad[_BEFORE_ROWS:], rows, uses, dtypes, strict=True)
            for feature, dtype in zip(group.features, types, strict=True)
        ]
        stacked = {position for members in stacks for position in members}
        single = [one for position, one in enumerate(every) if position not in stacked]
        groups = [[every[position] for position in members] for members in stacks]
        outputs = [
            *ops.expand_many([one for _, one in single]),
            *(ops.stack([one for _, one in members]) for members in groups),
        ]
        has_trained = [*(trained for trained, _ in single), *(any(trained for trained, _ in one) for one in groups)]
        ctx.mark_non_differentiable(*(out for out, has in zip(outputs, has_trained, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        outputs: Iterator[Tensor | None] = iter(grads)
        if ctx.stacks:
            by_position: dict[int, Tensor | None] = {}
            for members, grad in zip(ctx.stacks, grads[len(grads) - len(ctx.stacks) :], strict=True):
                for place, position in enumerate(members):
                    by_position[position] = None if grad is None else grad.select(1, place)
            left, n = iter(grads), sum(len(uses.features) for uses in ctx.uses)
            outputs = iter([by_position[i] if i in by_position else next(left) for i in range(n)])
        needed, calls, ops = ctx.needs_input_grad[_BEFORE_ROWS:], {}, ctx.ops
        for number, uses in enumerate(ctx.uses):
            mine = list(islice(outputs, len(uses.features)))
            if needed[number] and any(grad is not None for grad in mine):
                calls[number] = uses.select(mine, ops)
        sums: list[Tensor | None] = [None] * len(ctx.uses)
        for number, total in zip(calls, ops.sum_many(list(calls.values())) if calls else (), strict=True):
            # A feature without a gradient counts as zeros: adding 0 turns -0, for rows without occurrences, into 0.
            is_whole = len(calls[number][0]) == len(ctx.uses[number].features)
            sums[number] = total if is_whole else total.add_(0.0)
        return *(None,) * _BEFORE_ROWS, *sums


_BEFORE_ROWS = 3  # arguments of `_Pull` before the rows


class Pulled(NamedTuple):
    """The results of `pull`.

    Attributes:
        features: For each table and each of its features, the tensor of rows; None if the feature is in a stack.
        stacks: The stacks, each a tensor [B, F, D].
    """

    features: list[list[Tensor | None]]
    stacks: list[Tensor]


def pull(lookups: Sequence[Lookup], stacks: Sequence[Sequence[tuple[int, int]]] = ()) -> Pulled:
    """Return the rows of each table's features: one per bag if a feature is pooled, otherwise one per occurrence.

    The row of a bag is the sum or mean of the rows that occur in it, times their weights; the row of an occurrence is
    multiplied by its weight. The gradient of a unique row is the sum over its occurrences, in the order of
    `Ops.sum_uses`; weights get no gradient. The autograd graph survives a backward pass, so that several losses can be
    differentiated one after another.

    Args:
        lookups: The tables.
        stacks: Features to return in one tensor [B, F, D], each as (lookup index, feature index). They must have
            the same B, D and dtype.

    Returns:
        The stacks, and for each table and each of its other features, a tensor [B, D] or [N, D] of the feature's dtype.
        The rows of empty bags are 0.
    """
    rows, uses, dtypes = zip(*lookups, strict=True)
    outputs = [(number, place) for number, one in enumerate(uses) for place in range(len(one.features))]
    at = {output: position for position, output in enumerate(outputs)}
    found = iter(_Pull.apply(uses, dtypes, [[at[one] for one in members] for members in stacks], *rows))  # type: ignore[no-untyped-call]
    stacked = {one for members in stacks for one in members}
    each = iter([None if output in stacked else next(found) for output in outputs])
    return Pulled([list(islice(each, len(one.features))) for one in uses], list(found))
