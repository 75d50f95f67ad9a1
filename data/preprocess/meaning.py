"""Comparison of two data sets: whether columns, ids, hash buckets and scaled numbers have the same meaning."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hostdev.data.batch import Batch
from hostdev.data.manifest import SCALING_STATISTICS, Manifest
from hostdev.data.preprocess.stored import StoredVocabulary
from hostdev.data.schema import Schema
from hostdev.kernels.arrays import Array

_AT_ONCE = 1 << 20  # ids compared at a time
_SHOWN = 120  # maximum characters of a value, or of a list of columns, in a message


def difference(there: Manifest, theirs: Path, here: Manifest, root: Path) -> str | None:
    """Describe how a data set differs from a checkpoint's data set.

    Returns None if ids that exist in both data sets, and scaled numbers, have the same meaning.

    Args:
        there: Manifest of the checkpoint's data set.
        theirs: Folder with the vocabulary of the checkpoint's data set.
        here: Manifest of the data set.
        root: Folder of the data set.

    Raises:
        UserError: A vocabulary is damaged.
    """
    if there.identity == here.identity:
        return None
    found = different_columns(there, here) or _compare("hash buckets", _buckets(there), _buckets(here))
    if found is not None:
        return found
    if there.vocabulary is None or here.vocabulary is None:
        return None
    return _compare_ids(StoredVocabulary(theirs, there), StoredVocabulary(root, here))


def different_columns(there: Manifest, here: Manifest) -> str | None:
    """Describe the first difference from a checkpoint's columns, scaling or hashed features; None if there is none."""
    pairs = (
        ("numeric columns", there.schema.dense, here.schema.dense),
        ("columns with ids", _columns(there.schema), _columns(here.schema)),
        ("scaling of numbers", _scaling(there), _scaling(here)),
        ("hashed features", _hashed(there), _hashed(here)),
    )
    return next((found for pair in pairs if (found := _compare(*pair)) is not None), None)


def _compare(what: str, a: tuple[str, ...], b: tuple[str, ...]) -> str | None:
    if a == b:
        return None
    order = " (only the order differs)" if sorted(a) == sorted(b) else ""
    return f"different {what}{order}: {_shown(a)} in the checkpoint, {_shown(b)} in the data set"


def _compare_ids(there: StoredVocabulary, here: StoredVocabulary) -> str | None:
    both = min(len(there.table), len(here.table))
    for start in range(0, both, _AT_ONCE):
        for name in ("field", "value"):
            a, b = (
                one.table[name].slice(start, min(_AT_ONCE, both - start)).cast(pa.string()) for one in (there, here)
            )
            if a.equals(b):
                continue
            pairs = zip(a.to_pylist(), b.to_pylist(), strict=True)
            number = start + next(i for i, (x, y) in enumerate(pairs) if x != y)
            one, other = (each.text(number)[:_SHOWN] for each in (there, here))
            return f"different ids: id {number} is {one} in the checkpoint, {other} in the data set"
    return None


def with_known_ids(batch: Batch, schema: Schema, known: int) -> Batch:
    """Replace each id >= `known` with the out-of-vocabulary id of its column.

    Args:
        schema: Schema of the batch's data set.
        known: Number of ids that the model has.
    """
    if schema.rows <= known:
        return batch
    oov = {space.name: space.oov for space in schema.spaces}
    oov_ids = {column.name: oov[column.space] for column in schema.columns}

    def mapped(ids: Array, to: Any) -> Array:
        return np.where(ids < known, ids, to).astype(ids.dtype)

    ids = mapped(batch.ids, np.array([oov_ids[name] for name in schema.ids], np.int64)) if schema.ids else batch.ids
    bags = {name: (mapped(values, oov_ids[name]), lengths) for name, (values, lengths) in batch.bags.items()}
    return replace(batch, ids=ids, bags=bags)


def _columns(schema: Schema) -> tuple[str, ...]:
    return tuple(
        column.name
        + " (bag)" * (column.kind == "bag")
        + f" (ids of {column.space})" * (column.space != column.name)
        + " (weighted)" * column.weighted
        for column in schema.columns
    )


def _buckets(data: Manifest) -> tuple[str, ...]:
    return () if data.vocabulary is not None else (str(data.options.get("hash_buckets")),)


def _scaling(data: Manifest) -> tuple[str, ...]:
    if not data.schema.dense:
        return ()
    own = [str(data.options["scaling"])] if "scaling" in data.options else []
    learned = [str(data.statistics[name]) for name in SCALING_STATISTICS if name in data.statistics]
    return (str(data.options.get("dense")), *own, *learned)


def _hashed(data: Manifest) -> tuple[str, ...]:
    features = data.options.get("features") or {}
    return tuple(f"{name} ({one['buckets']} buckets)" for name, one in sorted(features.items()) if one.get("buckets"))


def _shown(value: tuple[str, ...]) -> str:
    text = ", ".join(value) or "none"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
