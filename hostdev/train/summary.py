"""Parts of summary.json: the caches, the memory, the ranks, the removed lines of ops.log; and one of config.json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hostdev.cache.cache import EmbeddingCache
from hostdev.cache.prices import Costs
from hostdev.core.memory import TableShape, row_bytes
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.run_files import RotatedFile
from hostdev.core.table_primitives import UPDATES, CacheAdmit, CacheEvict, EmbeddingLookup
from hostdev.data.manifest import Manifest
from hostdev.distributed.two_levels import TwoLevelChannel
from hostdev.distributed.world import World
from hostdev.train.trainer import Trainer


def get_caches(caches: Sequence[EmbeddingCache], ops: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry "cache" of summary.json or, for several caches, the entry "caches" by names of tables.

    Args:
        ops: Durations, as `OpLog.summary` returns them.
    """
    found = {
        " and ".join(table.name for table in cache.tables): cache.summary(
            optimum=False, host=get_host_costs(ops, cache.tables)
        )
        for cache in caches
    }
    if not found:
        return {}
    return {"cache": next(iter(found.values()))} if len(found) == 1 else {"caches": found}


def get_disks(tables: Iterable[Any]) -> dict[str, Any]:
    """Return the entry "disk" of summary.json: for each table on disk, what has moved; empty if there is none."""
    found = {table.name: table.storage.summary() for table in tables if table.capabilities.on_disk}
    return {"disk": found} if found else {}


def get_host_costs(ops: Mapping[str, Mapping[str, Any]], tables: Sequence[Any]) -> Costs | None:
    """Return the host's time, in nanoseconds, for a row that bypasses the cache, is admitted, or is evicted.

    Tables are processed in parallel, so the slowest table counts. If no row was admitted, or none was evicted, the time
    for such a row is estimated from the lookups' time per byte.

    Args:
        ops: Durations, as `OpLog.summary` returns them.

    Returns:
        The three times, or None if no row was looked up, or none was updated, on the host.
    """
    looked_up, admitted, evicted = (
        max(_per_row(ops, op, table) for table in tables) for op in (EmbeddingLookup, CacheAdmit, CacheEvict)
    )
    updated = max(_per_row(ops, UPDATES[table.optimizer.primitive], table) for table in tables)
    if not looked_up or not updated:
        return None
    passing, whole = row_bytes((table.dim, table.optimizer) for table in tables)
    estimate = looked_up * whole / passing
    return Costs(looked_up + updated, admitted or estimate, evicted or estimate)


def _per_row(ops: Mapping[str, Mapping[str, Any]], op: Any, table: Any) -> float:
    """Return the nanoseconds per row of an op on a table; 0 if the op moved no row."""
    times = ops.get(op.name, {})
    part = times.get("by_scope", {table.name: times}).get(table.name) or {}
    return float(1e3 * part["total_us"] / part["bytes"]) * op.row_bytes(table) if part.get("bytes") else 0.0


def get_ranks(world: World, trainer: Trainer, mesh: str | None, sent: Mapping[str, int]) -> dict[str, Any]:
    """Return the number of processes and the bytes they exchanged; empty for a single process.

    Args:
        sent: Bytes that all processes have sent.
    """
    if world.size == 1:
        return {}
    runtime = trainer.runtime
    return {
        "ranks": {
            "size": world.size,
            "mesh": mesh,
            "parts": trainer.cut,
            "dense_exchange": runtime.dense_exchange,
            "backend": runtime.dense_channel.backend,
            "hosts": len(world.control.hosts),
            "exchange_levels": 2 if isinstance(world.control, TwoLevelChannel) else 1,
            "exact": runtime.dense_exchange == EXCHANGES[0],
            "sent_bytes": dict(sent),
        }
    }


def get_memory(trainer: Trainer, *, on_host: bool) -> dict[str, Any]:
    """Return the entry "memory" of summary.json: bytes by part, in host memory and on the device.

    The parts in host memory are the upper bounds that were checked before the first step.

    Args:
        on_host: Whether the tables are in host memory.
    """
    network = [each for group in trainer.adam.param_groups for each in group["params"]]
    states = (each for state in trainer.adam.state.values() for each in state.values() if hasattr(each, "numel"))
    device = {
        "tables": 0
        if on_host
        else sum(TableShape(table.dim, table.optimizer).nbytes(table.rows) for table in trainer.tables.values()),
        "cached rows": sum(cache.nbytes for cache in trainer.caches),
        "dense weights": _count_bytes(network),
        "dense optimizer state": _count_bytes(states),
    }
    if trainer.host_budget.parts.get("cached rows"):
        del device["cached rows"]  # of a cache whose device is the CPU
    host = dict(trainer.host_budget.parts)
    return {"memory": {"host": host, "device": {name: size for name, size in device.items() if size}}}


def _count_bytes(tensors: Iterable[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def get_data_set(found: Manifest) -> dict[str, Any]:
    """Return the entry "data_set" of config.json: the data set's size, its columns, and statistics of its rows."""
    schema, statistics = found.schema, found.statistics
    return {
        "rows": {split: found.rows(split) for split in found.splits},
        "shards": sum(len(found.shards(split)) for split in found.splits),
        "ids": found.vocabulary_size,
        "vocabulary": found.vocabulary is not None,
        "labels": list(schema.labels),
        "columns": {"numbers": len(schema.dense), "ids": len(schema.ids), "bags": len(schema.bags)},
        **{name: statistics[name] for name in ("rejected", "label_mean", "out_of_vocabulary") if name in statistics},
    }


def get_ops_log(file: RotatedFile | None) -> dict[str, Any]:
    """Return the size limit of ops.log and the number of bytes removed from it; empty if none were removed."""
    if file is None or not file.dropped_bytes:
        return {}
    return {"ops_log": {"limit_bytes": file.limit, "dropped_bytes": file.dropped_bytes}}
