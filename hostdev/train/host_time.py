"""What a row's ways took the host in a run, of its ops' times."""

from collections.abc import Mapping, Sequence
from typing import Any

from hostdev.cache.prices import Costs
from hostdev.core.memory import row_bytes
from hostdev.core.primitive import UPDATES, EmbeddingLookup


def host_costs_of(ops: Mapping[str, Mapping[str, Any]], tables: Sequence[Any]) -> Costs | None:
    """Return the nanoseconds of a row that passes by, is admitted, is evicted, of all these tables together.

    They are looked up at once, and so updated: the longest counts. Rows that are read or overwritten with their slots
    take as long a byte as those that are looked up.

    ops  as `OpLog.summary` has them

    None where nothing was looked up or updated on the host, so that nobody can tell.
    """
    looked_up = updated = 0.0
    for table in tables:
        per_byte = _per_byte(ops, EmbeddingLookup.name, table.name)
        looked_up = max(looked_up, per_byte * EmbeddingLookup.row_bytes(table))
        update = UPDATES[table.optimizer.primitive]
        updated = max(updated, _per_byte(ops, update.name, table.name) * update.row_bytes(table))
    if not looked_up or not updated:
        return None
    passing, whole = row_bytes((table.dim, table.optimizer) for table in tables)
    return Costs(looked_up + updated, looked_up * whole / passing, looked_up * whole / passing)


def _per_byte(ops: Mapping[str, Mapping[str, Any]], name: str, table: str) -> float:
    """Return the nanoseconds a byte of an op on a table; 0 where it moved none."""
    times = ops.get(name, {})
    part = times.get("by_scope", {table: times}).get(table) or {}
    return float(1e3 * part["total_us"] / part["bytes"]) if part.get("bytes") else 0.0
