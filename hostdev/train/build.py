"""Create the model, tables, caches and device that the options of a run describe; used by several commands.

The rows of frozen columns, whose embeddings do not change, get gradients of 0.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.cache.planner import warm_up as warm_up_planner
from hostdev.checkpoint.manager import SAVING_BYTES
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.key_rules import Admission, Eviction, MinCount, Unused
from hostdev.core.keys import SHARED, is_raw
from hostdev.core.memory import available_bytes, format_bytes, parse_bytes
from hostdev.core.optimizers import FTRL, build_optimizer
from hostdev.core.progress import bar
from hostdev.core.registry import load_object
from hostdev.core.table_dtypes import FP32
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest, read_counts
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.distributed.agreement import take_least
from hostdev.distributed.process_group import ranks
from hostdev.distributed.world import World
from hostdev.host.disk.frame_pool import get_location_bytes
from hostdev.host.key_options import KEY_BYTES
from hostdev.host.warm_up import (
    warm_up_batches,
    warm_up_deduplication,
    warm_up_disk,
    warm_up_feature,
    warm_up_keys,
    warm_up_table,
)
from hostdev.kernels.compiling import run_calls
from hostdev.kernels.counter import key64
from hostdev.models import registry
from hostdev.models.fields import FIELDS, bag_feature
from hostdev.models.model import Model
from hostdev.runtime import placement
from hostdev.runtime.features import read_ids
from hostdev.runtime.placement import require
from hostdev.runtime.spec import Bag, CacheSpec, KeySpec, TableSpec
from hostdev.train.options import TrainConfig
from hostdev.train.storage_options import parse_capacity

LEAST_ROW = 64  # bytes; for smaller rows, the index of their locations would take about as much memory as the rows
_SHARE = 0.8  # share of this process's free memory for keys, if no capacity is given; batches need memory, too
_MOST_ROWS = 1 << 29
_COUNTED_ROWS = 1 << 16  # samples per batch of the counting pass
_COUNTS = "row counts"


def require_kind(settings: TrainConfig, schema: Schema) -> None:
    """Raise UserError if the data has raw ids, which only tables by key have room for."""
    if is_raw(schema.rows) and settings.tables != "dynamic":
        raise UserError(
            "the data has raw ids (hostdev preprocess --ids raw), which need tables that grow: give --tables dynamic"
        )


def set_keys(model: Model, settings: TrainConfig) -> None:
    """Turn a model's tables into tables by key, if the options of a `TrainConfig` say so.

    All tables have the same keys, and share the memory that --capacity gives.
    """
    if settings.tables != "dynamic":
        return
    admit, evict = _find_admission(settings), _find_eviction(settings)
    each = sum(spec.shape.nbytes(1) + KEY_BYTES for spec in model.tables.values())
    given, joined = parse_capacity(settings.capacity), ranks()
    processes = 1 if joined is None else joined.size  # each has about the same number of keys
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
    """Return how many keys fit into 80% of this process's free memory, with their caches and copies."""
    cache = None
    if settings.cache_policy is not None and settings.cache_rows is not None:
        cache = CacheSpec(settings.cache_rows, settings.cache_policy, settings.cache_window or 0)
    most, copies = available_bytes() * _SHARE, SAVING_BYTES if settings.saves else 0

    def fits(rows: int) -> bool:
        sizes = [placement.GroupSize(rows, [spec.shape], True, cache, True) for spec in model.tables.values()]
        parts = placement.kept(sizes, depth=settings.pipeline_depth, slots_on_host=True, copies=copies)
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
    in memory, such as tables of one column.
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


def seed_torch(seed: int) -> None:
    """Seed torch's random generators, from which layers such as dropout draw, before a model is created."""
    torch.manual_seed(key64(seed, "torch") >> 1)  # 63 bits, because some devices take signed seeds


def model_of(
    settings: TrainConfig,
    schema: Schema,
    set_vectors: Callable[[Model, TrainConfig, Schema], object] = lambda model, settings, schema: None,
) -> Model:
    """Return the model that the options select, for data with this schema; raise UserError if an option is wrong.

    `set_vectors` sets the initial vectors of a model's tables.
    """
    require_kind(settings, schema)
    optimizer = None
    if settings.table_optimizer is not None:
        optimizer = build_optimizer(settings.table_optimizer, settings.table_lr, settings.table_weight_decay)
    dim = settings.emb_dim or registry.default_dim(settings.model)
    model = registry.make(settings.model, schema, dim, seed=settings.seed, optimizer=optimizer)
    if settings.table_lr is not None and optimizer is None:
        for spec in vector_tables(model).values():
            try:
                spec.optimizer.lr = settings.table_lr
            except ValueError as error:
                raise UserError(f"--table-lr {settings.table_lr}: {error}") from None
    if settings.table_weight_decay:
        _decay(model, settings.table_weight_decay)
    if settings.table_dtype != FP32:
        model.tables = {name: replace(spec, dtype=settings.table_dtype) for name, spec in model.tables.items()}
    if settings.table_slots != FP32:
        model.tables = {name: replace(spec, slots=settings.table_slots) for name, spec in model.tables.items()}
    if settings.initial_vectors is not None:
        set_vectors(model, settings, schema)
    set_keys(model, settings)
    set_disks(model, settings)
    return model


def _decay(model: Model, decay: float) -> None:
    """Set the weight decay of a model's embedding tables; raise UserError if a table's optimizer does not allow it."""
    tables = dict(model.tables)
    for name, spec in vector_tables(model).items():
        try:
            optimizer: Any = replace(spec.optimizer, weight_decay=decay)
        except TypeError as error:
            raise UserError(f"--table-weight-decay {decay}: {error}") from None
        if optimizer.lr * decay >= 1:
            raise UserError(
                f"--table-weight-decay ({decay}) multiplied by the learning rate of table {name!r} ({optimizer.lr}) "
                "must be below 1; give a smaller --table-weight-decay or --table-lr"
            )
        tables[name] = replace(spec, optimizer=optimizer)
    model.tables = tables


def vector_tables(model: Model) -> dict[str, TableSpec]:
    """Return the tables whose dimension is above 1, or all tables if there are none."""
    found = {name: spec for name, spec in model.tables.items() if spec.dim > 1}
    return found or model.tables


def group_features(model: Model) -> dict[str, list[str]]:
    """Return the names of the features that look up each table, by table name."""
    found: dict[str, list[str]] = {name: [] for name in model.tables}
    for feature, spec in model.features.items():
        for table in [spec.tables] if spec.is_single else spec.tables:
            found[table].append(feature)
    return found


def groups_of(model: Model) -> list[list[str]]:
    """Return tables' names by group, as in `Runtime`: those by row with equal features and row counts or one by key."""
    groups: dict[Any, list[str]] = {}
    for table, features in group_features(model).items():
        if not features:
            raise UserError(f"the model declares table {table!r}, but no feature looks it up; remove the table")
        spec = model.tables[table]
        groups.setdefault((spec.rows if spec.keys is None else table, *features), []).append(table)
    return list(groups.values())


def ids_of(model: Model, batch: Batch, table: str) -> npt.NDArray[Any]:
    """Return all ids that a batch looks up in a table, [N]."""
    given = model.ids(batch)
    features = group_features(model)[table]
    return np.concatenate([read_ids(name, model.features[name], given[name]).values for name in features])


def known_counts(model: Model, data: Path, found: Manifest, reader: ShardReader) -> npt.NDArray[np.int64] | None:
    """Return how often the training samples use each row, int64 [V], according to the vocabulary.

    Return None if the data has no vocabulary, if the model has several groups of tables, or if a table's number of rows
    is not the data's number of ids.
    """
    groups = groups_of(model)
    if len(groups) > 1 or model.tables[groups[0][0]].rows != found.schema.rows or found.vocabulary is None:
        return None
    require({_COUNTS: 8 * found.schema.rows})
    counts = read_counts(data, found)
    dense = len(found.schema.dense)
    if not (ids_of(model, next(reader.batches(1)), groups[0][0]) < dense).any():
        counts[:dense] = 0  # the rows of dense columns; only Wide & Deep looks them up
    return counts


def count_uses(model: Model, data: Path, found: Manifest, reader: ShardReader) -> list[npt.NDArray[np.int64]]:
    """Return how often the training samples use each row, int64 [V] for each group of tables.

    The counts come from `known_counts` if possible, as for hostdev's own models. Otherwise, this function reads all
    training samples once.
    """
    known = known_counts(model, data, found, reader)
    if known is not None:
        return [known]
    groups = groups_of(model)
    sizes = [model.tables[tables[0]].rows for tables in groups]
    require({_COUNTS: 8 * sum(sizes)})
    made = [np.zeros(rows, np.int64) for rows in sizes]
    with bar(reader.steps(_COUNTED_ROWS), "counting", "step") as progress:
        for batch in reader.batches(_COUNTED_ROWS):
            for counts, tables in zip(made, groups, strict=True):
                np.add.at(counts, ids_of(model, batch, tables[0]), 1)  # takes time independent of the table's size
            progress.update()
    return made


def make_cache_specs(
    settings: TrainConfig, model: Model, data: Path, found: Manifest, reader: ShardReader
) -> dict[str, CacheSpec]:
    """Return each group's cache for `Runtime`, by the group's first table; empty if the settings have no cache."""
    if settings.cache_policy is None:
        return {}
    assert settings.cache_rows is not None
    groups = groups_of(model)
    counts: list[Any] = [None] * len(groups)
    if settings.cache_policy == "static":
        counts[:] = count_uses(model, data, found, reader)
    elif settings.cache_policy == "lookahead":
        counts[0] = known_counts(model, data, found, reader)
    how = settings.cache_rows, settings.cache_policy, settings.cache_window or 0
    return {tables[0]: CacheSpec(*how, each) for tables, each in zip(groups, counts, strict=True)}


def estimate_uses(model: Model, batch: Batch, batch_size: int) -> int:
    """Return how many ids a batch of `batch_size` samples looks up, estimated from a smaller batch."""
    uses = sum(len(ids_of(model, batch, tables[0])) for tables in groups_of(model))
    return int(np.ceil(uses * batch_size / max(1, len(batch))))


def warm_up_kernels(
    model: Model, batch: Batch, id_type: str, *, bf16: bool, cached: bool, squares: bool, processes: int
) -> None:
    """Compile or load a run's kernels before the first step is timed.

    Args:
        model: The model.
        batch: Any batch of the data. The function reads from it which features have weights.
        id_type: The dtype of the ids.
        bf16: Whether the dense layers compute in bfloat16.
        cached: Whether there is a cache.
        squares: Whether the loss includes the sum of squares of a table's weights.
        processes: Maximum number of processes that compile, including this one.
    """
    specs = model.tables.values()
    by_key = any(spec.keys is not None for spec in specs)
    # int32 for slots of the cache, for row numbers of tables by key, and for frames of tables on disk
    on_disk = any(spec.disk is not None for spec in specs)
    row_dtype = np.dtype(np.int32 if by_key else id_type)
    dtypes = {np.dtype(id_type), row_dtype, *([np.dtype(np.int32)] if cached or on_disk else [])}
    further: dict[Callable[[], object], bool] = {
        warm_up_keys: by_key,
        partial(warm_up_planner, row_dtype): cached or on_disk,
        partial(warm_up_disk, row_dtype): on_disk,
    }
    kinds = {(type(spec.optimizer), spec.dim == 1): (spec.optimizer, spec.dim) for spec in specs}
    stored = {(FP32, FP32), *((spec.dtype, spec.slots_dtype) for spec in specs)}  # float32 for cached rows
    features = {}
    given = model.ids(batch)
    for name, feature in model.features.items():
        ids = given[name]
        weighted = isinstance(ids, Bag) and ids.weights is not None
        for table in [feature.tables] if feature.is_single else feature.tables:
            dim = model.tables[table].dim
            how = {"pooled": feature.pooling is not None, "weighted": weighted, "bfloat16": bf16 and dim > 1}
            features[dim, *how.values()] = partial(warm_up_feature, dim, **how)
    run_calls(
        [
            *(partial(each, dtype) for dtype in dtypes for each in (warm_up_deduplication, warm_up_batches)),
            *(
                partial(warm_up_table, dtype, how, optimizer, dim, squares=squares)
                for dtype in dtypes
                for optimizer, dim in kinds.values()
                for how in sorted(stored)
            ),
            *features.values(),
            *(call for call, is_needed in further.items() if is_needed),
        ],
        processes,
    )


def device_of(name: str, *, tf32: bool) -> torch.device:
    """Select the device of this name and make its arithmetic deterministic."""
    from hostdev.device import backend

    device = backend.select(name)
    backend.set_tf32(device, tf32)
    backend.make_deterministic(device)
    return device


@dataclass(frozen=True)
class FrozenColumns:
    """The frozen columns, by the features that look them up.

    Attributes:
        features: For each feature with frozen columns, which of the schema's columns with one id are frozen, bool [F];
            None if the feature is a bag.
        tables: By feature, whether the rows of each of its tables are frozen.
    """

    features: Mapping[str, Tensor | None]
    tables: Mapping[str, tuple[bool, ...]]

    def detach(self, rows: Any) -> Any:
        """Return a model's rows, with the rows of frozen columns detached from the graph."""
        return {name: self._detach(name, rows[name]) if name in self.features else rows[name] for name in rows}

    def _detach(self, name: str, rows: Any) -> Any:
        mask, each = self.features[name], rows if isinstance(rows, tuple) else (rows,)
        found = []
        for is_frozen, values in zip(self.tables[name], each, strict=True):
            if not is_frozen:
                found.append(values)
            elif mask is None:
                found.append(values.detach())
            else:  # a model may have further ids before the schema's columns
                more = torch.zeros(values.shape[1] - len(mask), dtype=torch.bool)
                here = torch.cat([more, mask]).to(values.device)[None, :, None]
                found.append(torch.where(here, values.detach(), values))
        return tuple(found) if isinstance(rows, tuple) else found[0]


def freeze_columns(model: Model, schema: Schema, names: Sequence[str]) -> FrozenColumns | None:
    """Return the frozen columns of a model: `names`, and the columns that share their ids.

    Returns None if no feature looks them up. Rows of tables of dimension 1, such as first-order weights, are trained.
    Frozen rows get gradients of 0, so their tables' optimizers must not change rows that have a gradient of 0.

    Raises:
        UserError: The model lacks the features of hostdev's own models, or a table's optimizer changes rows that
            have a gradient of 0.
    """
    spaces = {column.space for column in schema.columns if column.name in names}
    ids = torch.tensor([column.space in spaces for column in schema.columns if column.kind == "id"], dtype=torch.bool)
    features: dict[str, Tensor | None] = {FIELDS: ids} if ids.any() else {}
    features |= {bag_feature(one.name): None for one in schema.columns if one.kind == "bag" and one.space in spaces}
    tables, names_of_tables = {}, set()
    for feature in features:
        if feature not in model.features:
            raise UserError(
                f"--frozen-vectors needs the features of hostdev's own models, but this model has no feature "
                f"{feature!r}; freeze rows in the model, or leave out --frozen-vectors"
            )
        spec = model.features[feature]
        each = (spec.tables,) if spec.is_single else tuple(spec.tables)
        tables[feature] = tuple(model.tables[name].dim > 1 for name in each)
        names_of_tables |= {name for name in each if model.tables[name].dim > 1}
    for name in sorted(names_of_tables):
        optimizer = model.tables[name].optimizer
        if isinstance(optimizer, FTRL) or getattr(optimizer, "weight_decay", 0.0) > 0:
            raise UserError(
                f"--frozen-vectors: {optimizer!r} changes rows of table {name!r} that get no gradient; give another "
                "--table-optimizer, without weight decay"
            )
    return FrozenColumns(features, tables) if features else None
