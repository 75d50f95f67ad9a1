"""Tables that share ids, and the numbering of all groups' rows end to end, in which hazards are looked for.

One unique, one plan and one cache for all tables of a group: they are looked up with the same ids. A batch flies with a
part for each group.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.cache.cache import EmbeddingCache
from hostdev.cache.planner import Plan
from hostdev.core.primitive import UPDATES, CacheAdmit, CacheEvict, EmbeddingLookup, OpLog, Primitive
from hostdev.core.table_dtypes import BF16
from hostdev.device.table import DeviceTable
from hostdev.host.table import HostTable

Ids = npt.NDArray[Any]
Positions = npt.NDArray[np.int32]


class Embedding:
    """A table with its lookup and its update, which run where it lies: on the host, or all on the device."""

    def __init__(self, table: HostTable | DeviceTable, log: OpLog | None = None) -> None:
        self.table = table
        self.name = table.name
        self.target = table.primitive_target
        self.steps = 0  # whose updates are finished
        self.begun = 0  # steps, whose updates may have finished
        update = UPDATES[table.optimizer.primitive]
        self.lookup = EmbeddingLookup(scope=self.name, log=log).add_prim_attr("primitive_target", self.target)
        self.update = update(scope=self.name, log=log).add_prim_attr("primitive_target", self.target)

    def uncount_unfinished(self) -> None:
        """Take back the table's steps whose updates did not finish; those in flight are given up."""
        self.table.uncount_steps(self.begun - self.steps)
        self.begun = self.steps

    def use_cache(self, slots: Any, log: OpLog | None = None) -> None:
        """Take hot rows from the device, where these `DeviceSlots` hold them."""
        self.cache_admit = CacheAdmit(scope=self.name, log=log).add_prim_attr("primitive_target", "CPU")
        self.cache_evict = CacheEvict(scope=self.name, log=log).add_prim_attr("primitive_target", "CPU")
        about: Any = {"scope": self.name, "log": log}
        self.cache_lookup = Primitive("CacheLookup", slots.rows, nbytes=slots.rows_bytes, **about)
        self.cache_update = Primitive("CacheUpdate", slots.update, nbytes=slots.update_bytes, **about)
        self.cache_passed = Primitive("CachePassed", slots.passed, **about)
        self.cache_exchange = Primitive("CacheExchange", slots.exchange, nbytes=slots.exchange_bytes, **about)


class Group:
    """Tables that share ids, all of them on the host or all on the device, and the cache of their rows."""

    def __init__(
        self,
        tables: Sequence[HostTable] | Sequence[DeviceTable],
        cache: EmbeddingCache | None = None,
        log: OpLog | None = None,
    ) -> None:
        self.embeddings = [Embedding(table, log) for table in tables]
        self.cache = cache
        self.rows = self.embeddings[0].table.rows
        self.on_host = self.embeddings[0].target == "CPU"
        if cache is not None:
            for embedding, slots in zip(self.embeddings, cache.slots, strict=True):
                embedding.use_cache(slots, log)

    @property
    def row_bytes(self) -> int:
        """Bytes of the weights of a row of all tables."""
        return 4 * sum(embedding.table.dim for embedding in self.embeddings)

    def row_ids(self, plan: Plan) -> Ids | None:
        """Return the ids of a plan's hits and of the rows that it admits; None where no table's rounding is by them."""
        rounded = [one.table for one in self.embeddings if one.table.dtype == BF16]
        if not rounded:
            return None
        table = rounded[0]
        assert isinstance(table, HostTable)
        return table.row_ids(plan.cached)

    @property
    def window(self) -> int:
        """Batches that the cache's plan looks ahead."""
        return self.cache.window if self.cache is not None else 0


class Part(NamedTuple):
    """Some of a batch's ids."""

    ids: Ids  # int32 or int64 [any], unique
    positions: Positions | None  # [any], of the ids among all of the batch's, ascending; None: all of these

    @classmethod
    def of(cls, ids: Ids, positions: Positions | None) -> "Part":
        """Some of all these ids."""
        return cls(ids if positions is None else ids[positions], positions)

    def split(self, at: int) -> tuple["Part", "Part"]:
        """Return those whose positions are below `at`, and the others with positions from there on."""
        if self.positions is None:
            return Part(self.ids[:at], None), Part(self.ids[at:], None)
        edge = int(np.searchsorted(self.positions, at))
        low, high = self.positions[:edge], self.positions[edge:] - np.int32(at)
        return Part(self.ids[:edge], low), Part(self.ids[edge:], high)

    def __len__(self) -> int:
        return len(self.ids)


class Joint(NamedTuple):
    """The ids of all groups, end to end, each numbered among the rows of all of them."""

    ids: Ids  # int32 or int64 [any]
    edges: list[int]  # [G + 1], where each group's begin


class Numbering:
    """Numbers the rows of all groups end to end: with one group they keep their ids."""

    def __init__(self, groups: Sequence[Group]) -> None:
        rows = [group.rows if group.on_host else 0 for group in groups]
        self._bases = np.concatenate([[0], np.cumsum(rows)]).tolist()
        self.rows: int = self._bases[-1]
        self._dtype = np.dtype(np.int32 if self.rows < 2**31 else np.int64)
        self._alone = len(groups) == 1

    def join(self, ids: Sequence[Ids]) -> Joint:
        """Number the ids of every group."""
        if self._alone:
            return Joint(ids[0], [0, len(ids[0])])
        edges = [0]
        for part in ids:
            edges.append(edges[-1] + len(part))
        joint = np.empty(edges[-1], self._dtype)
        for part, base, start, stop in zip(ids, self._bases, edges, edges[1:], strict=False):
            np.add(part, base, out=joint[start:stop], dtype=self._dtype, casting="unsafe")
        return Joint(joint, edges)

    def split(self, part: Part, edges: Sequence[int]) -> list[Part]:
        """Return each group's part, with its own ids and positions, of one in the numbering of all.

        edges  where each group's ids begin among those that the positions are of
        """
        if self._alone:
            return [part]
        at = edges if part.positions is None else np.searchsorted(part.positions, edges).tolist()
        parts = []
        for group, base in enumerate(self._bases[:-1]):
            ids = part.ids[at[group] : at[group + 1]]
            positions = None
            if part.positions is not None:
                positions = part.positions[at[group] : at[group + 1]] - np.int32(edges[group])
            parts.append(Part(ids - ids.dtype.type(base) if base else ids, positions))
        return parts
