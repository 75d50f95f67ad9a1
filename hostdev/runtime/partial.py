"""Looking up some of a runtime's features, such as those of one tower."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hostdev.runtime.features import Wanted

_NONE = np.empty(0, np.int64)


def some_features(names: Iterable[str], wanted: Sequence[Wanted]) -> list[str]:
    """Return the names of features as a list, each once; ValueError unless they are of the runtime's."""
    chosen = list(dict.fromkeys([names] if isinstance(names, str) else names))
    known = [feature.name for feature in wanted]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        what = f"no feature {unknown[0]!r}" if unknown else "no features are given"
        raise ValueError(f"{what}; there are {', '.join(known)}")
    return chosen


def ids_of_some(
    chosen: Sequence[str], ids: Callable[[Any], Mapping[str, Any]] | None, wanted: Sequence[Wanted]
) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function that gives a batch's ids of these features, and none for the others.

    ids  gives those of a batch; None where the batches are dicts that have them
    """
    left_out = [feature.name for feature in wanted if feature.name not in chosen]

    def found(batch: Any) -> Mapping[str, Any]:
        given: Any = batch if ids is None else ids(batch)
        if not isinstance(given, Mapping):
            return given  # type: ignore[no-any-return]  # whoever asked says what is wrong
        own = {name: given[name] for name in chosen if name in given} if ids is None else dict(given)
        return own | dict.fromkeys(left_out, _NONE)

    return found
