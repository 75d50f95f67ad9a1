"""Offline merging of a checkpoint and its parents into a full checkpoint, also for another number of processes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint import folder
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.items import FROM_FIRST, FullSource, Item
from hostdev.checkpoint.layers import Layers, SavedRows
from hostdev.checkpoint.loading import verify
from hostdev.checkpoint.manifest import VERSION, Table
from hostdev.checkpoint.ranges import SPREAD, WEIGHTS
from hostdev.checkpoint.state import read_dense_tensors
from hostdev.checkpoint.writer import AsyncWriter, Content
from hostdev.core.errors import UserError
from hostdev.core.keys import KeyColumns
from hostdev.ext.checkpoints import best
from hostdev.host.disk.segments import SegmentFile
from hostdev.kernels.arrays import LongIds, Rows
from hostdev.kernels.shards import get_ids_at, range_of


class _MergedRows(FullSource):
    """A `TableSnapshot` of a table's merged rows, read from the files of a chain."""

    def __init__(self, layers: Layers, table: Table) -> None:
        self._rows, self._table, self.count = layers.open(table.name), table, table.rows
        self._root = layers.chain[-1].path

    def read(self, first: int, last: int, ids: npt.NDArray[np.int64] | None, columns: Rows, row_columns: Rows) -> None:
        """See `TableSnapshot`."""
        _copy_columns(self._rows, self._rows.locate(first, last), columns, row_columns)

    def locate(self, first: int, last: int, out: LongIds) -> None:
        """See `TableSnapshot`."""
        out[:] = self._rows.read_locations(first, last)

    def finish(self, hold: Callable[[SegmentFile], str]) -> list[tuple[str, SegmentFile]]:
        """Let the new checkpoint hold the segments of the newest checkpoint; see `TableSnapshot`."""
        assert self._table.segments is not None
        named = [(self._root / each.file, each) for each in self._table.segments.files]
        files = [SegmentFile(path, each.bytes, each.sha256, each.number) for path, each in named]
        return [(hold(file), file) for file in files]

    def key_columns(self, first: int, last: int) -> KeyColumns | None:
        """See `TableSnapshot`."""
        return self._rows.merged.between(first, last) if self._rows.is_by_key else None

    def other_keys(self) -> Sequence[npt.NDArray[Any]] | None:
        """See `TableSnapshot`; the list of keys that lost their rows is empty, because the new checkpoint is full."""
        if not self._rows.is_by_key:
            return None
        others = self._rows.merged.others
        return others._replace(gone=others.gone[:0])


def _copy_columns(rows: SavedRows, places: Any, columns: Rows, row_columns: Rows) -> None:
    """Copy rows to the outputs of `TableSnapshot.read`."""
    about = rows.table
    found = rows.read(places, [WEIGHTS, *about.slots, *about.row_slots])
    for to, values in zip([*columns, *row_columns], found.values(), strict=True):
        np.copyto(to, values.reshape(to.shape))


def compact(chain: Chain, keep: int | None = None) -> str:
    """Replace an incremental checkpoint with a full one; then remove old checkpoints; return a line about both.

    Args:
        chain: The checkpoint, with its parents.
        keep: Number of newest checkpoints to keep, together with their parents, and with the best checkpoint of a run
            with --early-stop; None keeps all.

    Raises:
        UserError: Another process is writing to the folder, or has merged or removed the checkpoint.
        OSError: The checkpoint cannot be written.
    """
    newest = chain[-1]
    path = newest.path.parent
    with folder.locked(path):
        if not all(map(folder.still_exists, chain)):
            raise UserError(f"{newest.path} was merged or removed by another process; run the command again")
        before = _size(path)
        if len(chain) == 1:
            told = f"{newest.path} is already a full checkpoint"
        else:
            made = merge(chain, path)
            told = f"{made}: {len(chain)} checkpoints merged into one"
            if folder.is_parent(newest.path):
                told += f"; {newest.path} is kept, since it is the parent of another checkpoint"
            else:
                folder.remove(newest.path)
        if keep is not None:
            known = best.of_run(newest)
            best_steps = [known.step] if known is not None and known.stops_early else []
            folder.prune(path, keep, best_steps, partial(verify, segments=True))
        after = _size(path)
    return f"{told}; {path} now has {after:,} bytes, {before:,} before"


def merge(chain: Chain, path: Path) -> Path:
    """Write a checkpoint and its parents as one full checkpoint into the folder `path`; return the new path."""
    layers = Layers(chain)
    items = [merged_item(layers, table) for table in layers.manifest.tables]
    return write_anew(layers, items, path)


def merged_item(layers: Layers, table: Table) -> Item:
    """Return a table's merged rows as an item to write."""
    about = replace(table, files=[], whole=False)
    if table.segments is not None:  # the new checkpoint holds the same segments
        about = replace(about, segments=replace(table.segments, files=[], numbering=FROM_FIRST))
    return Item(about, _MergedRows(layers, table), True)


def write_anew(layers: Layers, items: Sequence[Item], path: Path) -> Path:
    """Write a full checkpoint of the tables `items` and a chain's other content into `path`; return the new path."""
    newest = layers.manifest
    others = {
        file.file: checkpoint.path / file.file
        for checkpoint in layers.chain
        for file in checkpoint.manifest.others
        if file.file.startswith("data/")
    }
    names = [(name, key) for name, key in newest.state.get("digest", [])]
    content = Content(newest.state, read_dense_tensors(layers), others, names)
    digest = newest.state_sha256 if newest.version >= VERSION else None
    return AsyncWriter(path, newest.step, items, content, None, state_sha256=digest).wait().path


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


class _Rows(FullSource):
    """A `TableSnapshot` of a table's rows: in id order or, with `spread`, in the order that is divided among ranks."""

    def __init__(self, layers: Layers, table: Table, *, spread: bool) -> None:
        self._rows, self._spread, self.count = layers.open(table.name), spread, table.rows

    def read(self, first: int, last: int, ids: npt.NDArray[np.int64] | None, columns: Rows, row_columns: Rows) -> None:
        """See `TableSnapshot`."""
        wanted = get_ids_at(self.count, first, last) if self._spread else np.arange(first, last)
        _copy_columns(self._rows, self._rows.find(wanted), columns, row_columns)


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
        items.append(Item(about, rows, True, cuts=cuts))
    with folder.locked(out):
        _require_none(out)  # again, now that the folder is locked
        made = write_anew(layers, items, out)
    return f"{made}: {chain[-1].path} rewritten for {f'{ranks} processes' if is_spread else 'one process'}"


def _require_none(out: Path) -> None:
    if folder.names_in(out):
        raise UserError(f"{out} already has checkpoints; choose another --out")
