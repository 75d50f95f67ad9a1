"""Up-to-date reads of a host table whose rows also change in steps that do not use them.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.optimizers import SparseOptimizer
from hostdev.host.storage import Storage
from hostdev.kernels.catch_up import bring_tasks
from hostdev.kernels.clock import Clock
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.rounding import round_to_nearest

Rows = npt.NDArray[np.float32]

_PART_BYTES = 1 << 26  # bytes of rows read at a time


def read(
    storage: Storage, clock: Clock, ids: npt.NDArray[Any], formats: tuple[int, ...] | None = None
) -> tuple[Rows, Rows]:
    """Return up-to-date copies of rows: weights and state columns, float32 [N, 1 + S, D], and per-row state, [N, R].

    `formats` has the storage format of each plane; values are rounded to the nearest values that can be stored. With
    None, values are not rounded.
    """
    _, planes, D = storage.shape
    block = np.empty((len(ids), planes, D), np.float32)
    row_slots = np.empty((len(ids), storage.row_slots.shape[1]), np.float32)
    for source, rows, at in storage.sources(ids):
        run_tasks(source.read_tasks(rows, block, row_slots, at))
    run_tasks(bring_tasks(block, row_slots, clock))
    if formats is not None:
        round_to_nearest(block, formats)
    return block, row_slots


class CurrentColumn:
    """A table's weights, or one column of its state, after the last step; indexing by slices or row ids yields float32.

    Args:
        storage: The table's rows.
        clock: The step history, from which the steps that a row has missed are applied.
        number: 0 for the weights, 1 .. S for the state columns of D values, then one number for each per-row state.
        formats: As for `read`.
    """

    def __init__(self, storage: Storage, clock: Clock, number: int, formats: tuple[int, ...] | None = None) -> None:
        self._storage, self._clock, self._number, self._formats = storage, clock, number, formats
        rows, self._planes, dim = storage.shape
        self.shape = rows, dim if number < self._planes else 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Rows:
        ids = np.arange(len(self))[rows] if isinstance(rows, slice) else np.asarray(rows)
        out = np.empty((len(ids), self.shape[1]), np.float32)
        _, planes, D = self._storage.shape
        step = max(1, _PART_BYTES // (4 * planes * D))
        for start in range(0, len(ids), step):
            block, row_slots = read(self._storage, self._clock, ids[start : start + step], self._formats)
            at = self._number - self._planes
            out[start : start + step] = block[:, self._number] if at < 0 else row_slots[:, at : at + 1]
        return out


def columns(
    storage: Storage, clock: Clock, optimizer: SparseOptimizer, formats: tuple[int, ...] | None = None
) -> Mapping[str, CurrentColumn]:
    """Return the weights and each optimizer state of a table, by name; see `read` for `formats`."""
    names = "weights", *optimizer.slots, *optimizer.row_slots
    return {name: CurrentColumn(storage, clock, number, formats) for number, name in enumerate(names)}
