"""From options to a model and its trainer; what `train`, `verify` and `advise` share."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostdev.core.errors import UserError
from hostdev.core.optimizers import optimizer_of
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest, read_counts
from hostdev.data.schema import Schema
from hostdev.models import registry
from hostdev.models.model import Model
from hostdev.runtime.features import read_ids
from hostdev.runtime.spec import CacheSpec, TableSpec
from hostdev.train.config import TrainConfig


def model_of(settings: TrainConfig, schema: Schema) -> Model:
    """Return the model that the options name, for data with this schema; UserError where they do not go together."""
    optimizer = None
    if settings.table_optimizer is not None:
        optimizer = optimizer_of(settings.table_optimizer, settings.table_lr)
    dim = settings.emb_dim or registry.find(settings.model).default_dim
    model = registry.make(settings.model, schema, dim, seed=settings.seed, optimizer=optimizer)
    if settings.table_lr is not None and optimizer is None:
        for spec in vector_tables(model).values():
            try:
                spec.optimizer.lr = settings.table_lr
            except ValueError as error:
                raise UserError(f"--table-lr {settings.table_lr}: {error}") from None
    return model


def vector_tables(model: Model) -> dict[str, TableSpec]:
    """Return the tables of vectors, not those of single weights beside them; all if there are no others."""
    found = {name: spec for name, spec in model.tables.items() if spec.dim > 1}
    return found or model.tables


def group_features(model: Model) -> dict[str, list[str]]:
    """Return for each table the features that look it up."""
    found: dict[str, list[str]] = {name: [] for name in model.tables}
    for feature, spec in model.features.items():
        for table in [spec.tables] if spec.is_single else spec.tables:
            found[table].append(feature)
    return found


def groups_of(model: Model) -> list[list[str]]:
    """Return the tables by groups, as `Runtime` makes them: those that the same features look up."""
    groups: dict[Any, list[str]] = {}
    for table, features in group_features(model).items():
        if not features:
            raise UserError(f"the model wants table {table!r}, but none of its features looks it up")
        groups.setdefault((model.tables[table].rows, *features), []).append(table)
    return list(groups.values())


def ids_of(model: Model, batch: Batch, table: str) -> npt.NDArray[Any]:
    """Return all ids that a batch looks up in a table, [N]."""
    given = model.ids(batch)
    features = group_features(model)[table]
    return np.concatenate([read_ids(name, model.features[name], given[name]).values for name in features])


def counts_of(model: Model, data: Path, found: Manifest, sample: Batch) -> npt.NDArray[np.int64]:
    """Return how often the training rows use each row of the model's tables, from the vocabulary's counts.

    sample  a batch: whether the model looks the dense columns' own rows up

    Raises UserError where there are no counts, or tables whose ids are not those of the data.
    """
    if any(spec.rows != found.schema.rows for spec in model.tables.values()):
        raise UserError("--cache-policy static needs tables over all ids of the data, whose counts the vocabulary has; "
                        "use another --cache-policy")  # fmt: skip
    counts = read_counts(data, found)
    dense = len(found.schema.dense)
    if not any((ids_of(model, sample, table) < dense).any() for table in model.tables):
        counts[:dense] = 0
    return counts


def cache_of(
    settings: TrainConfig, model: Model, data: Path, found: Manifest, sample: Batch
) -> dict[str, CacheSpec] | None:
    """Return what resolved settings say of the cache of each group, as `Runtime` takes it; None for no cache."""
    if settings.cache_policy is None:
        return None
    assert settings.cache_rows is not None
    counts = counts_of(model, data, found, sample) if settings.cache_policy == "static" else None
    spec = CacheSpec(settings.cache_rows, settings.cache_policy, settings.cache_window or 0, counts)
    return {tables[0]: spec for tables in groups_of(model)}


def most_uses(model: Model, batch: Batch, batch_size: int) -> int:
    """Return about how many ids a batch of this size looks up, from a sample of them."""
    uses = sum(len(ids_of(model, batch, tables[0])) for tables in groups_of(model))
    return int(np.ceil(uses * batch_size / max(1, len(batch))))


def device_of(name: str, *, tf32: bool) -> torch.device:
    """Return the device of this name, with deterministic arithmetic."""
    from hostdev.device import backend

    device = backend.select(name)
    backend.set_tf32(device, tf32)
    backend.make_deterministic(device)
    return device
