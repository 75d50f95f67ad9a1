"""The groups of tables, and a batch's ids by group: as requested, without duplicates, and with the caches' plans.

A stage creates its result once and does not change earlier results, as in `results`. The ids are deduplicated once per
group, and the tables share a cache and its plan. Every stage processes all groups at once.

Subsets of a batch's rows, and the concatenated ids of all groups, serve the search for hazards.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hostdev.cache.cache import NO_CACHE, EmbeddingCache
from hostdev.cache.plan import Plan
from hostdev.core.primitive import OpLog, Primitive
from hostdev.core.table_dtypes import FP32
from hostdev.core.table_primitives import UPDATES, CacheAdmit, CacheEvict, EmbeddingLookup, ForwardRead
from hostdev.device.forwarding import forward_rows, forwarded_bytes
from hostdev.device.ops.catch_up import Clocks, unpack
from hostdev.device.table import DeviceTable
from hostdev.distributed.exchange import Asked
from hostdev.host.table import HostTable
from hostdev.kernels.arrays import AnyIds, Positions
from hostdev.pipeline.keys import KeyedRows


class Embedding:
    """A table with its lookup and update ops, which run where the table is: on the host or on the device."""

    def __init__(self, table: HostTable | DeviceTable, log: OpLog | None = None) -> None:
        self.table = table
        self.name = table.name
        self.target = table.primitive_target
        self.steps = 0  # number of steps whose updates are finished
        self.begun = 0  # number of steps whose updates have begun or finished
        self._clocks = Clocks()
        update = UPDATES[table.optimizer.primitive]
        self.lookup = EmbeddingLookup(scope=self.name, log=log).add_prim_attr("primitive_target", self.target)
        self.update = update(scope=self.name, log=log).add_prim_attr("primitive_target", self.target)
        self.forward_read = ForwardRead(scope=self.name, log=log).add_prim_attr("primitive_target", "CPU")
        forward = partial(forward_rows, table.optimizer)
        self.forward_update = Primitive("ForwardUpdate", forward, nbytes=forwarded_bytes, scope=self.name, log=log)

    def current(self, rows: Tensor) -> Tensor:
        """Return the weights of fetched rows, float32 [U, D], after all steps that have begun."""
        clock = self.table.clock()
        return rows if clock is None else unpack(rows, self.table.dim, clock, self._clocks)

    def uncount_unfinished(self) -> None:
        """After in-flight batches are abandoned, subtract the steps that did not finish from the table's count."""
        self.table.uncount_steps(self.begun - self.steps)
        self.begun = self.steps

    def use_cache(self, slots: Any, log: OpLog | None = None) -> None:
        """Add the ops of a cache, which holds the table's hot rows in `slots` (`cache.slots.DeviceSlots`)."""
        self.cache_admit = CacheAdmit(scope=self.name, log=log).add_prim_attr("primitive_target", "CPU")
        self.cache_evict = CacheEvict(scope=self.name, log=log).add_prim_attr("primitive_target", "CPU")
        about: Any = {"scope": self.name, "log": log}
        self.cache_lookup = Primitive("CacheLookup", slots.rows, nbytes=slots.rows_bytes, **about)
        self.cache_update = Primitive("CacheUpdate", slots.update, nbytes=slots.update_bytes, **about)
        self.cache_passed = Primitive("CachePassed", slots.passed, **about)
        self.cache_exchange = Primitive("CacheExchange", slots.exchange, nbytes=slots.exchange_bytes, **about)


class Group:
    """Tables that share ids, all on the host or all on the device, and the cache of their rows.

    A table by key has its own group, with `keys`. The group's ids are then row numbers.
    """

    def __init__(
        self,
        tables: Sequence[HostTable] | Sequence[DeviceTable],
        cache: EmbeddingCache | None = None,
        log: OpLog | None = None,
        keys: KeyedRows | None = None,
    ) -> None:
        self.embeddings = [Embedding(table, log) for table in tables]
        self.cache, self.keys = cache or NO_CACHE, keys
        self.is_cached = bool(self.cache.slots)
        self.rows = tables[0].row_space
        self.on_host = self.embeddings[0].target == "CPU"
        self.late = any(table.capabilities.late for table in tables)  # whether rows miss steps that do not use them
        for embedding, slots in zip(self.embeddings, self.cache.slots, strict=False):
            embedding.use_cache(slots, log)

    @property
    def row_bytes(self) -> int:
        """Bytes of one looked-up row, summed over the tables."""
        return 4 * sum(embedding.table.fetched_width for embedding in self.embeddings)

    @property
    def rounds(self) -> bool:
        """Whether any table's format rounds new values; how a row is rounded depends on its id."""
        return any((one.table.dtype, one.table.slots_dtype) != (FP32, FP32) for one in self.embeddings)

    def row_ids(self, rows: AnyIds) -> AnyIds:
        """Convert this rank's local row numbers to ids in the whole tables."""
        table = self.embeddings[0].table
        assert isinstance(table, HostTable)
        return table.row_ids(rows)

    @property
    def used_rows(self) -> int:
        """One more than the largest row number that has ever been used."""
        return self.embeddings[0].table.used_rows

    @property
    def window(self) -> int:
        """Number of batches that the plans of the cache and of tables on disk look ahead; 0 without both."""
        return max(self.cache.window, *(one.table.window for one in self.embeddings))

    def begin_pass(self) -> None:
        """At the beginning of a training pass, bring the cache up to date with the tables."""
        if self.keys is not None:
            self.keys.begin_pass()
        self.cache.refresh()

    def end_pass(self) -> None:
        """At the end of a training pass, write cached rows back, and undo the plans of batches without a step."""
        for embedding in self.embeddings:
            embedding.uncount_unfinished()
        self.cache.write_back()
        if self.keys is not None:
            self.keys.end_pass()


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
    inverse: Positions  # [N], for each id in the batch, the index of its row among the unique rows
    asked: Asked | None = None  # with other ranks: the rows that this rank requests, and those requested from it
    plans_keys: bool = False  # whether the batch is a planned step of a table by key; `ids` are row numbers
    guests: Any = None  # for a table by key: keeps temporary rows of this batch, which updates nothing


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
        """Ids of rows that are read on the host: rows that bypass the cache, then rows that it admits."""
        return self.ids if self.plan is None else self.plan.reads

    @property
    def writes(self) -> AnyIds:
        """Ids of rows that the update writes on the host: rows that bypass the cache, then rows that it evicts."""
        return self.ids if self.plan is None else self.plan.writes


class RowSubset(NamedTuple):
    """A subset of a batch's ids, with their positions in the batch."""

    ids: AnyIds  # int32 or int64 [any], unique
    positions: Positions | None  # [any], ascending, among the batch's ids; None for all ids

    @classmethod
    def select(cls, ids: AnyIds, positions: Positions | None) -> "RowSubset":
        """Return the subset at these positions of `ids`; None selects all."""
        return cls(ids if positions is None else ids[positions], positions)

    def split(self, at: int) -> tuple["RowSubset", "RowSubset"]:
        """Return two subsets: the ids at positions below `at`, and the ids after them, with positions from `at`."""
        if self.positions is None:
            return RowSubset(self.ids[:at], None), RowSubset(self.ids[at:], None)
        edge = int(np.searchsorted(self.positions, at))
        low, high = self.positions[:edge], self.positions[edge:] - np.int32(at)
        return RowSubset(self.ids[:edge], low), RowSubset(self.ids[edge:], high)

    def __len__(self) -> int:
        return len(self.ids)


class ConcatenatedIds:
    """The ids of all groups in one array; the number of rows of all preceding groups is added to each id.

    Attributes:
        groups: Each group's own ids, int32 or int64 [any].
        starts: [G + 1], where each group's ids begin in the array.

    Args:
        offsets: The number of rows of all preceding groups, by group.
        dtype: The array's dtype.
    """

    def __init__(self, groups: Sequence[AnyIds], offsets: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.groups, self._offsets, self._dtype = groups, offsets, dtype
        self.starts = list(accumulate(map(len, groups), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    @cached_property
    def ids(self) -> AnyIds:
        """The array, int32 or int64 [any]; serial passes never need it."""
        if len(self.groups) == 1:
            return self.groups[0]
        joint = np.empty(len(self), self._dtype)
        for part, offset, (start, stop) in zip(self.groups, self._offsets, pairwise(self.starts), strict=False):
            np.add(part, offset, out=joint[start:stop], dtype=self._dtype, casting="unsafe")
        return joint

    @cached_property
    def all(self) -> list[RowSubset]:
        """All ids, as one subset for each group."""
        if len(self.groups) == 1:
            return [RowSubset(self.groups[0], None)]
        return [RowSubset(ids.astype(self._dtype, copy=False), None) for ids in self.groups]


class RowOffsets:
    """Offsets that number the rows of all groups consecutively; a single group keeps its ids."""

    def __init__(self, groups: Sequence[Group]) -> None:
        rows = [group.rows if group.on_host else 0 for group in groups]
        self._offsets = np.concatenate([[0], np.cumsum(rows)]).tolist()
        self.rows: int = self._offsets[-1]
        self._dtype = np.dtype(np.int32 if self.rows < 2**31 else np.int64)
        self._groups = groups

    def get_used(self) -> list[tuple[int, int]]:
        """Return the range of row numbers that each group on the host uses, as (start, stop)."""
        pairs = zip(self._groups, self._offsets, strict=False)
        return [(offset, offset + group.used_rows) for group, offset in pairs if group.on_host]

    def concatenate(self, ids: Sequence[AnyIds]) -> ConcatenatedIds:
        """Return the ids of all groups, after adding each group's offset to its ids."""
        return ConcatenatedIds(ids, self._offsets, self._dtype)

    def split(self, subset: RowSubset, starts: Sequence[int]) -> list[RowSubset]:
        """Split a subset of concatenated ids by group; return subsets with each group's own ids and positions.

        Args:
            subset: A subset of the concatenated ids, with positions.
            starts: Where each group's ids begin among the concatenated ids.
        """
        if len(self._groups) == 1:
            return [subset]
        assert subset.positions is not None
        at = np.searchsorted(subset.positions, starts).tolist()
        shares = []
        for offset, first, (start, stop) in zip(self._offsets, starts, pairwise(at), strict=False):
            ids, positions = subset.ids[start:stop], subset.positions[start:stop]
            shares.append(RowSubset(ids - ids.dtype.type(offset) if offset else ids, positions - np.int32(first)))
        return shares
