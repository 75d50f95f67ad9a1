"""Rewriting of a checkpoint for a different number of processes, with all rows in a new order, range by range."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint import folder
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.items import Item
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import Table
from hostdev.checkpoint.ranges import SPREAD, WEIGHTS
from hostdev.core.errors import UserError
from hostdev.ext.checkpoints.compact import merged_item, write_anew
from hostdev.kernels.shards import get_ids_at, range_of

Rows = npt.NDArray[np.float32]


class _Rows:
    """A `writer.Source` of a table's rows: in id order or, with `spread`, in the order that is divided among ranks."""

    def __init__(self, layers: Layers, table: Table, *, spread: bool) -> None:
        self._layers, self._table, self._spread = layers, table, spread
        self.count = table.rows

    def rows_between(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return all rows in [first, last)."""
        return np.arange(first, last)

    def read(self, first: int, last: int, ids: npt.NDArray[np.int64] | None, columns: Rows, row_columns: Rows) -> None:
        """See `writer.Source`."""
        about = self._table
        wanted = get_ids_at(about.rows, first, last) if self._spread else np.arange(first, last)
        for to, name in zip(columns, (WEIGHTS, *about.slots), strict=True):
            np.copyto(to, self._layers.lookup(about.name, name, wanted))
        for to, name in zip(row_columns, about.row_slots, strict=True):
            np.copyto(to, self._layers.lookup(about.name, name, wanted)[:, 0])


def rewrite(chain: Chain, out: Path, ranks: int | None) -> str:
    """Write a checkpoint and its parents as one full checkpoint into the folder `out`; return a line about it.

    Args:
        chain: The checkpoint, with its parents.
        out: A folder without checkpoints.
        ranks: Number of processes, each with its own files, or None for one process with rows in id order.

    Raises:
        UserError: `out` has checkpoints, or another process is writing to it.
        OSError: The checkpoint cannot be written.
    """
    _require_none(out)
    is_spread = ranks is not None
    layers = Layers(chain)
    out.mkdir(parents=True, exist_ok=True)
    items = []
    for table in layers.manifest.tables:
        if table.keys is not None:
            items.append(merged_item(layers, table))
            continue
        about = replace(table, files=[], segments=None, whole=False, order=SPREAD if is_spread else "ids")
        cuts = [range_of(table.rows, rank, ranks)[0] for rank in range(ranks)] if ranks else []
        rows = _Rows(layers, table, spread=is_spread)
        items.append(Item(about, rows, True, lambda: None, lambda saved: None, cuts=cuts))
    with folder.locked(out):
        _require_none(out)  # again, now that the folder is locked
        made = write_anew(layers, items, out)
    return f"{made}: {chain[-1].path} rewritten for {f'{ranks} processes' if is_spread else 'one process'}"


def _require_none(out: Path) -> None:
    if folder.names_in(out):
        raise UserError(f"{out} already has checkpoints; choose another --out")
