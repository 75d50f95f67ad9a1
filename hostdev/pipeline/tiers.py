"""Tables on disk in the pipeline: which of their rows are in memory while batches use them.

A batch's rows are pinned when it is planned, and read at once if they are on disk; without a cache on the device, this
happens a few batches earlier. They are unpinned when the batch's update is done. A planner that knows the coming
batches decides which rows stay in memory afterwards.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostdev.cache.planner import Planner
from hostdev.core.signals import deferred, uninterruptible
from hostdev.host.disk.frame_pool import count_kept
from hostdev.host.disk.tier import Pinned, Tier
from hostdev.kernels.arrays import AnyIds
from hostdev.pipeline.batch_ids import Group, PlannedGroup, UniqueBatch

_AHEAD = 3  # number of batches whose rows are read before their turn


class TableTier:
    """A table on disk: its rows in memory, and the planner that decides which of them stay.

    Args:
        group: The number of the table's group.
        tier: The table's rows.
        after_plan: Whether a cache decides which of a batch's rows the table needs.
        window: Number of batches that are announced in addition to the next one.
    """

    def __init__(self, group: int, tier: Tier, after_plan: bool, window: int) -> None:
        self.group, self.tier, self.after_plan, self._window = group, tier, after_plan, window
        self._planner: Planner | None = None
        self._announced = 0  # number of the last announced batch

    def announce(self, batches: Sequence[UniqueBatch]) -> None:
        """Announce the batches that were not announced yet, in order, as far as the window reaches."""
        for batch in batches:
            if batch.number <= self._announced:
                continue
            group = batch.groups[self.group]
            if self._planner is None:
                kept = count_kept(self.tier.count, self.tier.rows, len(group.ids))
                self._planner = Planner(self.tier.rows, kept, "nearest", window=self._window)
            if len(self._planner) > self._planner.window:
                return
            self._planner.announce(group.ids, len(group.inverse))
            self._announced = batch.number

    def plan(self) -> None:
        """Decide which rows stay in memory after the earliest announced batch."""
        if self._planner is not None and len(self._planner):
            plan = self._planner.plan()
            self.tier.keep(plan.ids[plan.admitted])
            self.tier.let_go(plan.ids[plan.passed])
            self.tier.let_go(plan.evicted)

    def end_pass(self) -> None:
        """Forget batches that were announced but not planned, and undo what an interrupt has left incomplete."""
        if self._planner is not None and not self._planner.is_settled:
            planner, slot_ids = self._planner, self._planner.slot_ids
            uninterruptible(lambda: planner.restore(slot_ids))


class BatchPins:
    """The rows of a batch that are pinned, until `release`."""

    def __init__(self, owner: "PassPins", number: int) -> None:
        self._owner, self.number = owner, number
        self.held: list[tuple[TableTier, Pinned]] = []

    def await_rows(self) -> None:
        """Wait until all rows are in memory; raise UserError if one cannot be read."""
        for table, pinned in self.held:
            table.tier.await_rows(pinned)

    def release(self) -> None:
        """Unpin the rows; calls after the first have no effect."""
        self._owner.release(self)


class PassPins:
    """The pinned rows of a pass's batches.

    The thread that looks batches up calls all methods but `release` and `close`.

    Args:
        tables: The tables on disk.
        update: Whether the pass updates the tables.
    """

    def __init__(self, tables: Sequence[TableTier], update: bool) -> None:
        self._tables, self._update = tables, update
        self._batches: dict[int, BatchPins] = {}
        self._lock = threading.Lock()
        self._held: set[BatchPins] = set()
        self.released = 0  # number of batches whose rows were unpinned

    def announce(self, batches: Sequence[UniqueBatch]) -> None:
        """Announce batches that are not planned yet, and pin the rows of the first ones as far as there is room."""
        if not self._update:
            return
        for table in self._tables:
            table.announce(batches)
        for batch in batches[: 1 + _AHEAD]:
            for table in self._tables:
                if not table.after_plan and not self._try_pin(table, batch.number, batch.groups[table.group].ids):
                    return

    def try_pin(self, number: int, groups: Sequence[PlannedGroup]) -> bool:
        """Pin all rows that a planned batch needs; return False if `release` must be called first."""
        return all(self._try_pin(table, number, _get_rows(groups[table.group])) for table in self._tables)

    def _try_pin(self, table: TableTier, number: int, rows: AnyIds) -> bool:
        pins = self._batches.setdefault(number, BatchPins(self, number))
        if any(held is table for held, _ in pins.held):
            return True
        change = self._update
        pinned = table.tier.try_pin(rows, change=change, reserve=not change)
        if pinned is None and self._is_used_before(table, number):
            return False
        if pinned is None:  # no earlier batch will unpin rows: exceed the memory limit
            pinned = table.tier.try_pin(rows, change=change, exceed=True)
            assert pinned is not None
        with self._lock:
            pins.held.append((table, pinned))
            self._held.add(pins)
        if self._update:
            table.plan()
        return True

    def _is_used_before(self, table: TableTier, number: int) -> bool:
        """Return whether an earlier batch of this pass has pinned rows of a table."""
        with self._lock:
            return any(pins.number < number and any(held is table for held, _ in pins.held) for pins in self._held)

    def has_released(self, before: int) -> bool:
        """Return whether more than `before` batches have been released."""
        return self.released > before

    def take(self, number: int) -> BatchPins:
        """Return the pinned rows of a batch, for its owner to release."""
        return self._batches.pop(number)

    def release(self, pins: BatchPins) -> None:
        """Unpin a batch's rows."""
        with deferred():
            with self._lock:
                held, pins.held = pins.held, []
                self._held.discard(pins)
                self.released += 1
            for table, pinned in held:
                table.tier.unpin(pinned)

    def close(self) -> None:
        """Unpin all rows; the threads of the pass have ended."""
        for pins in list(self._held):
            self.release(pins)
        if self._update:
            for table in self._tables:
                table.end_pass()


def find_tiers(groups: Sequence[Group]) -> list[TableTier]:
    """Return the tables of the groups that are on disk."""
    pairs: list[tuple[int, Any]] = [(n, one.table) for n, group in enumerate(groups) for one in group.embeddings]
    return [
        TableTier(number, table.storage.tier, groups[number].is_cached, table.window)
        for number, table in pairs
        if table.capabilities.on_disk
    ]


def _get_rows(group: PlannedGroup) -> AnyIds:
    """Return the rows that a batch reads or writes on the host, each once."""
    plan = group.plan
    return group.ids if plan is None else np.concatenate([plan.reads, plan.evicted])
