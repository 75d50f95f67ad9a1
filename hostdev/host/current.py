"""Columns of a host table: as they are stored, or up to date if rows also change in steps that do not use them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.optimizers import SparseOptimizer
from hostdev.host.storage import Storage

Rows = npt.NDArray[np.float32]
Read = Callable[[npt.NDArray[Any]], tuple[Rows, Rows]]

_PART_BYTES = 1 << 26  # bytes of rows read at a time


class CurrentColumn:
    """A table's weights, or one column of its state, after the last step; indexing by slices or row ids yields float32.

    Args:
        shape: V, 1 + S, D: of all rows.
        read: Called with ids [N]; returns up-to-date copies of these rows: weights and S state columns, float32
            [N, 1 + S, D], and per-row state, float32 [N, any].
        number: 0 for the weights, 1 .. S for the state columns of D values, then one number for each per-row state.
    """

    def __init__(self, shape: tuple[int, int, int], read: Read, number: int) -> None:
        rows, self._planes, dim = shape
        self._step = max(1, _PART_BYTES // (4 * self._planes * dim))
        self._read, self._number = read, number
        self.shape = rows, dim if number < self._planes else 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Rows:
        ids = np.arange(len(self))[rows] if isinstance(rows, slice) else np.asarray(rows)
        out = np.empty((len(ids), self.shape[1]), np.float32)
        at = self._number - self._planes
        for start in range(0, len(ids), self._step):
            block, row_slots = self._read(ids[start : start + self._step])
            out[start : start + self._step] = block[:, self._number] if at < 0 else row_slots[:, at : at + 1]
        return out


def current_columns(storage: Storage, optimizer: SparseOptimizer, read: Read) -> dict[str, Any]:
    """Return weights and optimizer state by name, after the last step; `read` is as for `CurrentColumn`."""
    names = "weights", *optimizer.slots, *optimizer.row_slots
    return {name: CurrentColumn(storage.shape, read, number) for number, name in enumerate(names)}


def stored_columns(storage: Storage, optimizer: SparseOptimizer) -> dict[str, Any]:
    """Return stored weights and optimizer state by name: arrays, or columns that are widened as they are read."""
    names, row_slots = ("weights", *optimizer.slots), storage.row_slots
    found = {name: storage.column(number) for number, name in enumerate(names)}
    return found | {name: row_slots[:, number : number + 1] for number, name in enumerate(optimizer.row_slots)}
