"""What a training keeps in the host's memory for its tables' rows, part by part, before it is allocated.

These parts grow with the tables. What batches on their way, dense layers and evaluations take beside does not.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hostdev.cache.options import rows_of
from hostdev.cache.planner import planner_bytes
from hostdev.core.errors import UserError
from hostdev.core.memory import gib, row_bytes, table_bytes
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.table_dtypes import FP32
from hostdev.runtime.spec import CacheSpec

_MARKS = 3  # sets of rows while a checkpoint is saved: to be saved, of them not yet read, written since


class GroupSize(NamedTuple):
    """Tables that the same ids look up."""

    rows: int  # here, V
    tables: Sequence[tuple[int, SparseOptimizer]]  # columns and optimizer of each
    on_host: bool
    cache: CacheSpec | None = None
    dtypes: Sequence[str] = ()  # of the weights of each, as the host stores them; none for float32


def kept(groups: Iterable[GroupSize], *, depth: int, slots_on_host: bool, saves: bool) -> dict[str, int]:
    """Return the bytes of each part, those that are not 0.

    depth          of the pipeline
    slots_on_host  the caches' device is the CPU
    saves          checkpoints are saved
    """
    parts = dict.fromkeys(("tables", "cached rows", "the cache's plan", "claims of rows", "marks of changes"), 0)
    for group in groups:
        if not group.on_host:
            continue
        whole = row_bytes(group.tables)[1]
        for (dim, optimizer), dtype in zip(group.tables, group.dtypes or [FP32] * len(group.tables), strict=True):
            slots, row_slots = len(optimizer.slots), len(optimizer.row_slots)
            parts["tables"] += table_bytes(group.rows, dim, slots, row_slots, dtype)
        if depth:
            parts["claims of rows"] += group.rows
        if saves:
            parts["marks of changes"] += _MARKS * len(group.tables) * -(-group.rows // 8)
        if group.cache is not None:
            slots = rows_of(group.cache.rows, group.rows)
            parts["cached rows"] += slots * whole if slots_on_host else 0
            parts["the cache's plan"] += planner_bytes(group.rows, slots)
    return {name: size for name, size in parts.items() if size}


def require(parts: Mapping[str, int], free: int) -> None:
    """UserError unless all these parts fit into `free` bytes of host memory."""
    needed = sum(parts.values())
    if needed > free:
        raise UserError(
            f"not enough host memory: {in_words(parts)}: {needed} bytes ({gib(needed)}), but {free} bytes "
            f"({gib(free)}) are free; use fewer rows, a smaller dimension or a smaller cache"
        )


def in_words(parts: Mapping[str, int]) -> str:
    """Return each part with its size, as text."""
    return ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
