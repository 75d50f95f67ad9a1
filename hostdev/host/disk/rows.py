"""How rows of a table are stored in memory, and their initial values."""

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.initializers import Initializer
from hostdev.host.disk.readers import Planes
from hostdev.host.layouts import Float32, Split, make_layout
from hostdev.host.storage import Shape
from hostdev.kernels.pool import run_tasks

Positions = npt.NDArray[np.int32]

COPIED_BYTES = 1 << 26  # bytes of rows that are copied at a time


class RowFormat:
    """The format of a table's rows.

    Args:
        name: The table's name.
        shape: The dimensions of the whole table.
        dtype: How weights are stored.
        slots_dtype: How state columns are stored.
        seed: Of the initial values.
        init: The initializer of the weights.
    """

    def __init__(self, name: str, shape: Shape, dtype: str, slots_dtype: str, seed: int, init: Initializer) -> None:
        self.shape, self.seed, self.init = shape, seed, init
        self.name, self.dtypes = name, (dtype, slots_dtype)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        return Planes.of(self.allocate(np.zeros(1, np.int64)).planes).row_bytes

    def allocate(self, keys: npt.NDArray[np.int64]) -> Float32 | Split:
        """Return storage for rows in memory, one for each of the keys."""
        of, count = self.shape, len(keys)
        shape = Shape(count, of.dim, of.optimizer, 0, count, False, of.ids, self.dtypes[1], keys)
        return make_layout(self.name, shape, *self.dtypes)

    def fill(self, storage: Float32 | Split, rows: Positions, keys: npt.NDArray[np.int64]) -> None:
        """Write the initial values of the rows of some keys to these rows of storage in memory."""
        _, planes, D = storage.shape
        step = max(1, COPIED_BYTES // (4 * planes * D))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            n = len(rows[part])
            block: Any = np.empty((n, planes, D), np.float32)
            row_slots = np.empty((n, storage.row_slots.shape[1]), np.float32)
            storage.initial(self.shape, self.seed, self.init, keys[part], block)
            self.shape.fill_row_slots(row_slots)
            run_tasks(storage.write_tasks(rows[part], block, row_slots, None))
