"""`EmbeddingCache`: hot rows of host tables on the device, planned by looking at the next batches."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostdev.cache import bound
from hostdev.cache.bound import optimal, optimum_fits, visits
from hostdev.cache.options import POLICIES, WINDOW, rows_of
from hostdev.cache.plan import Plan, Statistics
from hostdev.cache.planner import Planner, planner_bytes
from hostdev.cache.planning import LOOKAHEAD
from hostdev.cache.prices import Costs
from hostdev.cache.slots import CachedTable, DeviceSlots
from hostdev.core.errors import UserError
from hostdev.core.memory import format_bytes, require_memory, row_bytes
from hostdev.core.primitive import OpLog, Primitive
from hostdev.device.backend import get_cache_room, is_accelerator, require
from hostdev.kernels.arrays import AnyIds, Positions
from hostdev.kernels.unique import count_occurrences

_MOST_RECORDED = 1 << 24  # unique ids that are kept to find the optimum
_MOST_VISITS = 1 << 29  # rows visited to find the optimum, which takes about 20 seconds
_AT_ONCE_BYTES = 1 << 26  # bytes copied to or from the host at a time


class CacheTooLargeError(UserError):
    """A cache's slots do not fit into the device's free memory."""


class EmbeddingCache:
    """A cache that keeps hot rows of host tables, with their optimizer state, on the device.

    A row has one owner: a device slot from the end of the step that admits it to the end of the step that evicts it,
    otherwise the host. An evicted row is written back. `write_back` updates the host, and rows stay cached. Results
    are bit-identical to those without a cache. Device memory per table: capacity x (D x (1 + S) + R) x 4 bytes, for S
    optimizer state columns and R values of per-row state, plus the rows of in-flight batches.

    Only one thread at a time may use a cache, except that `stepped` and `left` may run while another thread plans. The
    host copy of a cached row is stale: call `write_back` before you read the tables or change them by other means;
    after a change call `refresh`.

    Args:
        tables: One host table, or several that share ids and therefore one plan.
        capacity_rows: Number of slots, or a share of the table's rows such as "5%"; may be smaller than a batch.
        policy: "lookahead", "lru", "lfu" or "static"; see `hostdev.cache.planner.Planner`.
        device: The device that holds the slots.
        window: Number of batches to look ahead.
        counts: How often each row is used, one number per row, in any unit: required by "static"; helps "lookahead" to
            move fewer bytes.
        record: Whether to keep the ids of the first batches, for the offline optimum in `summary`: at most 16 million
            unique ids, and fewer if the search would otherwise take minutes.
        log: Receives the durations of planning.

    Raises:
        CacheTooLargeError: The slots do not fit into the device's free memory. On an accelerator, a tenth of that
            memory, and at least 256 MiB, is reserved for the rest of the training.
    """

    def __init__(
        self,
        tables: CachedTable | Sequence[CachedTable],
        capacity_rows: int | str,
        policy: str = "lookahead",
        device: torch.device | str = "cpu",
        window: int = WINDOW,
        *,
        counts: npt.NDArray[np.integer] | None = None,
        record: bool = False,
        log: OpLog | None = None,
    ) -> None:
        self.tables = list(tables) if isinstance(tables, Sequence) else [tables]
        rows = {table.row_space for table in self.tables}
        if len(rows) != 1:
            raise ValueError(f"tables that share a cache must have the same number of rows; these have {sorted(rows)}")
        self.rows = rows.pop()
        capacity = rows_of(capacity_rows, self.rows)
        self.device = require(device)
        _require(capacity, self.tables, self.device)
        require_memory(planner_bytes(self.rows, capacity), "the cache's plan", "use a smaller cache")
        self._row_bytes = row_bytes((table.dim, table.optimizer) for table in self.tables)
        self._costs = Costs.of(*self._row_bytes)
        self.planner = Planner(self.rows, capacity, policy, window=window, counts=counts, costs=self._costs)
        self.slots = [DeviceSlots(capacity, table, self.device) for table in self.tables]
        self._resident = [np.full(capacity, -1, np.int32) for _ in self.tables]  # the row in each slot, -1 if free
        self._exchanged: deque[tuple[Plan, int]] = deque()  # swaps that are not in `_resident` yet
        self._leaving: dict[tuple[int, int], tuple[Plan, Callable[[], None]]] = {}  # evicted rows not yet on the host
        self._settling = threading.Lock()
        self.counting = _on_host("CacheCount", count_occurrences, log)
        self.announcing = _on_host("CacheAnnounce", self.planner.announce, log)
        self.planning = _on_host("CachePlan", self.planner.plan, log)
        self._changed = False  # whether cached rows have changed since the last write-back
        self._recorded: list[tuple[AnyIds, Positions]] = []
        self._recording = record
        self._recorded_ids = self._visits = 0
        self._at_first = Statistics()  # statistics of the recorded batches

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.planner.capacity

    @property
    def nbytes(self) -> int:
        """Device memory of the slots in bytes."""
        return sum(4 * (slots.block.numel() + slots.row_slots.numel()) for slots in self.slots)

    @property
    def window(self) -> int:
        """Number of batches announced in addition to the one that is planned; 0 for a policy without lookahead."""
        return self.planner.window

    def describe(self) -> str:
        """Return a description of the cache, which must be equal on all ranks."""
        return f"a cache that looks {self.window} batches ahead"

    def announce(self, ids: AnyIds, inverse: Positions) -> None:
        """Announce the next batch by the two results of `kernels.unique` for its ids, which must be in 0..rows - 1."""
        if not self._recording and self.planner.policy == POLICIES[LOOKAHEAD]:  # needs only the sum of uses
            self.announcing(ids, len(inverse))
            return
        uses = self.counting(inverse, len(ids))
        self.announcing(ids, uses)
        if self._recording:
            self._recorded_ids += len(ids)
            self._visits += visits(len(ids), self.rows, self.capacity)
            self._recording = self._recorded_ids <= _MOST_RECORDED and self._visits <= _MOST_VISITS
        if self._recording:
            self._recorded.append((ids, uses))

    def plan(self) -> Plan:
        """Plan the earliest announced batch."""
        self._settle()
        plan: Plan = self.planning()
        if self.planner.statistics.batches <= len(self._recorded):
            self._at_first = replace(self.planner.statistics)
        return plan

    def stepped(self, plan: Plan, table: int, bring_back: Callable[[], None]) -> None:
        """Record that, in the slots of table number `table`, a plan's admitted rows have replaced its evicted rows.

        Args:
            plan: The plan.
            table: The table's number.
            bring_back: Called without arguments if an error occurs before `left` is called; writes the evicted rows to
                the host.
        """
        self._leaving[id(plan), table] = plan, bring_back
        self._exchanged.append((plan, table))  # applied later: a step must not wait
        self._changed = True

    def left(self, plan: Plan, table: int) -> None:
        """Record that a plan's evicted rows were written to host table number `table`."""
        self._leaving.pop((id(plan), table), None)

    def holds(self, rows: AnyIds) -> npt.NDArray[np.bool_]:
        """Return which rows [N] are cached or on their way to the host, bool [N].

        No unfinished batch may use the rows.
        """
        self._settle()
        held: npt.NDArray[np.bool_] = np.isin(rows, np.concatenate(self._resident))
        for plan, _ in list(self._leaving.values()):
            held |= np.isin(rows, plan.evicted)
        return held

    def discard(self, is_unused: Callable[[AnyIds], npt.NDArray[np.bool_]]) -> None:
        """Free the slots of rows that the table no longer uses.

        The caller must call `write_back` before, and `refresh` after.

        Args:
            is_unused: Returns whether each of these rows [N] is unused, bool [N].
        """
        self._settle()
        rows = self._resident[0]
        kept = rows[rows >= 0]
        unused = is_unused(kept)
        if unused.any():
            kept = kept[~unused]
            for resident in self._resident:
                resident[: len(kept)], resident[len(kept) :] = kept, -1  # rows move to other slots
            self.planner.restore(self._resident[0])

    def _bring_back(self) -> None:
        """Write to the host, in order of eviction, the evicted rows for which `left` has not been called."""
        for key, (_, bring_back) in list(self._leaving.items()):
            bring_back()
            self._leaving.pop(key, None)

    def _settle(self) -> None:
        """Update `_resident`, the row in each slot, with the swaps of the steps so far."""
        with self._settling:
            while self._exchanged:
                plan, table = self._exchanged[0]
                self._resident[table][plan.evicted_slots] = -1
                self._resident[table][plan.admitted_slots] = plan.ids[plan.admitted]
                self._exchanged.popleft()

    def write_back(self) -> None:
        """Write the cached rows to the host tables; the rows stay cached.

        Batches that were announced or planned, but whose step is not finished, are discarded.
        """
        self.write_back_rows()
        self._forget()

    def _forget(self) -> None:
        """Reset the planner to the slots' content, and discard announced batches whose step is not finished."""
        self._settle()
        if any(not np.array_equal(other, self._resident[0]) for other in self._resident[1:]):
            self.write_back_rows()  # an error occurred after only some tables were swapped
            for resident in self._resident:
                resident[:] = -1
        if len(self.planner) or not self.planner.holds(self._resident[0]):
            self.planner.restore(self._resident[0])
        del self._recorded[self.planner.statistics.batches :]

    def write_back_rows(self) -> None:
        """Write the cached rows to the host tables; keep announced and planned batches."""
        if not self._changed:
            return
        self._bring_back()
        self._settle()
        for table, slots, ids, part in self._parts():
            block, row_slots = slots.read(torch.from_numpy(part).to(self.device))
            table.stored.write(ids, block.cpu().numpy(), row_slots.cpu().numpy())
        self._changed = False

    def refresh(self, changed: CachedTable | None = None, rows: AnyIds | None = None) -> None:
        """Reload cached rows from host tables that were changed after `write_back`.

        Args:
            changed: The only table that may have changed, or None for all tables.
            rows: The only rows that may have changed, int32 or int64 [N], or None for all rows.
        """
        self._settle()
        for table, slots, ids, part in self._parts():
            if changed is not None and table is not changed:
                continue
            if rows is not None:
                chosen = np.isin(ids, rows)
                ids, part = ids[chosen], part[chosen]
            if not len(part):
                continue
            shapes = [(len(part), *values.shape[1:]) for values in (slots.block, slots.row_slots)]
            values = [np.empty(shape, np.float32) for shape in shapes]
            table.stored.read_stored(ids, *values)
            slots.write(*(torch.from_numpy(array).to(self.device) for array in (part.astype(np.int64), *values)))

    def _parts(self) -> Iterator[tuple[CachedTable, DeviceSlots, AnyIds, Positions]]:
        """Yield chunks of each table's occupied slots: table, slots, row ids, slot numbers."""
        for table, slots, resident in zip(self.tables, self.slots, self._resident, strict=True):
            taken = np.flatnonzero(resident >= 0).astype(np.int32)
            step = max(1, _AT_ONCE_BYTES // (4 * max(1, slots.block[:1].numel())))
            for start in range(0, len(taken), step):
                part = taken[start : start + step]
                yield table, slots, resident[part], part

    @property
    def _unique(self) -> int:
        return sum(len(ids) for ids, _ in self._recorded)

    def _no_optimum(self) -> str | None:
        """Return why the optimum cannot be found, or None if it can."""
        if not self._unique:
            return "no batch was recorded for it"
        batches = self._recorded
        enough = optimum_fits(batches, self.rows, self.capacity) and bound.fits(self._unique, len(batches))
        return None if enough else "too little free memory"

    def summary(
        self, *, optimum: bool = True, host: Costs | None = None, progress: Callable[[], object] = lambda: None
    ) -> dict[str, Any]:  # Any: numbers, text or None
        """Return the statistics, and the results of the best possible caches on the recorded batches.

        The first `optimal_batches` batches were recorded. On these, this cache had `hit_rate_of_these`, moved
        `bytes_of_these` and saved `host_us_saved_of_these` (not counting planning). The optimum is the highest hit
        rate, the fewest bytes in both directions, and the most time saved; each may come from a different cache.

        Args:
            optimum: Whether to search for the optimum, which takes up to a minute; if it cannot be found, `no_optimum`
                gives the reason.
            host: Host nanoseconds to bypass, admit or evict a row; without `host`, saved times are None.
            progress: Called during the search; its exceptions propagate.
        """
        total = self.planner.statistics
        down, up = total.bytes_moved(*self._row_bytes)
        found = {
            "rows": self.capacity,
            "policy": self.planner.policy,
            "window": self.window,
            "batches": total.batches,
            "hit_rate": round(total.hit_rate, 6),
            "unique_hit_rate": round(total.unique_hit_rate, 6),
            "admitted": total.admitted,
            "evicted": total.evicted,
            "bypassed": total.passed,
            "bytes_to_device": down,
            "bytes_to_host": up,
            "host_us_saved": None if host is None else _us(self._saved(host)),
        }
        return found | self._optimum(host, progress) if optimum else found

    def _optimum(self, host: Costs | None, progress: Callable[[], object]) -> dict[str, Any]:
        """Return the results of the best possible caches, and of this cache, on the recorded batches."""
        these, why = self._at_first, self._no_optimum()
        best = least = most = None
        if why is None:
            best = optimal(self._recorded, self.rows, self.capacity, progress=progress)
            uses = bound.uses_of([ids for ids, _ in self._recorded])
            least = round(bound.least_cost(uses, self.capacity, self._costs, progress=progress))
            if host is not None:
                most = host.passed * len(uses.batches)
                most -= bound.least_cost(uses, self.capacity, host, progress=progress)
        return {
            "optimal_hit_rate": round(best.hit_rate, 6) if best is not None else None,
            "optimal_batches": best.batches if best is not None else None,
            "no_optimum": why,
            "hit_rate_of_these": round(these.hit_rate, 6),
            "least_bytes": least,
            "bytes_of_these": sum(these.bytes_moved(*self._row_bytes)),
            "host_us_saved_of_these": None if host is None else _us(_saved(these, host)),
            "most_host_us_saved": None if most is None else _us(most),
        }

    def _saved(self, host: Costs) -> float:
        """Return the host nanoseconds that the cache has saved, not counting its planning."""
        spent = sum(op.times.total for op in (self.counting, self.announcing, self.planning))
        return _saved(self.planner.statistics, host) - spent


class NoCache(EmbeddingCache):
    """Takes the place of a cache for tables that have none: it has no slots, and the methods below do nothing."""

    def __init__(self) -> None:
        self.tables, self.slots = [], []

    @property
    def window(self) -> int:
        """Number of batches announced ahead: none."""
        return 0

    def describe(self) -> str:
        """Return a description of the cache, which must be equal on all ranks."""
        return "no cache"

    def stepped(self, plan: Plan, table: int, bring_back: Callable[[], None]) -> None:
        """See `EmbeddingCache.stepped`."""

    def left(self, plan: Plan, table: int) -> None:
        """See `EmbeddingCache.left`."""

    def write_back(self) -> None:
        """See `EmbeddingCache.write_back`."""

    def write_back_rows(self) -> None:
        """See `EmbeddingCache.write_back_rows`."""

    def refresh(self, changed: CachedTable | None = None, rows: AnyIds | None = None) -> None:
        """See `EmbeddingCache.refresh`."""


NO_CACHE = NoCache()


def _us(nanoseconds: float) -> float:
    return round(nanoseconds / 1e3, 1)


def _saved(total: Statistics, host: Costs) -> float:
    return host.passed * total.unique - host.paid(total.passed, total.admitted, total.evicted)


def _on_host(name: str, run: Callable[..., Any], log: OpLog | None) -> Primitive:
    return Primitive(name, run, scope="cache", log=log).add_prim_attr("primitive_target", "CPU")


def _require(capacity: int, tables: Sequence[CachedTable], device: torch.device) -> None:
    needed = capacity * row_bytes((table.dim, table.optimizer) for table in tables)[1]
    room = get_cache_room(device)
    if room is not None and needed > room:
        kept = " for it (a tenth of the memory, and at least 256 MiB, is reserved)" if is_accelerator(device) else ""
        raise CacheTooLargeError(
            f"a cache of {capacity} rows needs {needed} bytes ({format_bytes(needed)}), but {room} "
            f"bytes ({format_bytes(room)}) of "
            f"{device} memory are free{kept}; use a cache of fewer rows"
        )
