"""Tables by key in the pipeline: which rows a batch's keys have, and when the rows of evicted keys are free again.

With other ranks, a key's owner plans it and has its row: see `assign_on_ranks`.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.cache.cache import EmbeddingCache
from hostdev.core.keys import ZEROS
from hostdev.distributed.exchange import OwnedRows
from hostdev.distributed.key_exchange import Answer, KeyExchange
from hostdev.host.key_plan import GuestRows, Total
from hostdev.host.table_keys import TableKeys
from hostdev.kernels.arrays import AnyIds, Positions
from hostdev.kernels.key_order import number_rows
from hostdev.kernels.unique import count_occurrences

_CHECKED_EVERY = 16  # steps between searches for rows that have left the cache


class FoundRows(NamedTuple):
    """The rows of a batch's keys."""

    rows: Positions  # int32 [U], the row of each unique key; negative for a key without a row
    unknown: Positions  # int32 [any], the out-of-vocabulary rows, in the order of their first use by a feature
    guests: GuestRows | None  # keeps rows that only this batch reads


class Assigned(NamedTuple):
    """A batch's rows of a table by key."""

    rows: Any  # the distinct rows, int32 [any]; with other ranks, `OwnedRows`
    plans: bool  # whether a step was planned, which `finish_step` must finish
    guests: GuestRows | None  # as in `FoundRows`


class KeyedRows:
    """The keys of a group's table, as the pipeline uses them.

    Args:
        keys: The table's keys.
        unknown: For each of the group's features, the names of its out-of-vocabulary rows, which its keys use in turn.
        cache: The group's cache.
    """

    def __init__(self, keys: TableKeys, unknown: Sequence[Sequence[str]], cache: EmbeddingCache | None) -> None:
        self._keys, self._unknown, self._cache = keys, list(unknown), cache
        self._names = list(dict.fromkeys(name for names in unknown for name in names))
        self.trains = True  # whether batches of a training pass may change keys
        self._retired: deque[Positions] = deque()  # by step, rows of evicted keys that a cache may still hold
        self._left: list[Positions] = []  # rows that were for one step alone, which a cache may still hold
        self._since = 0  # steps since the last search for rows that have left the cache

    def assign(
        self, keys: AnyIds, inverse: Positions, features: Sequence[AnyIds], *, update: bool, is_first: bool
    ) -> Assigned:
        """Return the distinct rows of a batch, in order of first occurrence; renumber `inverse` accordingly.

        If batches of the pass may change keys, plan a step of the table.

        Args:
            keys: The batch's unique keys, int64 [U].
            inverse: int32 [N], the position of each of the batch's keys among the unique keys; changed.
            features: For each micro-batch in order, the keys of each feature.
            update: Whether the pass updates the tables, so that the batch may admit and evict keys.
            is_first: Whether all earlier batches are finished, and the table has all rows.
        """
        plans = update and self.trains
        uses = count_occurrences(inverse, len(keys)) if plans else None
        found = self.find(keys, uses, is_first=is_first)
        rows = number_rows(found.rows, inverse, features, self._repeat(found.unknown, features))
        return Assigned(rows, plans, found.guests)

    def find(
        self, keys: AnyIds, uses: npt.NDArray[np.int32] | None, *, is_first: bool, total: Total | None = None
    ) -> FoundRows:
        """Return the rows of distinct keys [U]; plan a step if there are `uses`, int32 [U]."""
        if uses is None:
            rows, guests = self._keys.find_or_guest(keys)
            return FoundRows(rows, self._unknown_rows(), guests)
        planned = self._keys.plan(keys, uses, may_read=is_first, total=total)
        unknown = self._unknown_rows()
        if self._keys.unknown == ZEROS and len(planned.guests):
            unknown[:] = planned.guests[0]
        return FoundRows(planned.rows, unknown, None)

    def _unknown_rows(self) -> Positions:
        """Return the out-of-vocabulary rows, int32 [any], in the order of their first use by a feature."""
        return np.array([self._keys.unknown_row(name) for name in self._names], np.int32)

    def number(
        self, keys: int, inverse: Positions, features: Sequence[AnyIds], answer: Answer, owners: Positions
    ) -> OwnedRows:
        """Return the distinct rows of this rank's keys, in order of first occurrence; renumber `inverse` accordingly.

        Args:
            keys: U, the number of unique keys.
            inverse: As for `assign`.
            features: As for `assign`.
            answer: The answer of the keys' owners.
            owners: int32 [U], the owner of each unique key.
        """
        places = np.where(answer.rows >= 0, np.arange(keys, dtype=np.int32), np.int32(-1))
        unknown = np.arange(keys, keys + len(answer.unknown), dtype=np.int32)
        found = number_rows(places, inverse, features, self._repeat(unknown, features))
        owners = np.concatenate([owners, np.zeros(len(unknown), np.int32)])
        return OwnedRows(owners[found], np.concatenate([answer.rows, answer.unknown])[found])

    def _repeat(self, rows: Positions, features: Sequence[AnyIds]) -> list[list[int]]:
        """Return for each of `features` its out-of-vocabulary rows; `rows` has them in the order of `self._names`."""
        by_name = dict(zip(self._names, rows.tolist(), strict=True))
        each = [[by_name[name] for name in names] for names in self._unknown]
        return each * (len(features) // len(each))

    def finish_step(self) -> None:
        """Finish the first planned step, whose update is done."""
        evicted, left = self._keys.commit()
        if self._cache is None:
            self._keys.retire(evicted)
            self._keys.release(left)
            return
        if len(evicted):
            self._retired.append(evicted)
        self._leave(self._cache, left)

    def finish_read(self, guests: GuestRows | None) -> None:
        """Finish a training batch that planned no step; the cache may still hold its temporary rows."""
        if self._cache is not None and guests is not None:
            self._leave(self._cache, guests.take())

    def _leave(self, cache: EmbeddingCache, left: Positions) -> None:
        """Record rows that were for one batch alone; every 16th call, free rows that have left the cache."""
        if len(left):
            self._left.append(left)
        self._since += 1
        if self._since < _CHECKED_EVERY:
            return
        self._since = 0
        if self._retired:
            self._retire(cache)
        if self._left:
            rows = np.concatenate(self._left)
            held = cache.holds(rows)
            self._left = [rows[held]]
            self._keys.release(rows[~held])

    def _retire(self, cache: EmbeddingCache) -> None:
        """Retire rows that have left the cache; if evictions are reported, all rows of a step at once, and in order."""
        if self._keys.reports:
            while self._retired and not cache.holds(self._retired[0]).any():
                self._keys.retire(self._retired.popleft())
            return
        rows = np.concatenate(self._retired)
        held = cache.holds(rows)
        self._retired = deque([rows[held]] if held.any() else [])
        self._keys.retire(rows[~held])

    def begin_pass(self) -> None:
        """At the beginning of a training pass, free the cache's slots of rows whose key was evicted or erased."""
        if self._cache is not None:
            self._cache.discard(self._keys.are_unused)

    def end_pass(self) -> None:
        """At the end of a pass, undo the steps that were planned but not taken."""
        self._keys.rollback()
        while self._retired:  # the next pass discards them from the cache
            self._keys.retire(self._retired.popleft())
        while self._left:
            self._keys.release(self._left.pop())


def assign_on_ranks(
    exchange: KeyExchange,
    tables: Sequence[KeyedRows],
    found: Sequence[tuple[AnyIds, Positions]],
    features: Sequence[Sequence[AnyIds]],
    *,
    update: bool,
    is_first: bool,
) -> list[Assigned]:
    """Return for each table the result of `KeyedRows.assign`, but with `OwnedRows`, the rows of the keys' owners.

    Each rank asks the owners for its keys. The owners plan the keys of all ranks as one step, and answer with the rows.

    Args:
        exchange: Connects the ranks.
        tables: The tables by key.
        found: For each table, the unique keys of this rank's batch, and `inverse` as for `KeyedRows.assign`.
        features: For each table, the keys of each feature, as for `KeyedRows.assign`.
        update: As for `KeyedRows.assign`.
        is_first: As for `KeyedRows.assign`.
    """
    counted = [(keys, count_occurrences(inverse, len(keys))) for keys, inverse in found]
    asked = exchange.ask(counted)
    plans = [update and each.trains for each in tables]
    mine = [
        each.find(one.keys, one.uses if plan else None, is_first=is_first, total=exchange.total)
        for each, one, plan in zip(tables, asked, plans, strict=True)
    ]
    answers = exchange.answer(asked, [each.rows for each in mine], [each.unknown for each in mine])
    return [
        Assigned(each.number(len(keys), inverse, ids, answer, one.owners), plan, own.guests)
        for each, (keys, inverse), ids, answer, one, plan, own in zip(
            tables, found, features, answers, asked, plans, mine, strict=True
        )
    ]
