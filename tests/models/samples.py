"""Small data for models: dense columns, columns of ids of which two share a range, and bags."""

import numpy as np

from hostdev.data.batch import Batch
from hostdev.data.schema import SINGLE_LABEL, Column, Schema, Space

# Options of the models' constructors: small networks, for speed.
SMALL = {
    "wide_deep": {"layers": (32, 16)},
    "deepfm": {"layers": (32, 16)},
    "dlrm": {"bottom": (16,), "top": (32, 16)},
    "dcn": {"layers": (32, 16), "rank": 8},
    "shared_bottom": {"bottom": (32, 16), "tower": (8,)},
    "mmoe": {"experts": 3, "expert": (16,), "tower": (8,)},
}


def schema_of(dense=3, ids=4, bags=1, values=12, targets=SINGLE_LABEL):
    """Return columns c0, c1, ... of ids, the last two of one range, and bags b0, b1, ...; `values` ids per range."""
    columns = [Column(f"c{i}", "id", f"s{min(i, max(0, ids - 2))}") for i in range(ids)]
    columns += [Column(f"b{i}", "bag", f"s{i}") for i in range(bags)]
    names = list(dict.fromkeys(column.space for column in columns))
    fixed = dense + len(names)
    spaces = tuple(Space(name, dense + i, fixed + i * values, values) for i, name in enumerate(names))
    rows = fixed + len(names) * values
    return Schema("label", tuple(f"d{i}" for i in range(dense)), tuple(columns), spaces, rows, targets)


def batch_of(schema, size, seed=0, dtype=np.int32):
    """Return a batch with labels that depend on the ids; the first sample's bags are empty."""
    rng = np.random.default_rng(seed)
    spaces = {space.name: space for space in schema.spaces}

    def draw(column, n):
        space = spaces[column.space]
        found = space.first + (rng.zipf(1.5, n) - 1) % (space.size + 1)
        return np.where(found == space.first + space.size, space.oov, found).astype(dtype)

    dense = rng.random((size, len(schema.dense)), dtype=np.float32)
    single = [draw(column, size) for column in schema.columns if column.kind == "id"]
    ids = np.stack(single, 1) if single else np.empty((size, 0), dtype)
    bags = {}
    for column in schema.columns:
        if column.kind == "bag":
            lengths = rng.integers(0, 4, size).astype(np.int32)
            lengths[0] = 0
            bags[column.name] = draw(column, lengths.sum()), lengths
    score = np.sin(ids.sum(1)) + dense.sum(1) - 0.3 * len(schema.dense)
    label = (rng.random(size) < 1 / (1 + np.exp(-2 * score))).astype(np.float32)
    if schema.targets == SINGLE_LABEL:
        return Batch(label, dense, ids, bags)
    labels = [label]
    for number, name in enumerate(schema.targets.more, 1):
        one = np.cos(number * ids.sum(1)) + rng.normal(size=size)
        labels.append((one if name in schema.targets.numeric else one > 0).astype(np.float32))
    if schema.label in schema.targets.numeric:
        labels[0] = (score + rng.normal(size=size)).astype(np.float32)
    weight = None if schema.targets.weight is None else rng.random(size, dtype=np.float32)
    return Batch(np.stack(labels, 1) if len(labels) > 1 else labels[0], dense, ids, bags, weight=weight)
