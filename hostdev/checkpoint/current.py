"""A checkpoint's rows as of its last step, for tables whose steps also change rows that the batch does not use.

Files hold rows as they were last written, and the manifest holds the table's step history. Reading a row applies the
steps that the row has missed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.columns import Mapped, open_column
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import BrokenCheckpointError, Table
from hostdev.checkpoint.ranges import WEIGHTS
from hostdev.core.catch_up import LAST, CatchUp
from hostdev.core.history import History, NoHistory
from hostdev.core.optimizers import Adam
from hostdev.kernels.catch_up import bring_tasks
from hostdev.kernels.clock import Clock
from hostdev.kernels.pool import run_tasks

Rows = npt.NDArray[np.float32]


def history_of(chain: Chain, name: str) -> NoHistory | History:
    """Return a table's step history; `NoHistory` if its steps change only the rows of their batches.

    Raises:
        BrokenCheckpointError: The step history is damaged.
    """
    about = chain[-1].manifest.table(name)
    if LAST not in about.row_slots:
        return NoHistory()
    try:
        found = History(_catch_up(about))
        found.restore(about.history or "")
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise BrokenCheckpointError(f"{chain[-1].path} is broken (table {name!r}: {error})"[:480]) from None
    return found


def _catch_up(about: Table) -> CatchUp:
    given = about.arguments
    if about.optimizer == Adam.__name__:
        return Adam(**given).catch_up  # Adam checks the values
    return CatchUp(float(given["weight_decay"]))


class CurrentTable:
    """A table's weights as of its last step, float32 [rows, dim], with the interface of `MappedTable`.

    Args:
        chain: A full checkpoint and its increments.
        name: The table.
        history: The table's step history.
    """

    def __init__(self, chain: Chain, name: str, history: History) -> None:
        about = chain[-1].manifest.table(name)
        self._clock = history.clock()
        planes = [WEIGHTS, *about.slots] if history.how.betas is not None else [WEIGHTS]
        self._planes = [open_column(chain, name, column) for column in planes]
        self._last = open_column(chain, name, LAST)
        self.is_by_key = self._last.is_by_key
        self.name, self.rows, self.dim = name, self._planes[0].rows, about.dim

    def lookup(self, ids: npt.NDArray[Any], **options: Any) -> Rows:
        """Return a copy of the rows `ids`, after applying the steps that each has missed; see `MappedTable.lookup`.

        For a table by key, the arguments are those of `MappedKeys.lookup`.
        """
        block = np.stack([plane.lookup(ids, **options) for plane in self._planes], 1)
        run_tasks(bring_tasks(block, self._last.lookup(ids, **options), self._clock))
        return np.ascontiguousarray(block[:, 0])


def open_table(chain: Chain, name: str) -> Mapped | CurrentTable:
    """Return a table's weights for lookups."""
    history = history_of(chain, name)
    return open_column(chain, name) if isinstance(history, NoHistory) else CurrentTable(chain, name, history)


class CurrentLayers(Layers):
    """A chain's tables; `columns_of_ids` returns rows as of the last step."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self._clocks: dict[str, Clock | None] = {}

    def columns_of_ids(self, name: str, start: int, stop: int, columns: Sequence[str]) -> dict[str, Rows]:
        """See `Layers`."""
        if name not in self._clocks:
            self._clocks[name] = history_of(self.chain, name).clock()
        clock, about = self._clocks[name], self.manifest.table(name)
        if clock is None:
            return super().columns_of_ids(name, start, stop, columns)
        planes = [WEIGHTS, *about.slots]
        found = super().columns_of_ids(name, start, stop, [*planes, *about.row_slots])
        block = np.stack([found[column] for column in planes], 1)
        row_slots = np.concatenate([found[column] for column in about.row_slots], 1)
        run_tasks(bring_tasks(block, row_slots, clock))
        found = {column: block[:, number] for number, column in enumerate(planes)}
        found |= {column: row_slots[:, number : number + 1] for number, column in enumerate(about.row_slots)}
        return {column: found[column] for column in columns}
