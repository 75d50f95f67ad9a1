"""What a row's ways took the host in a run, of its ops' times."""

from collections.abc import Mapping, Sequence
from typing import Any

from hostdev.cache.prices import Costs
from hostdev.core.memory import row_bytes
from hostdev.core.primitive import UPDATES, CacheAdmit, CacheEvict, EmbeddingLookup


def host_costs_of(ops: Mapping[str, Mapping[str, Any]], tables: Sequence[Any]) -> Costs | None:
    """Return the nanoseconds of a row that passes by, is admitted, is evicted, of all these tables together.

    All tables are worked on at once: the longest counts. Where no row was admitted, or evicted, one counts as long a
    byte as rows that are looked up.

    ops  as `OpLog.summary` has them

    None where nothing was looked up or updated on the host, so that nobody can tell.
    """
    looked_up, admitted, evicted = (
        max(_per_row(ops, op, table) for table in tables) for op in (EmbeddingLookup, CacheAdmit, CacheEvict)
    )
    updated = max(_per_row(ops, UPDATES[table.optimizer.primitive], table) for table in tables)
    if not looked_up or not updated:
        return None
    passing, whole = row_bytes((table.dim, table.optimizer) for table in tables)
    alike = looked_up * whole / passing
    return Costs(looked_up + updated, admitted or alike, evicted or alike)


def _per_row(ops: Mapping[str, Mapping[str, Any]], op: Any, table: Any) -> float:
    """Return the nanoseconds a row of an op on a table; 0 where it moved none."""
    times = ops.get(op.name, {})
    part = times.get("by_scope", {table.name: times}).get(table.name) or {}
    return float(1e3 * part["total_us"] / part["bytes"]) * op.row_bytes(table) if part.get("bytes") else 0.0
