"""Lookups of only some of a runtime's features, for example one tower's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from hostdev.runtime.features import FeatureBinding
from hostdev.runtime.spec import FeatureInput
from hostdev.runtime.stacks import Stack

B = TypeVar("B")
_NONE = np.empty(0, np.int64)


def some_features(names: Iterable[str], bindings: Sequence[FeatureBinding], stacks: Sequence[Stack]) -> list[str]:
    """Return the names of features and stacks as a list without duplicates.

    Raises:
        ValueError: There are no names, a name is unknown, or it names a feature that is in a stack.
    """
    chosen = list(dict.fromkeys([names] if isinstance(names, str) else names))
    stacked = {bindings[number].name for stack in stacks for number in stack.features}
    known = [feature.name for feature in bindings if feature.name not in stacked] + [stack.name for stack in stacks]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        what = f"no feature {unknown[0]!r}" if unknown else "no features are given"
        raise ValueError(f"{what}; the features are {', '.join(known)}")
    return chosen


def get_ids_of_some(
    chosen: Sequence[str],
    ids: Callable[[B], Mapping[str, FeatureInput]] | None,
    bindings: Sequence[FeatureBinding],
    stacks: Sequence[Stack],
) -> Callable[[B], Mapping[str, FeatureInput]]:
    """Return a function that returns a batch's ids for these features, and empty arrays for the others.

    Args:
        chosen: The names of features and stacks.
        ids: Called with a batch; returns its ids by feature. None if batches are dicts that contain the ids.
        bindings: The bindings of the runtime's features.
        stacks: The runtime's stacks.
    """
    members = {bindings[number].name for stack in stacks if stack.name in chosen for number in stack.features}
    names = [feature.name for feature in bindings if feature.name in chosen or feature.name in members]
    left_out = [feature.name for feature in bindings if feature.name not in names]

    def get_ids(batch: B) -> Mapping[str, FeatureInput]:
        given = batch if ids is None else ids(batch)
        if not isinstance(given, Mapping):
            return given  # type: ignore[return-value]  # the caller raises an error
        own = {name: given[name] for name in names if name in given} if ids is None else dict(given)
        return own | dict.fromkeys(left_out, _NONE)

    return get_ids
