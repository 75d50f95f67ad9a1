"""The check of a model: `check_model`."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import nn

from hostdev.data.batch import Batch
from hostdev.data.schema import Column, Schema, Space
from hostdev.host.table import HostTable
from hostdev.models import registry
from hostdev.runtime.runtime import Runtime

_DIM, _BATCH, _BATCHES, _VALUES = 4, 50, 6, 30


def check_model(model: "str | type[Any]", *, dim: int | None = None, **options: Any) -> None:
    """Check a model: a registered name, "package.module:Class", or the class.

    It is made for a small schema with numbers, ids and a bag, and trained for some steps: its logits must have the
    right shape, its gradients must reach its tables, and the same seed must give the same bits without overlap, with
    overlap, and with a cache.

    Args:
        model: The model.
        dim: Number of embedding columns; None for a small one.
        options: Further arguments of the model's constructor.

    Raises:
        AssertionError: A promise is broken.
        UserError: There is no such model, or its constructor or attributes are wrong.
    """
    schema = make_schema()
    batches = [make_batch(schema, number) for number in range(_BATCHES)]
    serial = _train(model, schema, dim or _DIM, batches, options, depth=0)
    for mode in ({"depth": 0}, {"depth": 2}, {"depth": 4, "cache": "30%"}):
        assert _train(model, schema, dim or _DIM, batches, options, **mode) == serial, (
            f"model {model!r} has other bits with {mode} than without overlap: it may draw from its own generator, "
            "or keep state between steps that is not a parameter or a buffer"
        )


def make_schema() -> Schema:
    """Return a schema with 3 numeric columns, 3 columns of ids, and a bag."""
    columns = [*(Column(f"id{number}", "id", f"id{number}") for number in range(3)), Column("bag", "bag", "bag")]
    first = 3 + len(columns)
    spaces = tuple(
        Space(column.space, 3 + number, first + number * _VALUES, _VALUES) for number, column in enumerate(columns)
    )
    rows = first + len(columns) * _VALUES
    return Schema("label", ("number0", "number1", "number2"), tuple(columns), spaces, rows)


def make_batch(schema: Schema, seed: int) -> Batch:
    """Return a batch of random samples; the first sample has an empty bag."""
    random = np.random.default_rng(seed)
    ids = np.stack([space.first + random.integers(0, space.size, _BATCH) for space in schema.spaces[:3]], 1)
    lengths = random.integers(0, 4, _BATCH).astype(np.int32)
    lengths[0] = 0
    values = schema.spaces[3].first + random.integers(0, _VALUES, lengths.sum())
    label = (random.random(_BATCH) < 0.5).astype(np.float32)
    dense = random.random((_BATCH, len(schema.dense)), dtype=np.float32)
    return Batch(label, dense, ids.astype(np.int32), {"bag": (values.astype(np.int32), lengths)})


def _train(
    name: "str | type[Any]", schema: Schema, dim: int, batches: list[Batch], options: dict[str, Any], **mode: Any
) -> tuple[list[float], str]:
    """Return the losses and the digest of a short training."""
    torch.manual_seed(0)
    model: Any = registry.make(name, schema, dim, seed=1, **options)
    tables: dict[str, Any] = {
        key: HostTable(spec.rows, spec.dim, spec.optimizer, name=key, seed=1, init=spec.init)
        for key, spec in model.tables.items()
    }
    before = {key: table.weights.copy() for key, table in tables.items()}
    features = {
        key: replace(
            feature, tables=tables[feature.tables] if feature.is_single else tuple(map(tables.get, feature.tables))
        )
        for key, feature in model.features.items()
    }
    runtime = Runtime(features, device="cpu", **mode)
    optimizer = torch.optim.Adam(model.parameters(), lr=model.lr)
    losses = []
    with runtime:
        for batch, rows in runtime.train(batches, ids=model.ids):
            optimizer.zero_grad()
            logits = model(torch.from_numpy(batch.dense), rows)
            assert isinstance(logits, torch.Tensor) and logits.shape == (_BATCH,), (
                f"model {name!r}: forward must return logits [{_BATCH}] for a batch of {_BATCH}, not "
                f"{list(logits.shape) if isinstance(logits, torch.Tensor) else logits!r}"
            )
            loss: Any = nn.functional.binary_cross_entropy_with_logits(logits.float(), torch.from_numpy(batch.label))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert np.isfinite(losses).all(), f"model {name!r}: a loss is not finite: {losses}"
    still = [key for key, table in tables.items() if np.array_equal(table.weights, before[key])]
    assert not still, f"model {name!r}: no gradient reached the tables {', '.join(still)}"
    arrays = [*(table.weights for table in tables.values()), *(value.numpy() for value in model.state_dict().values())]
    return losses, sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()
