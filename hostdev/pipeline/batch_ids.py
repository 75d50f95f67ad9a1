"""The ids of a batch: as the caller requests them, without duplicates, and with the caches' plans.

As for the results of later stages, see `results`: a stage creates its result once and does not change earlier results.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hostdev.cache.plan import Plan
from hostdev.distributed.exchange import Asked
from hostdev.kernels.arrays import AnyIds, Positions

Inverse = npt.NDArray[np.int32]


class Request(NamedTuple):
    """A batch as the caller requests it."""

    batch: Any  # the caller's batch
    rows: int  # number of samples, for the timeline
    ids: Sequence[Sequence[AnyIds]]  # by group, by feature: int32 or int64 [N], C-contiguous, all in the table
    tensors: Sequence[Tensor] = ()  # other tensors that the step needs on the device
    note: Any = None  # the caller's own data
    check: Callable[[], None] | None = None  # called before ids are used; raises an error for ids outside the table


class ReadBatch(NamedTuple):
    """A request that has been read, and its batch's number."""

    number: int
    request: Request


class UniqueGroup(NamedTuple):
    """A group's unique ids; with other ranks, the ids of this rank's rows that any rank requests."""

    ids: AnyIds  # unique [U]
    inverse: Inverse  # [N], for each id in the batch, the index of its row among the unique rows
    asked: Asked | None = None  # with other ranks: the rows that this rank requests, and those requested from it
    plans_keys: bool = False  # whether the batch is a planned step of a table by key; `ids` are row numbers
    guests: Any = None  # of a table by key: keeps rows that are only for this batch, which updates nothing


class UniqueBatch(NamedTuple):
    """A deduplicated batch."""

    number: int
    position: int  # the batch's position in the caller's loop, counted from 1
    request: Request
    groups: list[UniqueGroup]


class PlannedGroup(NamedTuple):
    """A group's ids and the cache's plan."""

    ids: AnyIds  # unique [U]
    asked: Asked | None
    plan: Plan | None  # None without a cache, or in a pass that updates nothing
    places: Positions | None  # for each id, the position of its row on the device, int32 [U]; None for the ids' order
    plans_keys: bool = False  # as in `UniqueGroup`
    guests: Any = None  # as in `UniqueGroup`

    @property
    def reads(self) -> AnyIds:
        """AnyIds of rows that are read on the host: rows that bypass the cache, then rows that it admits."""
        return self.ids if self.plan is None else self.plan.reads

    @property
    def writes(self) -> AnyIds:
        """AnyIds of rows that the update writes on the host: rows that bypass the cache, then rows that it evicts."""
        return self.ids if self.plan is None else self.plan.writes
