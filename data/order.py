"""The order of a data set's rows, computed from the seed, the epoch and the width of the shuffle window."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hostdev.kernels.counter import key64, permutation


@dataclass(frozen=True)
class Window:
    """Shards whose rows are shuffled together. They are consecutive in an epoch's order of shards.

    Attributes:
        shards: The shards' numbers in the split, from 0.
        rows: Total number of rows.
        key: Key that determines the permutation of the rows, or None for stored order.
    """

    shards: tuple[int, ...]
    rows: int
    key: int | None

    def order(self) -> npt.NDArray[np.int64] | None:
        """Return the permutation of the concatenated shards' rows, int64 [rows], or None for stored order."""
        return None if self.key is None else permutation(self.rows, self.key)


def windows_of(rows: Sequence[int], seed: int | None, epoch: int, width: int) -> list[Window]:
    """Return the windows of an epoch in the order of reading; each shard is in one window.

    Args:
        rows: Number of rows of each shard.
        seed: Seed for shuffling shards and rows, or None for stored order, in windows of one shard.
        width: Number of shards in a shuffled window; the last window may have fewer.
    """
    if seed is None:
        return [Window((number,), rows[number], None) for number in range(len(rows))]
    order = permutation(len(rows), key64(seed, "shard order", epoch)).tolist()
    if width == 1:
        return [Window((number,), rows[number], key64(seed, "row order", epoch, number)) for number in order]
    mixed = [tuple(order[start : start + width]) for start in range(0, len(order), width)]
    return [
        Window(numbers, sum(rows[number] for number in numbers), key64(seed, "window order", epoch, place))
        for place, numbers in enumerate(mixed)
    ]
