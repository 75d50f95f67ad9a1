"""`EmbeddingCache`: the hot rows of host tables on the device, with a plan that knows the coming batches."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostdev.cache import bound
from hostdev.cache.optimum import fits, optimal, visits
from hostdev.cache.options import WINDOW, rows_of
from hostdev.cache.planner import Ids, Plan, Planner, Positions, Statistics, planner_bytes
from hostdev.cache.prices import Costs
from hostdev.cache.slots import CachedTable, DeviceSlots
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, gib, row_bytes
from hostdev.core.primitive import OpLog, Primitive
from hostdev.device.backend import is_accelerator, require, room_for_cache
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.unique import count_uses

_MOST_RECORDED = 1 << 24  # unique ids, for the comparison with the optimum
_MOST_VISITS = 1 << 29  # of rows, to find it: some 20 seconds
_AT_ONCE_BYTES = 1 << 26  # to the host, or from there


class CacheTooLargeError(UserError):
    """The device has no room for the slots."""


class EmbeddingCache:
    """Keeps hot rows of host tables, weights and optimizer slots, on the device.

    A row has one owner: the host, or a slot of the device from the end of the step that admits it to the end of the
    step that evicts it; then it is written back. `write_back` brings the host up to date, and the slots stay. Results
    are those without a cache, to the bit. Device memory: capacity x (D x (1 + slots)) x 4 bytes a table, and the rows
    of the batches on their way.

    tables         one host table, or several that share ids and so one plan
    capacity_rows  slots, a number or a share of the table such as "5%"; 0 to all, and smaller than a batch is fine
    policy         "lookahead", "lru", "lfu" or "static"; see `hostdev.cache.planner.Planner`
    device         of the slots
    window         batches to look ahead
    counts         [V], how often each row is used, in any unit: "static" needs it, and "lookahead" moves fewer bytes
    record         keep the ids of the first batches: `summary` then has the offline optimum over these, at most 16
                   million unique ids, and fewer where slots or batches are so many that it would take minutes
    log            where the planning's durations go

    One thread at a time may call. While a row is cached its host copy is stale: call `write_back` before reading the
    tables, and before changing them by other means, then `refresh` after. Raises CacheTooLargeError where the slots do
    not fit into the device's free memory, of which an accelerator keeps a tenth, and at least 256 MiB, for the rest of
    the training.
    """

    def __init__(
        self,
        tables: CachedTable | Sequence[CachedTable],
        capacity_rows: int | str,
        policy: str = "lookahead",
        device: torch.device | str = "cpu",
        window: int = WINDOW,
        *,
        counts: npt.NDArray[Any] | None = None,
        record: bool = False,
        log: OpLog | None = None,
    ) -> None:
        self.tables = list(tables) if isinstance(tables, Sequence) else [tables]
        rows = {table.rows for table in self.tables}
        if len(rows) != 1:
            raise ValueError(f"tables that share a cache share their ids; these have {sorted(rows)} rows")
        self.rows = rows.pop()
        capacity = rows_of(capacity_rows, self.rows)
        self.device = require(device)
        _require(capacity, self.tables, self.device)
        needed, free = planner_bytes(self.rows, capacity), available_bytes()
        if needed > free:
            raise UserError(f"the cache's plan needs {gib(needed)}, but {gib(free)} of host memory are free")
        self._row_bytes = row_bytes((table.dim, table.optimizer) for table in self.tables)
        self._costs = Costs.of(*self._row_bytes)
        self.planner = Planner(self.rows, capacity, policy, window=window, counts=counts, costs=self._costs)
        self.slots = [DeviceSlots(capacity, table, self.device) for table in self.tables]
        self._resident = [np.full(capacity, -1, np.int32) for _ in self.tables]  # the row in each slot, after steps
        self._exchanged: deque[tuple[Plan, int]] = deque()  # by steps, and not yet in `_resident`
        self._leaving: dict[tuple[int, int], tuple[Plan, Callable[[], None]]] = {}  # on their way to the host
        self._settling = threading.Lock()
        self.counting = _on_host("CacheCount", count_uses, log)
        self.announcing = _on_host("CacheAnnounce", self.planner.announce, log)
        self.planning = _on_host("CachePlan", self.planner.plan, log)
        self._changed = False  # on the device, since the last writing back
        self._recorded: list[tuple[Ids, Positions]] = []
        self._recording = record
        self._recorded_ids = self._visits = 0
        self._at_first = Statistics()  # over the recorded batches

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.planner.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the slots on the device."""
        return sum(4 * (slots.block.numel() + slots.row_slots.numel()) for slots in self.slots)

    @property
    def window(self) -> int:
        """Batches that are announced ahead of the one planned; 0 for a policy that does not look ahead."""
        return self.planner.window

    def announce(self, ids: Ids, inverse: Positions) -> None:
        """Take in the next batch of the future, as `unique` returns it; each id in [0, rows) (not checked)."""
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
        """Note that a plan's exchange has happened in the slots of the table of this number.

        bring_back  writes the rows that left the slots to the host; called if an error comes before `left` does
        """
        self._leaving[id(plan), table] = plan, bring_back
        self._exchanged.append((plan, table))  # a step must not wait for more
        self._changed = True

    def left(self, plan: Plan, table: int) -> None:
        """Note that the rows that a plan evicted have been written to the host table of this number."""
        self._leaving.pop((id(plan), table), None)

    def _bring_back(self) -> None:
        """Write what has left the slots to the host, in the order in which it did, where nobody else is going to."""
        for key, (_, bring_back) in list(self._leaving.items()):
            bring_back()
            self._leaving.pop(key, None)

    def _settle(self) -> None:
        """Take down which rows the exchanges of the steps so far have moved."""
        with self._settling:
            while self._exchanged:
                plan, table = self._exchanged[0]
                self._resident[table][plan.evicted_slots] = -1
                self._resident[table][plan.admitted_slots] = plan.ids[plan.admitted]
                self._exchanged.popleft()

    def write_back(self) -> None:
        """Write the cached rows to the host tables, whose rows are then up to date; the slots go on.

        Batches that were announced or planned, and not stepped, are forgotten.
        """
        self.write_back_rows()
        self._forget()

    def _forget(self) -> None:
        """Set the planner back to what the slots hold; batches announced or planned, and not stepped, are forgotten."""
        self._settle()
        if any(not np.array_equal(other, self._resident[0]) for other in self._resident[1:]):
            self.write_back_rows()  # an error came between the tables' steps
            for resident in self._resident:
                resident[:] = -1
        if len(self.planner) or not self.planner.holds(self._resident[0]):
            self.planner.restore(self._resident[0])
        del self._recorded[self.planner.statistics.batches :]

    def write_back_rows(self) -> None:
        """Write the cached rows to the host tables; what is announced or planned stays so."""
        if not self._changed:
            return
        self._bring_back()
        self._settle()
        for table, slots, ids, part in self._parts():
            block, row_slots = slots.read(torch.from_numpy(part).to(self.device))
            run_tasks(table.write_rows_tasks(ids, block.cpu().numpy(), row_slots.cpu().numpy()))
        self._changed = False

    def refresh(self, changed: CachedTable | None = None, rows: Ids | None = None) -> None:
        """Bring the cached rows up to date with the host tables, which others may have changed; after `write_back`.

        changed  the only table that has been changed; None: all may have been
        rows     the only rows that have been, int32 or int64 [N]; None: all may have been
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
            run_tasks(table.read_rows_tasks(ids, *values))
            slots.write(*(torch.from_numpy(array).to(self.device) for array in (part.astype(np.int64), *values)))

    def _parts(self) -> Iterator[tuple[CachedTable, DeviceSlots, Ids, Positions]]:
        """Yield for each table some slots at a time that have rows, with these; as of the steps taken down."""
        for table, slots, resident in zip(self.tables, self.slots, self._resident, strict=True):
            taken = np.flatnonzero(resident >= 0).astype(np.int32)
            step = max(1, _AT_ONCE_BYTES // (4 * max(1, slots.block[:1].numel())))
            for start in range(0, len(taken), step):
                part = taken[start : start + step]
                yield table, slots, resident[part], part

    @property
    def optimum_steps(self) -> int:
        """How often `summary` calls its `progress` to find the optimum, at most."""
        return len(self._recorded) + 2 * bound.most_steps(self._unique)

    @property
    def _unique(self) -> int:
        return sum(len(ids) for ids, _ in self._recorded)

    def _no_optimum(self) -> str | None:
        """Return why the optimum cannot be found; None: it can."""
        if not self._unique:
            return "no batch was recorded for it"
        batches = self._recorded
        enough = fits(batches, self.rows, self.capacity) and bound.fits(self._unique, len(batches))
        return None if enough else "too little free memory"

    def summary(
        self, *, optimum: bool = True, host: Costs | None = None, progress: Callable[[], object] = lambda: None
    ) -> dict[str, Any]:
        """Return the statistics, and beside them what the best cache could have done on the first batches.

        optimum   compute it, which takes up to a minute, unless memory is short or nothing was recorded, which
                  `no_optimum` then says; over `optimal_batches` batches, those that were recorded, on which the cache
                  itself had `hit_rate_of_these`, moved `bytes_of_these` and saved `host_us_saved_of_these`, its plan
                  not counted: the highest hit rate, and, each of another cache, the fewest bytes, both ways, and the
                  most time
        host      nanoseconds of the host for a row that passes by, is admitted, is evicted; without it, what it saves,
                  less its plan's time, is null
        progress  called now and then on the way to the optimum; what it raises is raised
        """
        total, these = self.planner.statistics, self._at_first
        down, up = total.bytes_moved(*self._row_bytes)
        why = self._no_optimum() if optimum else "nobody has asked for it"
        best = uses = least = None
        if why is None:
            best = optimal(self._recorded, self.rows, self.capacity, progress=progress)
            uses = bound.uses_of([ids for ids, _ in self._recorded])
            least = round(bound.least_cost(uses, self.capacity, self._costs, progress=progress))
        return {
            "rows": self.capacity,
            "policy": self.planner.policy,
            "window": self.window,
            "batches": total.batches,
            "hit_rate": round(total.hit_rate, 6),
            "unique_hit_rate": round(total.unique_hit_rate, 6),
            "optimal_hit_rate": round(best.hit_rate, 6) if best is not None else None,
            "optimal_batches": best.batches if best is not None else None,
            "no_optimum": why,
            "hit_rate_of_these": round(these.hit_rate, 6),
            "admitted": total.admitted,
            "evicted": total.evicted,
            "bypassed": total.passed,
            "bytes_to_device": down,
            "bytes_to_host": up,
            "least_bytes": least,
            "bytes_of_these": sum(these.bytes_moved(*self._row_bytes)),
            **self._host_time(host, uses, progress),
        }

    def _host_time(
        self, host: Costs | None, uses: bound.Uses | None, progress: Callable[[], object]
    ) -> dict[str, float | None]:
        """Return what the cache saves the host, and at most could on the recorded batches, in microseconds."""
        saved = most = of_these = None
        if host is not None:
            spent = sum(op.times.durations().total for op in (self.counting, self.announcing, self.planning))
            saved = _saved(self.planner.statistics, host) - spent
            of_these = _saved(self._at_first, host)
            if uses is not None:
                most = host.passed * len(uses.batches)
                most -= bound.least_cost(uses, self.capacity, host, progress=progress)
        names = "host_us_saved", "host_us_saved_of_these", "most_host_us_saved"
        values = saved, of_these, most
        return {name: None if one is None else round(one / 1e3, 1) for name, one in zip(names, values, strict=True)}


def _saved(total: Statistics, host: Costs) -> float:
    return host.passed * total.unique - host.paid(total.passed, total.admitted, total.evicted)


def _on_host(name: str, run: Callable[..., Any], log: OpLog | None) -> Primitive:
    return Primitive(name, run, scope="cache", log=log).add_prim_attr("primitive_target", "CPU")


def _require(capacity: int, tables: Sequence[CachedTable], device: torch.device) -> None:
    needed = capacity * row_bytes((table.dim, table.optimizer) for table in tables)[1]
    room = room_for_cache(device)
    if room is not None and needed > room:
        kept = " for one, beside a tenth and at least 256 MiB for the rest" if is_accelerator(device) else ""
        raise CacheTooLargeError(
            f"a cache of {capacity} rows needs {needed} bytes ({gib(needed)}), but {room} bytes ({gib(room)}) of "
            f"{device} memory are free{kept}; use fewer rows"
        )
