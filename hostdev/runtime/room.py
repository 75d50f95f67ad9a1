"""Estimates the host memory that training needs for its tables, by purpose, before the memory is allocated.

The memory of the program itself, of dense layers and of evaluations does not grow with the tables, and is not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hostdev.cache.options import POLICIES, rows_of
from hostdev.cache.planner import MOST_ROWS, planner_bytes
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.memory import TableShape, available_bytes, format_bytes, row_bytes
from hostdev.host.disk.frame_pool import get_location_bytes
from hostdev.host.key_options import KEY_BYTES
from hostdev.runtime.spec import CacheSpec

_USE_BYTES = 24  # per occurrence of an id: the id, its unique id, and the position of the unique id
_SAVED_KEY_BYTES = 25  # per row of a table by key while a checkpoint is saved: copies of the keys, and their order
COUNTS = "counts of uses"  # `CacheSpec.counts`, which the program has already allocated
_MARKS = 3  # bitmaps of rows while a checkpoint is saved: rows to save, not yet read, and written since


class GroupSize(NamedTuple):
    """The size of tables that are looked up with the same ids."""

    rows: int  # V, on this rank
    tables: Sequence[TableShape]
    on_host: bool
    cache: CacheSpec | None = None
    by_key: bool = False  # a table by key; `rows` is its capacity
    disks: Sequence[Disk | None] = ()  # for each table, where its rows are that are not in memory; empty for nowhere

    @property
    def on_disk(self) -> list[tuple[TableShape, Disk]]:
        """The tables on disk."""
        return [(table, disk) for table, disk in zip(self.tables, self.disks, strict=False) if disk is not None]

    @property
    def row_bytes(self) -> int:
        """Bytes of memory that the tables' rows take."""
        whole = sum(table.nbytes(self.rows) for table in self.tables)
        return whole + sum(disk.nbytes - table.nbytes(self.rows) for table, disk in self.on_disk)

    def disk_bytes(self, uses: int) -> int:
        """Return the bytes of memory that it takes to know which rows are where, if a batch looks up `uses` ids."""
        found, unique = 0, min(uses, self.rows)
        for table, disk in self.on_disk:
            frames = min(self.rows, disk.nbytes // table.nbytes(1))
            found += get_location_bytes(self.rows) * self.rows
            found += planner_bytes(self.rows, frames, unique, disk.window) + 4 * (disk.window + 1) * unique
        return found


def kept(
    groups: Iterable[GroupSize], *, depth: int, slots_on_host: bool, uses: int = 0, copies: int = 0
) -> dict[str, int]:
    """Return an upper bound on the bytes of each part of host memory, by name; empty parts are left out.

    Args:
        groups: The tables.
        depth: The pipeline's depth.
        slots_on_host: Whether caches are in host memory, because their device is the CPU.
        uses: Number of ids that a batch looks up; 0 if unknown.
        copies: Bytes of rows that are copied while a checkpoint is saved; 0 without checkpoints.

    Raises:
        UserError: A table has too many rows for a cache.
    """
    names = (
        "tables",
        "places of rows on disk",
        "directories of keys",
        "cached rows",
        "the cache's plan",
        COUNTS,
        "last writers of rows",
        "batches in flight",
    )
    parts = dict.fromkeys((*names, "bitmaps of changed rows", "copies for checkpoints", "copies of keys"), 0)
    window = passing = 0
    for group in groups:
        if not group.on_host:
            continue
        row, whole = row_bytes(group.tables)
        parts["tables"] += group.row_bytes
        parts["places of rows on disk"] += group.disk_bytes(uses)
        window = max([window, *(disk.window for _, disk in group.on_disk)])
        parts["directories of keys"] += KEY_BYTES * group.rows * len(group.tables) * group.by_key
        if depth:
            parts["last writers of rows"] += group.rows
        if copies:
            parts["bitmaps of changed rows"] += _MARKS * len(group.tables) * -(-group.rows // 8)
            parts["copies of keys"] += _SAVED_KEY_BYTES * group.rows * len(group.tables) * group.by_key
        if group.cache is not None:
            if group.rows > MOST_ROWS:
                raise UserError(
                    f"a cache supports tables of at most {MOST_ROWS:,} rows, not {group.rows:,}; leave out the cache"
                )
            slots = rows_of(group.cache.rows, group.rows)
            ahead = group.cache.window if group.cache.policy == POLICIES[0] else 0
            parts["cached rows"] += slots * whole if slots_on_host else 0
            parts["the cache's plan"] += planner_bytes(group.rows, slots, min(uses, group.rows), ahead)
            window = max(window, ahead)
            if isinstance(group.cache.counts, np.ndarray) and not isinstance(group.cache.counts, np.memmap):
                parts[COUNTS] += group.cache.counts.nbytes
        passing = max(passing, row * min(uses, group.rows))
    parts["batches in flight"] = (depth + 2) * 2 * passing + (depth + 2 + window) * _USE_BYTES * uses
    parts["copies for checkpoints"] = min(copies, 2 * parts["tables"])
    return {name: size for name, size in parts.items() if size}


def free_with_counts(parts: Mapping[str, int]) -> int:
    """Return the free bytes of host memory, plus the bytes of the counts of uses, which are already allocated."""
    return available_bytes() + parts.get(COUNTS, 0)


def require(parts: Mapping[str, int], free: int | None = None) -> None:
    """Raise UserError unless all parts fit into `free` bytes of host memory, by default all that are available."""
    needed, free = sum(parts.values()), available_bytes() if free is None else free
    if needed > free:
        raise UserError(
            f"not enough host memory: {in_words(parts)} need {needed} bytes ({format_bytes(needed)}), but {free} bytes "
            f"({format_bytes(free)}) are free; use fewer rows, a smaller dimension or a smaller cache"
        )


def in_words(parts: Mapping[str, int]) -> str:
    """Return each part with its size, as text."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
