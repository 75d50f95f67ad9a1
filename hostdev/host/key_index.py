"""The keys of a table by key: which have a row, which wait for one, and what a batch changes in this.

The state is a function of the sequence of steps and of the seed. A row's number is private: it depends on which rows
are free, and nothing else may depend on it.

Steps are planned ahead. `plan` applies what a step changes and records how to undo it; `commit` makes it final once the
step is done, `rollback` undoes steps that are never taken.

Shapes: U distinct keys of a step, V rows of the table's address space.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import TableFullError
from hostdev.core.key_rules import Admission, Eviction, KeyUse
from hostdev.core.keys import INITIAL, SHARED, ZEROS, decayed
from hostdev.host.committed_keys import CommittedKeys, newest
from hostdev.host.key_options import LEAST_SPARE, MOST_KEYS, MOST_SPARE, advise_full, require_answer
from hostdev.host.key_plan import (
    NO_KEYS,
    NO_ROWS,
    FreeRows,
    KeyCount,
    PlannedAheadError,
    PlannedKeys,
    Total,
    Undo,
    choose_least,
)
from hostdev.kernels.arrays import Keys, RowNumbers, copied, reserved
from hostdev.kernels.key_directory import EMPTY, MOST_ROWS, KeyDirectory
from hostdev.kernels.key_use import CountMinSketch, KeyCounts, find_and_use, restore, split, use
from hostdev.kernels.shards import first_part

Steps = npt.NDArray[np.uint32]
Norms = Callable[[RowNumbers], npt.NDArray[np.float64]]

_LEAST_SPARE, _MOST_SPARE = LEAST_SPARE, MOST_SPARE
_DEAD = 0  # in `_last`: the row has no key
_MOST = 2**32 - 1  # largest number of uses


class KeyIndex(FreeRows):
    """Maps the keys of a table to rows, and decides which keys have one.

    Args:
        name: The table's name.
        capacity: Maximum number of keys with a row.
        admit: When a key gets a row, or None for at once.
        evict: When a key loses its row, or None for never.
        seed: Seed of `Probability`.
        unknown: With INITIAL, each key without a row gets a row for one step; with ZEROS, all of them share one row for
            the step. These rows are free again after the step.
        part: (rank, ranks) if the table's keys are divided among ranks (`kernels.shards`); `capacity` is that of all
            ranks together. None for the whole table.
        require_memory: Called with a number of rows that are about to be used for the first time, and the number of
            keys; raises UserError if there is no memory for the rows.

    Attributes:
        keys: int64 [V], the key of each row; undefined for a row without a key.
        step: Number of finished steps.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        admit: Admission | None = None,
        evict: Eviction | None = None,
        *,
        seed: int = 0,
        unknown: str = SHARED,
        part: tuple[int, int] | None = None,
        require_memory: Callable[[int, int], None] = lambda rows, keys: None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"table {name!r}: the capacity must be at least 1 row, not {capacity}")
        if capacity > MOST_KEYS:
            raise ValueError(f"table {name!r}: the capacity must be at most {MOST_KEYS:,} rows, not {capacity:,}")
        self.name, self.capacity, self.admit, self.evict, self.seed = name, capacity, admit, evict, seed
        self.directory = KeyDirectory()
        self._waiting = KeyCounts()
        self._sketch: CountMinSketch | None = None
        if admit is not None and admit.counts and admit.sketch_bytes:
            rank, ranks = part or (0, 1)
            ends = first_part(rank, ranks), first_part(rank + 1, ranks)
            self._sketch = CountMinSketch(admit.sketch_bytes, seed, *ends)
        self._unknown, self._is_first = unknown, part is None or part[0] == 0
        spare = max(_LEAST_SPARE, min(capacity, _MOST_SPARE)) if unknown != INITIAL else _MOST_SPARE
        super().__init__(min(capacity + spare, MOST_ROWS), require_memory)
        self.keys: Keys = reserved((self.row_space,), np.int64)
        self._packed: npt.NDArray[np.uint64] = reserved((self.row_space,), np.uint64)
        self._last, self._uses = split(self._packed)  # last step and uses of each row's key, uint32 [V]
        self.step = self.decays = 0
        self._undo: deque[Undo] = deque()

    def __len__(self) -> int:
        """Return the number of keys with a row."""
        return len(self.directory)

    @property
    def waiting(self) -> int:
        """Number of keys whose uses are counted exactly, and that do not have a row yet."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of the directory, the waiting keys, the sketch, and the keys, last steps and uses of rows."""
        sketch = 0 if self._sketch is None else self._sketch.nbytes
        return self.directory.nbytes + self._waiting.nbytes + sketch + 16 * self.rows

    def find(self, keys: Keys) -> RowNumbers:
        """Return the rows that keys [U] have after all planned steps, int32 [U], or EMPTY."""
        return self.directory.find(keys)

    def find_committed(self, keys: Keys) -> RowNumbers:
        """Return the rows that keys [U] have after the last finished step, int32 [U], or EMPTY."""
        rows = self.directory.find(keys)
        for undo in reversed(self._undo):
            for changed, former in (undo.new[0], None), undo.evicted[:2]:
                if len(changed):
                    order = np.argsort(changed)
                    at = order[np.minimum(np.searchsorted(changed, keys, sorter=order), len(changed) - 1)]
                    here = changed[at] == keys
                    rows[here] = EMPTY if former is None else former[at[here]]
        return rows

    def live_rows(self) -> RowNumbers:
        """Return the rows that have a key, ascending."""
        return np.flatnonzero(self._last[: self.rows] != _DEAD).astype(np.int32)

    def are_unused(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which rows have no key."""
        found: npt.NDArray[np.bool_] = self._last[rows] == _DEAD
        return found

    def take_row(self, key: int) -> int:
        """Take a free row that no key will ever get, and return it; `key` is its entry in `keys`."""
        row = int(self._take_rows(1)[0])
        self.keys[row] = key
        return row

    def plan(
        self, keys: Keys, uses: npt.NDArray[np.int32], norms: Norms | None = None, total: Total | None = None
    ) -> PlannedKeys:
        """Apply the next step to the keys: evict, count, admit.

        Args:
            keys: int64 [U], distinct.
            uses: int32 [U], how often the step uses each key.
            norms: Returns the squared norms of rows, float64, after all earlier steps; None if these are not finished.
            total: Returns sums over the ranks, all of which plan this step; None for the whole table.

        Raises:
            UserError: The new keys exceed the capacity or the available memory; nothing has changed. Raised on all
                ranks, like PlannedAheadError.
            PlannedAheadError: Earlier steps must be finished first; nothing has changed.
        """
        step = self.step + len(self._undo) + 1
        undo = Undo(step)
        try:
            if self.evict is not None and step % self.evict.every == 0:
                self._evict(undo, NO_ROWS, step, norms, total)
            rows, undo.before = find_and_use(self.directory, keys, uses, step, self._packed)
            undo.used = rows
            admitted, counts = self._admit(undo, keys, uses, rows, step)
            guests = self._count_guests(rows, len(admitted))
            has_rows = self._has_rows(len(admitted) + guests)
            why = self._find_lack(len(admitted) + guests, len(self)) if has_rows else None
            evicted = len(undo.evicted[0])
            counted = np.array(
                [len(self), self.waiting, len(admitted), evicted, not has_rows, why is not None], np.int64
            )
            counted = counted if total is None else total(counted)
            live, waiting, new, evicted, without_rows, without_memory = counted.tolist()
            evicts = self.evict is not None and self.evict.keep is not None
            if live + new > self.capacity and (new or evicts):  # keys of `write_rows` alone may exceed it
                if not evicts:
                    raise self._full(live, new)
                if decays := self.evict is not None and self.evict.decay < 1:  # this step's uses do not decay
                    restore(rows, self._packed, undo.before)
                more = self._evict(undo, rows[rows != EMPTY], step, norms, total, most=self.capacity - new)
                if decays:
                    undo.before = use(rows, uses, step, self._packed)
                live, evicted = live - more, evicted + more
            if without_rows:
                # Without `norms`, earlier steps are unfinished and may hold rows that will be free.
                raise PlannedAheadError if norms is None else self._full(live, new)
            if without_memory:
                raise why or TableFullError(f"table {self.name!r}", "another rank has no memory for its new keys")
            if len(admitted) or guests:
                undo.used = rows.copy()
                rows[admitted] = self._insert(undo, keys[admitted], counts, step)
                undo.guests = self._take_rows(guests)
            if self._unknown == INITIAL:
                strangers = rows == EMPTY
                rows[strangers], self.keys[undo.guests] = undo.guests, keys[strangers]
        except BaseException:
            self._revert(undo)
            raise
        undo.counts = KeyCount(step, live + new, waiting, new, evicted)
        self._undo.append(undo)
        return PlannedKeys(rows, admitted, *undo.evicted[:2], undo.guests)

    def commit(self) -> tuple[RowNumbers, RowNumbers, KeyCount]:
        """Finish the first planned step.

        Return the rows of the keys that it has evicted, the rows that were for this step alone, and the numbers of keys
        after it. `release` makes these rows free.
        """
        undo = self._undo.popleft()
        self.step = undo.step
        assert undo.counts is not None
        return undo.evicted[1], undo.guests, undo.counts

    @property
    def unfinished(self) -> int:
        """Number of planned steps that are not finished."""
        return len(self._undo)

    def rollback(self, kept: int = 0) -> None:
        """Undo planned steps that are not finished, except the first `kept`."""
        while len(self._undo) > kept:
            self._revert(self._undo.pop())

    @property
    def committed_size(self) -> int:
        """Number of keys that have a row after the last finished step."""
        return len(self) + sum(len(undo.evicted[0]) - len(undo.new[0]) for undo in self._undo)

    def committed(self) -> CommittedKeys:
        """Return copies of all keys, with their rows and uses, after the last finished step."""
        keys, packed = copied(self.keys[: self.rows]), copied(self._packed[: self.rows])
        last, uses = split(packed)
        sketch = np.zeros(0, np.uint32)
        waiting = [self._waiting.entries()]
        for undo in reversed(self._undo):
            last[undo.new[1]] = _DEAD
            restore(undo.used, packed, undo.before)
            waiting += reversed(undo.waiting)
            last[undo.evicted[1]] = undo.evicted[2]
            if undo.undecayed is not None:
                uses[: len(undo.undecayed)] = undo.undecayed
        if self._sketch is not None:
            sketch = self._sketch.without([undo.sketched for undo in self._undo])
        decays = self.decays - sum(undo.decays for undo in self._undo)
        changed, values = newest([(NO_KEYS, NO_KEYS), *waiting[1:]])
        count = len(self._waiting) + int((values != EMPTY).sum() - (self._waiting.find_values(changed) != EMPTY).sum())
        return CommittedKeys(self.step, decays, keys, packed, waiting, count, sketch)

    def erase(self, keys: Keys) -> RowNumbers:
        """Forget keys and their uses; return the rows that they had, which `release` makes free.

        All planned steps must be finished.
        """
        assert not self._undo
        self._waiting.erase(keys)
        rows = self.directory.erase(np.unique(keys))
        rows = rows[rows != EMPTY]
        self._last[rows] = _DEAD
        found: RowNumbers = rows
        return found

    def set_uses(self, rows: RowNumbers, last: Steps, uses: npt.NDArray[np.uint32]) -> None:
        """Set the last step and the uses of rows that have a key."""
        self._last[rows], self._uses[rows] = np.maximum(last, 1), uses

    def decay(self, factor: float, times: int) -> None:
        """Let the uses of all keys decay, without a step."""
        self._uses[: self.rows] = decayed(self._uses[: self.rows], factor, times)

    def reseed(self, seed: int) -> None:
        """Set the seed, in a table without planned steps."""
        self.seed = seed
        if self._sketch is not None:
            self._sketch.reseed(seed)

    def restore(self, step: int, decays: int, waiting: Keys, counts: npt.NDArray[np.int64]) -> None:
        """Set the number of finished steps and of decays, and the keys that wait; no step may be planned."""
        assert not self._undo
        self.step, self.decays = step, decays
        self._waiting = KeyCounts(len(waiting))
        self._waiting.insert(waiting, counts)

    def restore_sketch(self, counts: npt.NDArray[np.uint32]) -> None:
        """Set the counts of the sketch; `counts` has its size."""
        assert self._sketch is not None
        self._sketch.restore(counts)

    def add(self, keys: Keys, last: Steps, uses: npt.NDArray[np.uint32]) -> RowNumbers:
        """Give distinct new keys [K] rows, without a step; return these rows, int32 [K].

        All planned steps must be finished.

        Raises:
            UserError: The keys exceed the capacity or the available memory; nothing has changed.
        """
        assert not self._undo
        if len(self) + len(keys) > self.capacity:
            raise TableFullError(
                f"table {self.name!r} has {len(self):,} keys, and is given {len(keys):,} more, but its capacity is "
                f"{self.capacity:,} rows",
                "raise capacity",
            )
        self._require_memory_for(len(keys), len(self))
        rows = self._take_rows(len(keys))
        self.directory.insert(keys, rows)
        self.keys[rows], self._last[rows], self._uses[rows] = keys, np.maximum(last, 1), uses
        return rows

    def take_guests(self, keys: Keys) -> RowNumbers:
        """Return rows, int32 [N], for keys [N] of a batch that only reads; `release` allows their use again."""
        if not self._has_rows(len(keys)):
            fact = f"table {self.name!r} has no rows left for the values of {len(keys):,} unknown keys"
            raise TableFullError(fact, "use smaller batches, or unknown='zeros'")
        self._require_memory_for(len(keys), len(self))
        rows = self._take_rows(len(keys))
        self.keys[rows] = keys
        return rows

    def _count_guests(self, rows: RowNumbers, admitted: int) -> int:
        """Return how many rows a step needs for itself alone.

        `rows` has the row of each of its keys, or EMPTY; `admitted` of the keys with EMPTY get a row in this step.
        """
        if self._unknown == INITIAL:
            return int(np.count_nonzero(rows == EMPTY)) - admitted
        return int(self._unknown == ZEROS and self._is_first)

    def _too_small(self, needed: int) -> TableFullError:
        return TableFullError(
            f"table {self.name!r} has a capacity of {self.capacity:,} rows, but this batch alone needs more: it has "
            f"{needed:,} known keys and its new ones",
            "raise capacity, or use smaller batches",
        )

    def _full(self, live: int, new: int) -> TableFullError:
        return TableFullError(
            f"table {self.name!r} has {live:,} keys, and this batch brings {new:,} new ones, but its capacity is "
            f"{self.capacity:,} rows",
            advise_full(self.evict),
        )

    def _admit(
        self, undo: Undo, keys: Keys, uses: npt.NDArray[np.int32], rows: RowNumbers, step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Count the keys that have no row; return the positions of those that get one, and their uses so far."""
        unknown = np.flatnonzero(rows == EMPTY)
        theirs = keys[unknown], uses[unknown]
        if self.admit is None:
            return unknown, theirs[1].astype(np.int64)
        totals = theirs[1].astype(np.int64)
        if self._sketch is not None:
            undo.sketched = theirs
            totals = self._sketch.add(*theirs)
        elif self.admit.counts:
            oldest = 0 if self.admit.expires is None else max(0, step - self.admit.expires)
            if self.admit.expires is not None and step % self.admit.expires == 0:  # frees memory, and changes no count
                undo.waiting.append(self._waiting.expire(oldest))
            totals, before = self._waiting.add(*theirs, step, oldest)
            undo.waiting.append((theirs[0], before))
        enough = self.admit.admit(theirs[0], totals, seed=self.seed, name=self.name, step=step)
        enough = require_answer(self.admit, "admit", enough, len(totals), np.bool_)
        if self.admit.counts and self._sketch is None:
            self._waiting.erase(theirs[0][enough])
        return unknown[enough], totals[enough]

    def _insert(self, undo: Undo, keys: Keys, uses: npt.NDArray[np.int64], step: int) -> RowNumbers:
        """Give keys rows, and return the rows."""
        rows = self._take_rows(len(keys))
        self.directory.insert(keys, rows)
        undo.new = keys, rows
        self.keys[rows], self._last[rows], self._uses[rows] = keys, step, np.minimum(uses, _MOST)
        return rows

    def _evict(
        self,
        undo: Undo,
        kept: RowNumbers,
        step: int,
        norms: Norms | None,
        total: Total | None,
        *,
        most: int | None = None,
    ) -> int:
        """Evict keys, and return their number: for a rule with `keep`, over all ranks.

        Such a rule never evicts the keys of the rows `kept`. If `most` is given, at most `most` keys remain over all
        ranks, and UserError is raised if that is not possible.
        """
        live, evict = self.live_rows(), self.evict
        assert evict is not None
        if evict.keep is None:
            expired = evict.expired(self._describe_use(live, norms), step)
            chosen = live[require_answer(evict, "expired", expired, len(live), np.bool_)]
            count = len(chosen)
        else:
            target = int(evict.keep * self.capacity)
            counted = np.array([len(live), len(kept)], np.int64)
            have, needed = (counted if total is None else total(counted)).tolist()
            excess = have - (target if most is None else min(target, most))
            if excess <= 0:
                return 0
            if most is not None and needed > most:
                raise self._too_small(needed)
            others = np.setdiff1d(live, kept, assume_unique=True) if len(kept) else live
            count = min(excess, have - needed)
            scores = evict.scores(self._describe_use(others, norms))
            scores = require_answer(evict, "scores", scores, len(others), np.uint32, np.float64)
            chosen = others[choose_least(scores, lambda at: self.keys[others[at]], count, total)]
        keys, rows, last = undo.evicted
        erased = self.keys[chosen]
        undo.evicted = (
            np.concatenate([keys, erased]),
            np.concatenate([rows, chosen]),
            np.concatenate([last, self._last[chosen]]),
        )
        self.directory.erase(erased)
        self._last[chosen] = _DEAD
        if evict.decay < 1:
            if undo.undecayed is None:
                undo.undecayed = self._uses[: self.rows].copy()
            uses = self._uses[: self.rows]
            uses[:] = decayed(uses, evict.decay)
            self.decays, undo.decays = self.decays + 1, undo.decays + 1
        return count

    def _describe_use(self, rows: RowNumbers, norms: Norms | None) -> KeyUse:
        """Return the facts about the keys of these rows that the rule of eviction may use."""

        return KeyUse(rows, self.keys, self._last, self._uses, _not_yet if norms is None else norms)

    def _revert(self, undo: Undo) -> None:
        """Undo a step's changes, the last one first."""
        keys, rows = undo.new
        self.directory.erase(keys)
        self._last[rows] = _DEAD
        self.release(rows)
        self.release(undo.guests)
        restore(undo.used, self._packed, undo.before)
        if self._sketch is not None:
            self._sketch.subtract(*undo.sketched)
        for waiting in reversed(undo.waiting):
            self._waiting.restore(*waiting)
        keys, rows, last = undo.evicted
        self.directory.insert(keys, rows)
        self._last[rows] = last
        if undo.undecayed is not None:
            self._uses[: len(undo.undecayed)] = undo.undecayed
            self.decays -= undo.decays


def _not_yet(rows: RowNumbers) -> npt.NDArray[np.float64]:
    """Raise PlannedAheadError: the earlier steps, which may change the norms, must be finished first."""
    raise PlannedAheadError
