"""Wide & Deep over batches whose ids and weights a test makes itself: any rows, any fields, no data set."""

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hostdev.data.schema import Column, Schema, Space
from hostdev.models.wide_deep.network import LAYERS, WideDeep
from hostdev.runtime.spec import Bag, CacheSpec
from tests.trainers import make_trainer

FIELDS = 39
SMALL = (32, 16)  # hidden layers: a simulated device is slow, and sees no more in a large network


@dataclass(frozen=True, eq=False)
class FieldsBatch:
    """Label [B], ids [B, F] and weights [B, F]."""

    label: Any
    ids: Any
    weights: Any

    @property
    def dense(self):
        return np.empty((len(self.label), 0), np.float32)

    @property
    def step_rows(self):
        return len(self)

    def __len__(self):
        return len(self.label)


class FieldsModel(WideDeep):
    """Wide & Deep that takes the ids and weights as they are."""

    def ids(self, batch):
        return {"fields": Bag(batch.ids, weights=batch.weights)}


def schema_of(rows, fields=FIELDS):
    columns = tuple(Column(f"c{i}", "id", "values") for i in range(fields))
    return Schema("label", (), columns, (Space("values", 0, 1, rows - 1),), rows)


def cache_of(options):
    """A cache's options as tests write them: capacity_rows and others of `CacheSpec`."""
    if options is None:
        return None
    return CacheSpec(
        options["capacity_rows"], **{key: value for key, value in options.items() if key != "capacity_rows"}
    )


def trainer_of(
    rows,
    dim,
    *,
    mix=True,
    seed=1,
    device=None,
    layers=None,
    cache=None,
    fields=FIELDS,
    dtype="fp32",
    slots="fp32",
    **options,
):
    """A trainer, whose dense side is on the device; small layers where that is simulated, unless they are given.

    dtype  of the tables' weights
    slots  dtype of their optimizers' slots
    """
    device = device or torch.device("cpu")
    layers = layers or (SMALL if "tests.standin.plugin" in sys.modules else LAYERS)
    model = FieldsModel(schema_of(rows, fields), dim, seed=seed, layers=layers)
    model.tables = {name: replace(spec, dtype=dtype, slots=slots) for name, spec in model.tables.items()}
    return make_trainer(model, host_device_mix=mix, device=device, seed=seed, cache=cache_of(cache), **options)
