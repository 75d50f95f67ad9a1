"""Checks that a runtime's tables fit its device, ranks, caches and host memory; creates the caches."""

from collections.abc import Mapping
from typing import Any

import torch

from hostdev.cache.cache import EmbeddingCache
from hostdev.cache.options import rows_of
from hostdev.core.errors import UserError
from hostdev.core.memory import TableShape
from hostdev.core.primitive import OpLog
from hostdev.device.backend import is_accelerator
from hostdev.device.table import DeviceTable
from hostdev.distributed.agreement import take_least
from hostdev.distributed.world import World
from hostdev.pipeline.groups import Group
from hostdev.pipeline.keys import KeyedRows
from hostdev.runtime import room
from hostdev.runtime.features import GroupSpec, on_host
from hostdev.runtime.spec import CacheSpec

CacheSize = int | str | CacheSpec


def require_place(groups: list[GroupSpec], device: torch.device) -> None:
    """Raise ValueError if a device table is not on the runtime's device."""
    for group in groups:
        for table in group.tables:
            if isinstance(table, DeviceTable) and table.device != device:
                raise ValueError(f"table {table.name!r} is on {table.device}, but the Runtime's device is {device}")


def cache_specs(
    cache: CacheSize | Mapping[str, CacheSize | None] | None, groups: list[GroupSpec]
) -> list[CacheSpec | None]:
    """Return each group's `CacheSpec`, or None for a group without a cache, from the argument `cache` of `Runtime`."""
    if cache is None:
        return [None] * len(groups)
    if not isinstance(cache, Mapping):
        spec = cache if isinstance(cache, CacheSpec) else CacheSpec(cache)
        if not any(on_host(group) for group in groups):
            raise UserError("a cache has no effect if all tables are on the device; leave out cache=")
        return [spec if on_host(group) else None for group in groups]
    specs: list[CacheSpec | None] = [None] * len(groups)
    for name, value in cache.items():
        found = [i for i, group in enumerate(groups) if name in [table.name for table in group.tables]]
        if not found:
            known = [table.name for group in groups for table in group.tables]
            raise ValueError(f"a cache is given for table {name!r}, but the tables are {', '.join(known)}")
        if not on_host(groups[found[0]]):
            raise UserError(f"a cache has no effect on table {name!r}, which is on the device; remove it from cache=")
        if specs[found[0]] is not None:
            raise ValueError(
                f"table {name!r} shares its ids, and so its cache, with another table in cache=; name only one of them"
            )
        if value is not None:
            specs[found[0]] = value if isinstance(value, CacheSpec) else CacheSpec(value)
    return specs


def make_cache(
    group: GroupSpec, spec: CacheSpec | None, device: torch.device, world: World, log: OpLog | None
) -> EmbeddingCache | None:
    """Return a group's cache, or None without a `CacheSpec`."""
    if spec is None:
        return None
    counts, rows = spec.counts, spec.rows
    table = group.tables[0]
    if table.capabilities.by_key:
        if counts is not None:
            raise ValueError(f"table {table.name!r}: counts are by row, but this is a table by key; leave out counts")
        rows = rows_of(rows, table.capacity)
    if counts is not None:
        counts = world.take_part(counts, lambda: table.ids(0, table.rows))  # type: ignore[union-attr]
    options: dict[str, Any] = {"counts": counts, "record": spec.record, "log": log}
    return EmbeddingCache(group.tables, rows, spec.policy, device, spec.window, **options)  # type: ignore[arg-type]


def make_groups(
    groups: list[GroupSpec], specs: list[CacheSpec | None], device: torch.device, world: World, log: OpLog | None
) -> list[Group]:
    """Return the groups for the pipeline, with a cache for each group that has a `CacheSpec`."""
    found = []
    for group, spec in zip(groups, specs, strict=True):
        cache, table = make_cache(group, spec, device, world, log), group.tables[0]
        keys = KeyedRows(table, group.unknown, cache) if table.capabilities.by_key else None  # type: ignore[arg-type]
        found.append(Group(group.tables, cache, log, keys))  # type: ignore[arg-type]
    return found


def require_parts(groups: list[GroupSpec], world: World) -> None:
    """Raise ValueError unless every table holds this rank's part, or, without other ranks, all rows."""
    wanted = world.part()
    for table in (table for group in groups for table in group.tables):
        part = table.part
        if part != wanted:
            raise ValueError(
                f"table {table.name!r} holds {'all rows' if part is None else f'part {part[0]} of {part[1]}'}, but "
                + ("there are no other ranks" if wanted is None else f"this is rank {wanted[0]} of {wanted[1]}")
                + "; create the table with part=ranks.part(), and the Runtime with ranks=ranks"
            )


def agree_on_capacity(groups: list[GroupSpec], world: World) -> None:
    """Set the capacity of tables by key that were given none: the least that the memory of all ranks allows."""
    tables: list[Any] = [table for group in groups for table in group.tables]
    mine = {table.name: table.capacity for table in tables}
    least = take_least(mine, world.control.share(mine))
    for table in tables:
        if table.has_default_capacity:
            table.limit(least[table.name])


def require_room(groups: list[GroupSpec], specs: list[CacheSpec | None], depth: int, device: torch.device) -> None:
    """Raise UserError if the free host memory is too small for what a runtime needs besides its tables."""
    sizes = [
        room.GroupSize(
            group.tables[0].most_rows,
            [TableShape(table.dim, table.optimizer, table.dtype, table.slots_dtype) for table in group.tables],
            on_host(group),
            spec,
            group.has_keys,
            [getattr(table, "disk", None) for table in group.tables],
        )
        for group, spec in zip(groups, specs, strict=True)
    ]
    beside = room.kept(sizes, depth=depth, slots_on_host=not is_accelerator(device))
    for name in ("tables", "directories of keys"):  # they exist, or the table has checked them
        beside.pop(name, None)
    room.require(beside, room.free_with_counts(beside))
