"""Categorical values to ids: a vocabulary counted on the training rows, or a hash that needs none."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data.manifest import CATEGORICAL, CATEGORICAL_NAMES, DENSE_NAMES, FIRST_OOV, FIRST_VALUE
from hostdev.data.preprocess.raw import EMPTY, RawRows

from hostdev.kernels.counter import key64, mix64
from hostdev.kernels.unique import IdMap, tally

Ids = npt.NDArray[np.int64]


class Encoder(Protocol):
    """How categoricals become ids: `observe` the training rows, `freeze`, `encode` all rows."""

    size: int
    """Number of ids, the 39 fixed ones included; known once frozen."""

    def observe(self, rows: RawRows) -> None:
        """Take in training rows."""

    def freeze(self) -> None:
        """Assign the ids."""

    def encode(self, rows: RawRows) -> Ids:
        """Return ids int64 [n, 26]."""

    def table(self) -> pa.Table | None:
        """Return field, value and count by id, for the vocabulary's file."""


@dataclass
class Vocabulary:
    """An id for each (column, value) seen more than `threshold` times in training rows.

    Ids are assigned by column, in order of first occurrence; a rarer or unseen value gets its column's
    out-of-vocabulary id 13 + column.
    """

    threshold: int
    size: int = 0
    training_rows: int = 0
    _maps: list[IdMap] = field(default_factory=lambda: [IdMap(np.int64) for _ in range(CATEGORICAL)])
    _counts: list[Ids] = field(default_factory=lambda: [np.zeros(0, np.int64) for _ in range(CATEGORICAL)])
    _ids: list[Ids] = field(default_factory=list)

    def observe(self, rows: RawRows) -> None:
        """Count the values of training rows."""
        self.training_rows += len(rows)
        for c, seen in enumerate(self._maps):
            positions = seen.add(np.ascontiguousarray(rows.categories[:, c]))
            if len(seen) > len(self._counts[c]):
                grown = np.zeros(max(len(seen), 2 * len(self._counts[c])), np.int64)
                grown[: len(self._counts[c])] = self._counts[c]
                self._counts[c] = grown
            tally(positions, self._counts[c])

    def freeze(self) -> None:
        """Assign the ids; the last entry of each column's array is for values never seen."""
        next_id = FIRST_VALUE
        for c, seen in enumerate(self._maps):
            kept = self._counts[c][: len(seen)] > self.threshold
            ids = np.full(len(seen) + 1, FIRST_OOV + c, np.int64)
            ids[:-1][kept] = np.arange(next_id, next_id + kept.sum())
            next_id += int(kept.sum())
            self._ids.append(ids)
        self.size = next_id

    def encode(self, rows: RawRows) -> Ids:
        """Return ids int64 [n, 26]."""
        ids = np.empty((len(rows), CATEGORICAL), np.int64)
        for c, seen in enumerate(self._maps):
            ids[:, c] = self._ids[c][seen.find(np.ascontiguousarray(rows.categories[:, c]))]  # -1: the last entry
        return ids

    def table(self) -> pa.Table:
        """Return a row per id: the field, the value (null for the fixed ids), the uses in training rows."""
        fields = [*DENSE_NAMES, *CATEGORICAL_NAMES]
        values: list[str | None] = [None] * FIRST_VALUE
        counts = [self.training_rows] * len(DENSE_NAMES)
        kept_counts: list[int] = []
        for c, seen in enumerate(self._maps):
            count = self._counts[c][: len(seen)]
            kept = count > self.threshold
            counts.append(int(count[~kept].sum()))
            kept_counts.extend(count[kept].tolist())
            values.extend("" if value == EMPTY else f"{value:08x}" for value in seen.ids[kept].tolist())
            fields.extend([CATEGORICAL_NAMES[c]] * int(kept.sum()))
        return pa.table({
            "field": pa.array(fields).dictionary_encode(),
            "value": pa.array(values, pa.string()),
            "count": pa.array(counts + kept_counts, pa.int64()),
        })  # fmt: skip


class HashBuckets:
    """Ids 39 + hash(column, value) mod buckets: no vocabulary, so values may collide, and none is out of it."""

    def __init__(self, buckets: int) -> None:
        self.size = FIRST_VALUE + buckets
        self._buckets = np.uint64(buckets)
        # Not keyed by the seed: data sets made apart, with other splits, share their ids.
        self._keys = np.array([key64(0, "bucket", c) for c in range(CATEGORICAL)], np.uint64)

    def observe(self, rows: RawRows) -> None:
        """Nothing to learn."""

    def freeze(self) -> None:
        """Nothing to assign."""

    def encode(self, rows: RawRows) -> Ids:
        """Return ids int64 [n, 26]."""
        hashed = mix64(rows.categories.astype(np.uint64) ^ self._keys)
        return FIRST_VALUE + (hashed % self._buckets).astype(np.int64)

    def table(self) -> None:
        """There is no vocabulary."""
