"""Checks that a new runtime's tables fit its device, ranks, caches and memory, and that all ranks have equal settings.

The host memory that training needs for its tables is estimated by purpose, before it is allocated. The memory of the
program itself, of dense layers and of evaluations does not grow with the tables, and is not counted.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hostdev.cache.cache import EmbeddingCache
from hostdev.cache.options import POLICIES, rows_of
from hostdev.cache.planner import MOST_ROWS, planner_bytes
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.memory import TableShape, available_bytes, format_bytes, row_bytes
from hostdev.core.primitive import OpLog
from hostdev.device.backend import is_accelerator
from hostdev.device.table import DeviceTable
from hostdev.distributed.agreement import UnlikeError, shown, take_least
from hostdev.distributed.world import World
from hostdev.host.disk.frame_pool import get_location_bytes
from hostdev.host.key_options import KEY_BYTES
from hostdev.host.table import HostTable
from hostdev.pipeline.batch_ids import Group
from hostdev.pipeline.keys import KeyedRows
from hostdev.runtime.features import FeatureBinding, GroupSpec, Stack, Table, on_host
from hostdev.runtime.spec import CacheSpec

_USE_BYTES = 24  # per occurrence of an id: the id, its unique id, and the position of the unique id
_SAVED_KEY_BYTES = 25  # per row of a table by key while a checkpoint is saved: copies of the keys, and their order
COUNTS = "counts of uses"  # names the memory of `CacheSpec.counts`, which the program has already allocated
_MARKS = 3  # bitmaps of rows while a checkpoint is saved: rows to save, not yet read, and written since
CacheSize = int | str | CacheSpec


def get_settings(
    bindings: Sequence[FeatureBinding],
    stacks: Sequence[Stack],
    groups: Sequence[GroupSpec],
    device: str,
    depth: int,
    dense_exchange: str,
    caches: Sequence[str],
) -> Mapping[str, Any]:
    """Return the settings of a runtime that must be equal on all ranks, by name: its tables, features and options.

    Args:
        bindings: The features.
        stacks: The stacks. The features of a stack are returned as one tensor.
        groups: The groups of tables.
        device: The type of the device, such as "cuda".
        depth: Number of batches that are read ahead.
        dense_exchange: How the dense gradients are summed, one of `EXCHANGES`.
        caches: For each group, `EmbeddingCache.describe`. The sizes of caches may differ between ranks, and policies
            may differ, too, if none of them is "lookahead".
    """
    tables = [table for group in groups for table in group.tables]
    names = ", ".join(table.name for table in tables)
    found: dict[str, Any] = {"the list of tables": names}
    for table in tables:
        found |= {f"{what} of table {table.name!r}": value for what, value in _get_table(table).items()}
    features = [_describe_feature(one, groups) for one in bindings]
    found["the list of features"] = ", ".join(one.name for one in bindings)
    found |= {f"feature {one.name!r}": text for one, text in zip(bindings, features, strict=True)}
    found |= {f"stack {one.name!r}": ", ".join(bindings[number].name for number in one.features) for one in stacks}
    found["the kind of device"] = device
    found["depth"] = depth  # ranks exchange the ids of the batches that each has read ahead
    found["dense_exchange"] = dense_exchange
    for group, cache in zip(groups, caches, strict=True):
        found[f"the cache of table {group.tables[0].name!r}"] = cache
    furthest = max((table.window for table in tables if table.capabilities.on_disk), default=None)
    text = "no table on disk" if furthest is None else f"tables on disk that look {furthest} batches ahead"
    found["the storage of tables"] = shown(furthest, text)
    return found


def get_parameters(parameters: Sequence[Tensor]) -> Mapping[str, Any]:
    """Describe each parameter whose gradients the ranks sum, with a checksum. All ranks must get the same result."""
    found: dict[str, Any] = {"the number of parameters": len(parameters)}
    for number, one in enumerate(parameters):
        values = one.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        text = f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}, values with checksum "
        text += f"{zlib.crc32(values.numpy().data):08x}"
        found[f"parameter {number}"] = text
    return found


def make_marks(tables: Sequence[Table], frozen: Sequence[bool]) -> list[int]:
    """Return checksums and their negatives, whose maxima over the ranks show whether the ranks' settings are equal.

    The settings are the learning rates of the tables, which tables are frozen, and the keys that were erased.
    """
    rates = [float(table.optimizer.lr) for table in tables]
    erased = [table.erased for table in tables]
    marks = [zlib.crc32(np.array(values, np.float64).tobytes()) for values in (rates, frozen, erased)]
    return [*marks, *(-mark for mark in marks)]


def require_marks(largest: Sequence[int], step: int) -> None:
    """Raise UnlikeError if `make_marks` differs between ranks; `largest`: the maximum of each number over the ranks."""
    whats = "the learning rates of the tables differ", "the frozen tables differ", "the keys given to erase() differ"
    for what, most, least in zip(whats, largest[: len(whats)], largest[len(whats) :], strict=True):
        if most != -least:
            raise UnlikeError(f"step {step}: {what} between ranks; change them on all ranks equally, in the same step")


MARKS = 6


def get_erasures(tables: Sequence[Table]) -> Mapping[str, Any]:
    """Return a checksum of the keys erased from each table, by name, which must be equal on all ranks."""
    return {f"the keys given to erase() of table {table.name!r}": f"checksum {table.erased:08x}" for table in tables}


def _get_table(table: Table) -> dict[str, Any]:
    return {
        **table.describe_size(),
        "dim": table.dim,
        "the optimizer": repr(table.optimizer),
        "the seed": table.seed,
        "init": repr(table.init) if isinstance(table, HostTable) else None,
        "dtype": table.dtype,
        "slots": table.slots_dtype,
        "the number of steps": table.step,
    }


def _describe_feature(one: FeatureBinding, groups: Sequence[GroupSpec]) -> str:
    tables = ", ".join(groups[group].tables[place].name for group, place in one.tables)
    feature = one.feature
    text = f"tables {tables}, pooling {feature.pooling}, padding {feature.padding}, dtype {feature.dtype}"
    return text + (f", unknown {feature.unknown}" if feature.unknown else "")


class GroupSize(NamedTuple):
    """The size of tables that are looked up with the same ids."""

    rows: int  # V, the number of rows on this rank
    tables: Sequence[TableShape]
    on_host: bool
    cache: CacheSpec | None = None
    by_key: bool = False  # a table by key; `rows` is its capacity
    disks: Sequence[Disk | None] = ()  # for each table, the disk for rows beyond its memory; empty without disks

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
        """Return the bytes of memory for the locations and plans of rows on disk, if a batch looks up `uses` ids."""
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
        *("tables", "places of rows on disk", "directories of keys", "cached rows", "the cache's plan", COUNTS),
        *("last writers of rows", "batches in flight"),
        *("bitmaps of changed rows", "copies for checkpoints", "copies of keys"),
    )
    parts = dict.fromkeys(names, 0)
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
    return EmbeddingCache(group.tables, rows, spec.policy, device, spec.window, **options)


def make_groups(
    groups: list[GroupSpec], specs: list[CacheSpec | None], device: torch.device, world: World, log: OpLog | None
) -> list[Group]:
    """Return the groups for the pipeline, with a cache for each group that has a `CacheSpec`."""
    found = []
    for group, spec in zip(groups, specs, strict=True):
        cache, keys = make_cache(group, spec, device, world, log), group.tables[0].key_rows
        keyed = None if keys is None else KeyedRows(keys, group.unknown, cache)
        found.append(Group(group.tables, cache, log, keyed))  # type: ignore[arg-type]
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
    """Limit each table by key that was created without a capacity to the smallest capacity that a rank has for it."""
    tables: list[Any] = [table for group in groups for table in group.tables]
    mine = {table.name: table.capacity for table in tables}
    least = take_least(mine, world.control.share(mine))
    for table in tables:
        if table.has_default_capacity:
            table.limit(least[table.name])


def require_room(groups: list[GroupSpec], specs: list[CacheSpec | None], depth: int, device: torch.device) -> None:
    """Raise UserError if the free host memory is too small for what a runtime needs besides its tables."""
    sizes = [
        GroupSize(
            group.tables[0].most_rows,
            [TableShape(table.dim, table.optimizer, table.dtype, table.slots_dtype) for table in group.tables],
            on_host(group),
            spec,
            group.has_keys,
            [getattr(table, "disk", None) for table in group.tables],
        )
        for group, spec in zip(groups, specs, strict=True)
    ]
    beside = kept(sizes, depth=depth, slots_on_host=not is_accelerator(device))
    for name in ("tables", "directories of keys"):  # these are allocated, or their table has checked that they fit
        beside.pop(name, None)
    require(beside, free_with_counts(beside))
