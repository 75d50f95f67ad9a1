"""Wide & Deep for benchmarks, with tables of any size, on ids and weights that the benchmarks draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hostdev.data.schema import Column, Schema, Space
from hostdev.data.shards import ShardReader
from hostdev.models.wide_deep.network import LAYERS, WideDeep
from hostdev.runtime.spec import Bag, CacheSpec
from hostdev.train.trainer import StepSettings, Trainer

FIELDS = 39


@dataclass(frozen=True, eq=False)
class FieldsBatch:
    """A batch of B samples of F fields."""

    label: np.ndarray  # float32 [B]
    ids: np.ndarray  # int32 or int64 [B, F]
    weights: np.ndarray  # float32 [B, F]

    @property
    def dense(self) -> np.ndarray:
        """The dense columns: none, because all columns are fields."""
        return np.empty((len(self.label), 0), np.float32)

    def __len__(self) -> int:
        return len(self.label)

    @property
    def step_rows(self) -> int:
        """The number of samples of the step, all of which one process reads."""
        return len(self.label)


def read_fields(reader: ShardReader, size: int, **which: Any) -> Iterator[FieldsBatch]:
    """Yield a reader's batches with all columns as fields; `which` is passed to `reader.batches`."""
    model = WideDeep(reader.schema, 1, seed=0, layers=())
    for batch in reader.batches(size, **which):
        fields = model.ids(batch)["fields"]
        yield FieldsBatch(batch.label, fields.values, fields.weights)


class FieldsModel(WideDeep):
    """Wide & Deep that takes the ids and weights of a `FieldsBatch` as they are."""

    def ids(self, batch: FieldsBatch) -> dict[str, Bag]:
        return {"fields": Bag(batch.ids, weights=batch.weights)}


def make_trainer(
    rows: int,
    dim: int,
    *,
    device: torch.device,
    mix: bool = True,
    cache: str | None = None,
    layers: Sequence[int] = LAYERS,
    precision: str = "fp32",
    **options: Any,
) -> Trainer:
    """Return a trainer with a wide and a deep table of `rows` rows, which the same 39 fields look up."""
    columns = tuple(Column(f"c{i}", "id", "values") for i in range(FIELDS))
    schema = Schema("label", (), columns, (Space("values", 0, 1, rows - 1),), rows)
    model = FieldsModel(schema, dim, seed=1, layers=layers)
    spec = None if cache is None else CacheSpec(cache)
    steps = StepSettings(1, precision=precision)
    return Trainer(model, host_device_mix=mix, device=device, steps=steps, cache=spec, **options)
