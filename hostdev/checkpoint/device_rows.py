"""A device table's rows for a checkpoint, copied before training continues: device tables have no copy-on-write."""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hostdev.kernels.arrays import Rows


class DeviceRows:
    """A `writer.Source` of the current rows of a device table.

    Args:
        table: A `DeviceTable`.
        at_once: Maximum bytes to copy. A larger table is not copied, so it must not change until the checkpoint is
            written.
    """

    def __init__(self, table: Any, at_once: int) -> None:
        self.count = int(table.rows)
        self._block, self._row_slots = table.block, table.row_slots
        size = self._block.nbytes + self._row_slots.nbytes
        self.is_live = size > at_once
        if not self.is_live:
            self._block = self._block.to("cpu", copy=True)
            self._row_slots = self._row_slots.to("cpu", copy=True)

    def rows_between(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return all rows in [first, last)."""
        return np.arange(first, last)

    def read(self, first: int, last: int, ids: npt.NDArray[np.int64] | None, columns: Rows, row_columns: Rows) -> None:
        """See `writer.Source`."""
        assert ids is None
        np.copyto(columns, _host(self._block[first:last]).transpose(1, 0, 2))
        np.copyto(row_columns, _host(self._row_slots[first:last]).T)

    def stop(self) -> None:
        """Free the copies."""
        self._block, self._row_slots = self._block[:0], self._row_slots[:0]


def _host(values: Tensor) -> Rows:
    found: Rows = values.cpu().numpy()
    return found
