"""Whether a model's tables, and the copies of their rows, fit in memory, before any of it is allocated."""

from collections.abc import Mapping

import torch

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, copied_bytes, gib, pinned_size, require_table, row_bytes
from hostdev.device.backend import free_bytes
from hostdev.kernels.shards import range_of
from hostdev.runtime.spec import TableSpec


def require_room(
    tables: Mapping[str, TableSpec], host_device_mix: bool, device: torch.device, part: tuple[int, int] | None
) -> int:
    """Raise UserError unless all tables, or this rank's part of them, fit together, before the first is allocated.

    Returns what is free beside.
    """
    where = "host" if host_device_mix else "device"
    free = available_bytes() if host_device_mix else free_bytes(device)
    if free is None:
        return 0
    for name, spec in sorted(tables.items()):
        start, stop = (0, spec.rows) if part is None else range_of(spec.rows, *part)
        free -= require_table(name, stop - start, spec.dim, spec.optimizer, free, where)
    return free


def require_copies(tables: Mapping[str, TableSpec], uses: int, batches: int, free: int, *, cached: bool) -> None:
    """Raise UserError unless the pinned memory of the copies fits beside the tables, where no id comes twice."""
    row, whole = row_bytes((spec.dim, spec.optimizer) for spec in tables.values())
    most = min(max(spec.rows for spec in tables.values()), uses)
    each = copied_bytes(most, 2 * most if cached else 0, uses, row, whole)
    needed = batches * pinned_size(each)
    if needed > free:
        raise UserError(
            f"the copies of {batches} batches need up to {gib(needed)} of pinned host memory, but beside the tables "
            f"{gib(free)} are free; use a smaller --batch-size or --pipeline-depth"
        )
