"""Tables by key in the pipeline: which rows a batch's keys have, and when the rows of evicted keys are free again."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.cache.cache import EmbeddingCache
from hostdev.host.key_table import KeyTable
from hostdev.kernels.key_rows import number_rows
from hostdev.kernels.unique import count_occurrences

Ids = npt.NDArray[Any]
Positions = npt.NDArray[np.int32]

_CHECKED_EVERY = 16  # steps between searches for rows that have left the cache


class KeyedRows:
    """The keys of a group's table, as the pipeline uses them.

    Args:
        table: The table.
        unknown: For each of the group's features, its out-of-vocabulary rows, which its keys use in turn.
        cache: The group's cache.
    """

    def __init__(self, table: KeyTable, unknown: Sequence[Sequence[int]], cache: EmbeddingCache | None) -> None:
        self.table, self._unknown, self._cache = table, list(unknown), cache
        self.trains = True  # whether batches of a training pass may change keys
        self._retired: deque[Positions] = deque()  # by step, rows of evicted keys that a cache may still hold
        self._since = 0  # steps since the last search for those that have left the cache

    def assign(
        self, keys: Ids, inverse: Positions, features: Sequence[Ids], *, update: bool, is_first: bool
    ) -> tuple[Positions, bool]:
        """Return the distinct rows of a batch, in order of first occurrence; renumber `inverse` accordingly.

        Args:
            keys: The batch's unique keys, int64 [U].
            inverse: int32 [N], the position of each of the batch's keys among them; changed.
            features: The keys of each feature, once for each micro-batch.
            update: Whether the pass updates the tables, so that the batch may admit and evict keys.
            is_first: Whether all earlier batches are finished, and the table has all rows.

        Returns:
            The rows, int32 [any], and whether a step was planned, which is to be finished by `finish_step`.
        """
        plans = update and self.trains
        if plans:
            uses = count_occurrences(inverse, len(keys))
            rows = self.table.plan(keys, uses, may_read=is_first).rows
        else:
            rows = self.table.find_rows(keys)
        unknown = self._unknown * (len(features) // len(self._unknown))
        return number_rows(rows, inverse, features, unknown), plans

    def finish_step(self) -> None:
        """Finish the first planned step, whose update is done."""
        evicted = self.table.commit()
        if self._cache is None:
            self.table.retire(evicted)
            return
        if len(evicted):
            self._retired.append(evicted)
        self._since += 1
        if self._retired and self._since >= _CHECKED_EVERY:
            self._since = 0
            self._retire(self._cache)

    def _retire(self, cache: EmbeddingCache) -> None:
        """Retire rows that have left the cache; if evictions are reported, all rows of a step at once, and in order."""
        if self.table.reports_evictions:
            while self._retired and not cache.holds(self._retired[0]).any():
                self.table.retire(self._retired.popleft())
            return
        rows = np.concatenate(self._retired)
        held = cache.holds(rows)
        self._retired = deque([rows[held]] if held.any() else [])
        self.table.retire(rows[~held])

    def begin_pass(self) -> None:
        """At the beginning of a training pass, free the cache's slots of rows whose key was evicted or erased."""
        if self._cache is not None:
            self._cache.discard(self.table.are_unused)

    def end_pass(self) -> None:
        """At the end of a pass, undo the steps that were planned but not taken."""
        self.table.rollback()
        while self._retired:  # the next pass discards them from the cache
            self.table.retire(self._retired.popleft())
