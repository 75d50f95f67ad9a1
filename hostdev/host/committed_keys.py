"""The keys of a table by key at one moment, in the order of their hashes, which is that of all results."""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Keys
from hostdev.kernels.bits import Bits, bits_of
from hostdev.kernels.key_directory import EMPTY
from hostdev.kernels.key_order import order_of, sorted_rows
from hostdev.kernels.key_use import split

Values = npt.NDArray[np.int64]
Uses = npt.NDArray[np.uint32]


class CommittedKeys:
    """The keys of a table after its last finished step. Nothing is sorted before it is needed.

    Args:
        step: Number of finished steps.
        decays: How often the uses have decayed.
        by_row: int64 [V], the key of each row.
        packed: uint64 [V], the last step and the uses of each row, see `kernels.key_use`; rows without keys have 0 in
            place of the step.
        waiting: Keys [any] that have no row and whose uses are counted exactly, with their last steps << 24 | uses;
            later values replace earlier ones, and EMPTY is the value of a key that does not wait.
        waiting_count: Number of keys that wait.
        sketch: uint32 [any], the counts of a sketch.
    """

    def __init__(
        self,
        step: int,
        decays: int,
        by_row: Keys,
        packed: npt.NDArray[np.uint64],
        waiting: list[tuple[Keys, Values]],
        waiting_count: int,
        sketch: Uses,
    ) -> None:
        self.step, self.decays, self.by_row, self.packed, self.sketch = step, decays, by_row, packed, sketch
        self._waiting, self.waiting_count = waiting, waiting_count

    @cached_property
    def live(self) -> Bits:
        """The rows that have a key."""
        return bits_of(split(self.packed)[0] != 0)

    @cached_property
    def rows(self) -> npt.NDArray[np.int32]:
        """The rows that have a key, int32 [K]."""
        return sorted_rows(self.by_row, self.live)

    @property
    def keys(self) -> Keys:
        """The keys that have a row, int64 [K]."""
        return self.by_row[self.rows]

    @property
    def last(self) -> Uses:
        """The last step that used each key, uint32 [K]."""
        return split(self.packed)[0][self.rows]

    @property
    def uses(self) -> Uses:
        """The uses of each key, those before it had a row included, uint32 [K]."""
        return split(self.packed)[1][self.rows]

    @cached_property
    def waiting(self) -> tuple[Keys, Values]:
        """The keys without a row whose uses are counted exactly, int64 [W], and their last steps << 24 | uses."""
        keys, values = newest(self._waiting)
        self._waiting = []
        keys, values = keys[values != EMPTY], values[values != EMPTY]
        order = order_of(keys)
        return keys[order], values[order]

    def forget_rows(self) -> None:
        """Free the memory of the keys that have a row."""
        self.by_row, self.packed = self.by_row[:0], self.packed[:0]
        for name in ("live", "rows"):
            self.__dict__.pop(name, None)


def newest(parts: list[tuple[Keys, Values]]) -> tuple[Keys, Values]:
    """Return distinct keys, ascending, with the last of their values."""
    keys = np.concatenate([keys for keys, _ in parts])[::-1]
    values = np.concatenate([values for _, values in parts])[::-1]
    keys, first = np.unique(keys, return_index=True)
    return keys, values[first]
