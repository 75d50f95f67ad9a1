"""Columns of a table by key, in the order of its keys."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.host import current

Rows = npt.NDArray[np.float32]


class OrderedColumn:
    """A column in another order; indexing by slices or positions yields float32.

    Args:
        column: An array or a view [V, any], which rows index.
        rows: int32 [K], the rows in order.
    """

    def __init__(self, column: Any, rows: npt.NDArray[np.int32]) -> None:
        self._column, self._rows = column, rows
        self.shape = len(rows), column.shape[1]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Rows:
        found: Rows = self._column[self._rows[at]]
        return found


def columns_in_order(
    table: Any, rows: npt.NDArray[np.int32], *, after_all_steps: bool = False
) -> Mapping[str, OrderedColumn]:
    """Return the weights and optimizer state of a `HostTable` by name, in the order `rows`.

    With `after_all_steps`, they have all steps of the table; otherwise they are as they are stored.
    """
    found = table._columns()
    if after_all_steps and (clock := table.clock()) is not None:
        found = current.columns(table.storage, clock, table.optimizer)
    return {name: OrderedColumn(column, rows) for name, column in found.items()}
