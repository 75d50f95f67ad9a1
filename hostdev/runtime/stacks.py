"""Stacks: features whose rows the model gets as one tensor, without a copy."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hostdev.runtime.features import FeatureBinding, FeatureIds, describe


class Stack(NamedTuple):
    """Features whose rows the model gets as one tensor [B, F, D]."""

    name: str
    features: tuple[int, ...]  # the features' numbers, in the order of the stack


def resolve_stacks(stacks: Mapping[str, Sequence[str]] | None, bindings: Sequence[FeatureBinding]) -> list[Stack]:
    """Return the stacks, with their features by number.

    Args:
        stacks: For each stack's name, the names of its features.
        bindings: The features.

    Raises:
        TypeError: `stacks` is not a dict of lists.
        ValueError: A stack has no features, or has the name of a feature; a feature of a stack is unknown, is in
            another stack, or has several tables; or the features of a stack differ in dimension or dtype.
    """
    if not isinstance(stacks, Mapping | None):
        raise TypeError(f"stacks must be a dict from names to lists of features, not {describe(stacks)}")
    numbers = {one.name: number for number, one in enumerate(bindings)}
    taken: dict[str, str] = {}
    found = []
    for name, members in (stacks or {}).items():
        if isinstance(members, str) or not isinstance(members, Sequence):
            raise TypeError(f"stack {name!r} must be a list of features' names, not {describe(members)}")
        if name in numbers:
            raise ValueError(f"stack {name!r} has the name of a feature; give the stack another name")
        if not members:
            raise ValueError(f"stack {name!r} has no features")
        for member in members:
            if member not in numbers:
                raise ValueError(f"stack {name!r}: no feature {member!r}; the features are {', '.join(numbers)}")
            if member in taken:
                raise ValueError(f"feature {member!r} is in stack {taken[member]!r} and again in {name!r}")
            taken[member] = name
        chosen = [bindings[numbers[member]] for member in members]
        for one in chosen:
            if not one.feature.is_single:
                raise ValueError(f"stack {name!r}: feature {one.name!r} has several tables, but must have one")
        kinds = {member: (_dim(one), one.dtypes[0]) for member, one in zip(members, chosen, strict=True)}
        for member, kind in kinds.items():
            if kind != kinds[members[0]]:
                raise ValueError(
                    f"stack {name!r}: feature {members[0]!r} has {_kind(kinds[members[0]])}, but {member!r} "
                    f"has {_kind(kind)}; the features of a stack must have the same dim and dtype"
                )
        found.append(Stack(str(name), tuple(numbers[member] for member in members)))
    return found


def _dim(binding: FeatureBinding) -> int:
    dim: int = binding.feature.tables.dim
    return dim


def _kind(kind: tuple[int, torch.dtype]) -> str:
    return f"dim {kind[0]} and dtype {str(kind[1]).removeprefix('torch.')}"


def require_stackable(stacks: Sequence[Stack], bindings: Sequence[FeatureBinding], given: Sequence[FeatureIds]) -> None:
    """Raise ValueError unless each feature of a stack has one row per sample, for the same number of samples.

    Args:
        stacks: The stacks.
        bindings: All features.
        given: A batch's ids of all features.
    """
    for stack in stacks:
        first = stack.features[0]
        for number in stack.features:
            name, shape = bindings[number].name, given[number].shape
            if shape is not None and len(shape) > 1:
                raise ValueError(
                    f"stack {stack.name!r}: feature {name!r} has {shape[1]} rows per sample; give the feature a pooling"
                )
            if given[number].samples != given[first].samples:
                raise ValueError(
                    f"stack {stack.name!r}: feature {bindings[first].name!r} has {given[first].samples} samples in "
                    f"this batch, but {name!r} has {given[number].samples}"
                )
