"""Lookups of one batch of ids in the caller's thread, without a pipeline; and lookups of only some features."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.device.ops import get_ops
from hostdev.kernels.pool import Task, run_tasks
from hostdev.kernels.unique import unique
from hostdev.pipeline.batch_ids import Request
from hostdev.runtime.features import FeatureBinding, FeatureIds, GroupSpec, Stack, on_host, require_stackable
from hostdev.runtime.rows import Value
from hostdev.runtime.spec import FeatureInput

B = TypeVar("B")
_NO_IDS = np.empty(0, np.int64)
_FEW = 2048  # ids; up to this many are looked up without deduplication


def lookup_rows(
    request: Request,
    bindings: Sequence[FeatureBinding],
    groups: Sequence[GroupSpec],
    device: torch.device,
    stacks: Sequence[Stack],
) -> dict[str, Value]:
    """Return a request's rows by feature, as a loop yields them; all steps must have been applied to the tables.

    Args:
        request: The request for one batch; its `note` is a list with one `MicroBatch`.
        bindings: The features' bindings.
        groups: The groups of tables.
        device: The device of the returned rows.
        stacks: The stacks. The features of a stack are returned as one tensor.
    """
    [micro] = request.note
    found = [_Group(group, given, device) for group, given in zip(groups, request.ids, strict=True)]
    run_tasks([task for group in found for task in group.tasks])
    values: dict[str, Value] = {}
    for number, (feature, ids) in enumerate(zip(bindings, micro.ids, strict=True)):
        outputs = []
        for (group, place), dtype in zip(feature.tables, feature.dtypes, strict=True):
            rows = found[group].get_rows(number, place, ids, dtype, mean=feature.feature.pooling == "mean")
            outputs.append(rows if ids.shape is None else rows.view(*ids.shape, rows.shape[1]))
        values[feature.name] = outputs[0] if feature.feature.is_single else tuple(outputs)
    require_stackable(stacks, bindings, micro.ids)
    for stack in stacks:
        members: list[Any] = [values.pop(bindings[number].name) for number in stack.features]
        values[stack.name] = torch.stack(members, 1)
    return values


class _Group:
    """The rows of a group of tables, which are complete once all `tasks` have run."""

    def __init__(self, group: GroupSpec, given: Sequence[npt.NDArray[Any]], device: torch.device) -> None:
        ids = given[0] if len(given) == 1 else np.concatenate(given)
        unknown = list(zip(map(len, given), group.unknown, strict=False))
        # Keys without a row may get temporary rows, which last as long as `_guests`.
        ids, self._guests = group.tables[0].find_ids(ids, unknown)
        self._device, self._features = device, group.features
        self._edges = list(accumulate(map(len, given), initial=0))
        self._inverse: npt.NDArray[np.int32] | None = None  # None: the rows are in the order of the ids
        if len(ids) > _FEW:
            ids, self._inverse = unique(ids)
        self.tasks: list[Task] = []
        self._rows: list[Any] = []
        tables: list[Any] = group.tables
        for table in tables:
            if not on_host(group):
                self._rows.append(table.lookup_now(torch.from_numpy(ids).to(device)))
            elif len(ids) > _FEW:
                self._rows.append(np.empty((len(ids), table.dim), np.float32))
                for source, rows, at in table.storage.sources(ids):
                    self.tasks += source.lookup_tasks(rows, self._rows[-1], at, table.clock())
            else:  # waking the host's threads would take longer
                block, at = table.where(ids)
                self._rows.append(block[at, 0])

    def get_rows(self, feature: int, table: int, ids: FeatureIds, dtype: torch.dtype, *, mean: bool) -> Tensor:
        """Return a feature's rows of one table, float32 or bfloat16 [B, D] or [N, D]."""
        place = self._features.index(feature)
        start, stop = self._edges[place : place + 2]
        rows = self._rows[table]
        if not isinstance(rows, Tensor):
            rows = self._rows[table] = torch.from_numpy(rows).to(self._device)
        if self._inverse is None:
            rows = rows[start:stop]
            if ids.offsets is None and ids.weights is None and dtype == torch.float32:
                return rows
            inverse = np.arange(stop - start, dtype=np.int32)
        else:
            inverse = self._inverse[start:stop]
        at = torch.from_numpy(inverse).to(self._device)
        offsets, weights = (None if one is None else one.to(self._device) for one in (ids.offsets, ids.weights))
        ops = get_ops(self._device)
        bags = (offsets, weights, mean, dtype)
        found: Tensor = ops.gather(rows, at, weights, dtype) if offsets is None else ops.pool(rows, at, *bags)
        return found


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
    """Return a function that returns a batch's ids for these features, and empty arrays for all other features.

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
        return own | dict.fromkeys(left_out, _NO_IDS)

    return get_ids
