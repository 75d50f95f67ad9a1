"""Where a model's tables are stored, as the options say: by key, and on disk."""

from bisect import bisect_left
from dataclasses import replace

from hostdev.checkpoint.manager import SAVING_BYTES
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.key_rules import Admission, Eviction, MinCount, Unused
from hostdev.core.keys import SHARED, is_raw
from hostdev.core.memory import available_bytes, format_bytes, parse_bytes
from hostdev.core.registry import load_object
from hostdev.data.schema import Schema
from hostdev.distributed.agreement import take_least
from hostdev.distributed.process_group import ranks
from hostdev.distributed.world import World
from hostdev.host.disk.frame_pool import get_location_bytes
from hostdev.host.key_options import KEY_BYTES
from hostdev.models.model import Model
from hostdev.runtime import room
from hostdev.runtime.spec import CacheSpec, KeySpec
from hostdev.train.config import TrainConfig
from hostdev.train.storage_options import parse_capacity

LEAST_ROW = 64  # bytes; for smaller rows, what is kept in memory to find them would take about as much as the rows
_SHARE = 0.8  # of this process's free memory, if no capacity is given; batches take some of the rest
_MOST_ROWS = 1 << 29


def require_kind(settings: TrainConfig, schema: Schema) -> None:
    """Raise UserError if the data has raw ids, which only tables by key have room for."""
    if is_raw(schema.rows) and settings.tables != "dynamic":
        raise UserError(
            "the data has raw ids (hostdev preprocess --ids raw), which need tables that grow: give --tables dynamic"
        )


def set_keys(model: Model, settings: TrainConfig) -> None:
    """Make a model's tables tables by key, if the options of a `TrainConfig` say so.

    All tables have the same keys, and share the memory that --capacity gives.
    """
    if settings.tables != "dynamic":
        return
    admit, evict = _find_admission(settings), _find_eviction(settings)
    each = sum(spec.shape.nbytes(1) + KEY_BYTES for spec in model.tables.values())
    given, joined = parse_capacity(settings.capacity), ranks()
    processes = 1 if joined is None else joined.size  # which have about the same number of keys each
    free = available_bytes() * processes
    if isinstance(given, int):
        rows = given
    elif given is None and settings.table_dir is not None:
        raise UserError(
            "--tables dynamic needs a --capacity with --table-dir: the most keys, or the size of their rows"
        )
    elif given is None:
        rows = min(processes * _find_capacity(model, settings), _MOST_ROWS)
    else:
        rows = min(parse_bytes(given) // each, _MOST_ROWS)
    if rows < 1:
        raise UserError(f"--capacity {given}: a key takes {each} bytes in the tables together; give more")
    memory = each if settings.table_dir is None else (KEY_BYTES + get_location_bytes(rows)) * len(model.tables)
    if rows * memory > free:
        raise UserError(
            f"--capacity {settings.capacity}: {rows:,} keys take {format_bytes(rows * memory)} of memory, but "
            f"{format_bytes(free)} of host memory are free; give less, or use a smaller --emb-dim"
        )
    keys = KeySpec(admit, evict, settings.unknown_ids or SHARED)
    model.tables = {name: replace(spec, rows=rows, keys=keys) for name, spec in model.tables.items()}


def _find_admission(settings: TrainConfig) -> Admission | None:
    if settings.admission is not None:
        return load_object(settings.admission, "admission", Admission)
    return None if settings.admit_count is None else MinCount(settings.admit_count)


def _find_eviction(settings: TrainConfig) -> Eviction | None:
    if settings.eviction is not None:
        return load_object(settings.eviction, "eviction", Eviction)
    steps = settings.evict_unused
    return None if steps is None else Unused(steps, every=min(100, steps))


def _find_capacity(model: Model, settings: TrainConfig) -> int:
    """Return how many keys the free memory of this process allows, with all that is kept for each of them."""
    cache = None
    if settings.cache_policy is not None and settings.cache_rows is not None:
        cache = CacheSpec(settings.cache_rows, settings.cache_policy, settings.cache_window or 0)
    most, copies = available_bytes() * _SHARE, SAVING_BYTES if settings.saves else 0

    def fits(rows: int) -> bool:
        sizes = [room.GroupSize(rows, [spec.shape], True, cache, True) for spec in model.tables.values()]
        parts = room.kept(sizes, depth=settings.pipeline_depth, slots_on_host=True, copies=copies)
        return sum(parts.values()) <= most

    return bisect_left(range(1, _MOST_ROWS), True, key=lambda rows: not fits(rows))


def agree_on_capacity(model: Model, world: World) -> None:
    """Set the capacity of tables by key to the least that any rank has found; all ranks must call this."""
    mine = {name: spec.rows for name, spec in model.tables.items() if spec.keys is not None}
    least = take_least(mine, world.control.share(mine))
    model.tables = {name: replace(spec, rows=least.get(name, spec.rows)) for name, spec in model.tables.items()}


def set_disks(model: Model, settings: TrainConfig) -> None:
    """Put a model's tables on disk, if the options of a `TrainConfig` say so.

    The memory is shared in proportion to the bytes of the tables' rows. Tables whose rows have less than 64 bytes stay
    in memory, such as those of one column.
    """
    if settings.table_dir is None:
        return
    sizes = {name: spec.rows * spec.shape.nbytes(1) for name, spec in model.tables.items()}
    sizes = {name: size for name, size in sizes.items() if model.tables[name].shape.nbytes(1) >= LEAST_ROW}
    if not sizes:
        raise UserError(
            f"--table-dir has no effect: no table has rows of {LEAST_ROW} bytes or more, and smaller rows stay in "
            "memory; leave out --table-dir"
        )
    memory, total = parse_bytes(settings.table_memory or "0"), sum(sizes.values())
    window = Disk.window if settings.table_window is None else settings.table_window
    for name, size in sizes.items():
        disk = Disk(settings.table_dir, memory * size // total, window)
        model.tables = {**model.tables, name: replace(model.tables[name], disk=disk)}
