"""Subsets of a batch's rows, and the concatenated ids of all groups, for the search for hazards."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hostdev.kernels.arrays import AnyIds, Positions
from hostdev.pipeline.batch_ids import Group


class RowSubset(NamedTuple):
    """A subset of a batch's ids, with their positions in the batch."""

    ids: AnyIds  # int32 or int64 [any], unique
    positions: Positions | None  # [any], ascending, among the batch's ids; None for all ids

    @classmethod
    def select(cls, ids: AnyIds, positions: Positions | None) -> "RowSubset":
        """Return the subset at these positions of `ids`; None selects all."""
        return cls(ids if positions is None else ids[positions], positions)

    def split(self, at: int) -> tuple["RowSubset", "RowSubset"]:
        """Return two subsets: the ids at positions below `at`, and the others, whose positions then count from `at`."""
        if self.positions is None:
            return RowSubset(self.ids[:at], None), RowSubset(self.ids[at:], None)
        edge = int(np.searchsorted(self.positions, at))
        low, high = self.positions[:edge], self.positions[edge:] - np.int32(at)
        return RowSubset(self.ids[:edge], low), RowSubset(self.ids[edge:], high)

    def __len__(self) -> int:
        return len(self.ids)


class ConcatenatedIds(NamedTuple):
    """The ids of all groups in one array; the number of rows of all preceding groups is added to each id."""

    ids: AnyIds  # int32 or int64 [any]
    starts: list[int]  # [G + 1], where each group's ids begin


class RowOffsets:
    """Offsets that number the rows of all groups consecutively; a single group keeps its ids."""

    def __init__(self, groups: Sequence[Group]) -> None:
        rows = [group.rows if group.on_host else 0 for group in groups]
        self._offsets = np.concatenate([[0], np.cumsum(rows)]).tolist()
        self.rows: int = self._offsets[-1]
        self._dtype = np.dtype(np.int32 if self.rows < 2**31 else np.int64)
        self._alone = len(groups) == 1
        self._groups = groups

    def get_used(self) -> list[tuple[int, int]]:
        """Return the range of row numbers that each group on the host uses, as (start, stop)."""
        pairs = zip(self._groups, self._offsets, strict=False)
        return [(offset, offset + group.used_rows) for group, offset in pairs if group.on_host]

    def concatenate(self, ids: Sequence[AnyIds]) -> ConcatenatedIds:
        """Return the ids of all groups in one array, after adding each group's offset to its ids."""
        if self._alone:
            return ConcatenatedIds(ids[0], [0, len(ids[0])])
        starts = [0]
        for part in ids:
            starts.append(starts[-1] + len(part))
        joint = np.empty(starts[-1], self._dtype)
        for part, offset, start, stop in zip(ids, self._offsets, starts, starts[1:], strict=False):
            np.add(part, offset, out=joint[start:stop], dtype=self._dtype, casting="unsafe")
        return ConcatenatedIds(joint, starts)

    def split(self, subset: RowSubset, starts: Sequence[int]) -> list[RowSubset]:
        """Split a subset of concatenated ids by group; return subsets with each group's own ids and positions.

        Args:
            subset: A subset of the concatenated ids.
            starts: Where each group's ids begin among the concatenated ids.
        """
        if self._alone:
            return [subset]
        at = starts if subset.positions is None else np.searchsorted(subset.positions, starts).tolist()
        shares = []
        for group, offset in enumerate(self._offsets[:-1]):
            ids = subset.ids[at[group] : at[group + 1]]
            positions = None
            if subset.positions is not None:
                positions = subset.positions[at[group] : at[group + 1]] - np.int32(starts[group])
            shares.append(RowSubset(ids - ids.dtype.type(offset) if offset else ids, positions))
        return shares
