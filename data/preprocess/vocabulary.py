"""Values to ids: a vocabulary counted on the training rows, or a hash that needs none."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data import ragged
from hostdev.data.preprocess.raw import Bags, Layout, RawRows, Source
from hostdev.data.schema import Schema, Space

from hostdev.kernels.counter import key64, mix64
from hostdev.kernels.unique import IdMap, tally

Ids = npt.NDArray[np.int64]

_MOST_VALUES = 1 << 24  # in one piece of the vocabulary's file: the lengths of Arrow's text are int32


class Encoder(Protocol):
    """How values become ids: `observe` the training rows, `freeze`, `encode` all rows."""

    schema: Schema
    """The columns with their ids; there once frozen."""

    def observe(self, rows: RawRows) -> None:
        """Take in training rows."""

    def freeze(self) -> None:
        """Assign the ids."""

    def encode(self, rows: RawRows) -> tuple[Ids, Bags]:
        """Return ids int64 [n, columns with one id], and each bag's ids int64 [N] with lengths [n]."""

    def table(self, source: Source) -> pa.Table | None:
        """Return column or space, value and count by id, for the vocabulary's file."""


class _Values:
    """The values of one space: those seen so far, in order of first occurrence, and how often."""

    def __init__(self) -> None:
        self.seen = IdMap(np.int64)
        self._counts = np.zeros(0, np.int64)
        self._ids = np.zeros(1, np.int64)

    @property
    def counts(self) -> Ids:
        """Uses of each value seen."""
        return self._counts[: len(self.seen)]

    def count(self, keys: Ids) -> None:
        positions = self.seen.add(keys)
        if len(self.seen) > len(self._counts):
            grown = np.zeros(max(len(self.seen), 2 * len(self._counts)), np.int64)
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        tally(positions, self._counts)

    def assign(self, kept: npt.NDArray[np.bool_], oov: int, first: int) -> int:
        """Number the values that are kept; return how many those are."""
        size = int(kept.sum())
        self._ids = np.full(len(self.seen) + 1, oov, np.int64)  # the last entry is for values never seen
        self._ids[:-1][kept] = np.arange(first, first + size)
        return size

    def ids(self, keys: Ids) -> Ids:
        found: Ids = self._ids[self.seen.find(keys)]  # -1: the last entry
        return found


class Vocabulary:
    """An id for each value of a space that training rows use more than `threshold` times.

    Ids are assigned by space, in order of first occurrence (within a row, in the order of the columns); a rarer or
    unseen value gets its space's out-of-vocabulary id.
    """

    def __init__(self, threshold: int, layout: Layout) -> None:
        self.threshold, self.layout = threshold, layout
        self._rows = 0
        self._values = {name: _Values() for name in layout.spaces}

    def observe(self, rows: RawRows) -> None:
        """Count the values of training rows."""
        self._rows += len(rows)
        for name, values in self._values.items():
            values.count(_keys_of(rows, self.layout, name))

    def freeze(self) -> None:
        """Assign the ids."""
        spaces, fixed = [], len(self.layout.dense) + len(self._values)
        rows = fixed
        for oov, (name, values) in enumerate(self._values.items(), len(self.layout.dense)):
            size = values.assign(values.counts > self.threshold, oov, rows)
            spaces.append(Space(name, oov, rows, size))
            rows += size
        self.schema = Schema(self.layout.label, self.layout.dense, self.layout.columns, tuple(spaces), rows)

    def encode(self, rows: RawRows) -> tuple[Ids, Bags]:
        """Return ids int64 [n, columns with one id], and each bag's ids int64 [N] with lengths [n]."""
        ids = np.empty(rows.keys.shape, np.int64)
        for i, column in enumerate(self.layout.ids):
            ids[:, i] = self._values[column.space].ids(np.ascontiguousarray(rows.keys[:, i]))
        bags = zip(rows.bags, self.layout.bags, strict=True)
        return ids, tuple((self._values[column.space].ids(keys), lengths) for (keys, lengths), column in bags)

    def table(self, source: Source) -> pa.Table:
        """Return a row per id: the column or space, the value (null for the fixed ids), the uses in training rows."""
        kept = [values.counts > self.threshold for values in self._values.values()]
        rare = [int(values.counts[~k].sum()) for values, k in zip(self._values.values(), kept, strict=True)]
        names, fixed = [*self.layout.dense, *self._values], self.schema.first_value
        fields = [np.arange(fixed)]
        texts = [pa.nulls(fixed, pa.string())]
        counts = [np.array([self._rows] * len(self.layout.dense) + rare, np.int64)]
        for space, (name, values), k in zip(self.schema.spaces, self._values.items(), kept, strict=True):
            keys = values.seen.ids[k]
            fields.append(np.full(len(keys), space.oov))
            counts.append(values.counts[k])
            texts += [source.text(name, keys[i : i + _MOST_VALUES]) for i in range(0, len(keys), _MOST_VALUES)]
        texts = texts if self.schema.rows > _MOST_VALUES else [pa.concat_arrays(texts)]
        field = pa.array(np.concatenate(fields), pa.int32())
        return pa.table({
            "field": pa.DictionaryArray.from_arrays(field, pa.array(names, pa.string())),
            "value": pa.chunked_array(texts, pa.string()),
            "count": np.concatenate(counts),
        })  # fmt: skip


def _keys_of(rows: RawRows, layout: Layout, space: str) -> Ids:
    """Return the keys that rows have in a space, row by row, in the order of the columns."""
    ones = [i for i, column in enumerate(layout.ids) if column.space == space]
    bags = [bag for bag, column in zip(rows.bags, layout.bags, strict=True) if column.space == space]
    if len(ones) == 1 and not bags:
        return np.ascontiguousarray(rows.keys[:, ones[0]])
    if not ones and len(bags) == 1:
        return bags[0][0]
    lengths = np.sum([bag[1] for bag in bags], axis=0, dtype=np.int64) + np.full(len(rows), len(ones))
    place = ragged.offsets_of(lengths)[:-1]  # where each row's next key goes
    keys = np.empty(int(lengths.sum()), np.int64)
    for i in ones:
        keys[place] = rows.keys[:, i]
        place = place + 1
    for values, count in bags:
        keys[ragged.places_of(place, count)] = values
        place = place + count
    return keys


class HashBuckets:
    """Ids first + hash(space, value) mod buckets: no vocabulary, so values may collide, and none is out of it.

    The hash is not keyed by the seed: data sets made apart, with other splits, share their ids.
    """

    def __init__(self, buckets: int, layout: Layout) -> None:
        self._buckets = np.uint64(buckets)
        dense, first = len(layout.dense), len(layout.dense) + len(layout.spaces)
        spaces = tuple(Space(name, dense + i, first, buckets) for i, name in enumerate(layout.spaces))
        self.schema = Schema(layout.label, layout.dense, layout.columns, spaces, first + buckets)
        names = zip(layout.spaces, layout.hashed or layout.spaces, strict=True)
        keys = {space: key64(0, "bucket", name) for space, name in names}
        self._keys = np.array([keys[column.space] for column in layout.columns], np.uint64)

    def observe(self, rows: RawRows) -> None:
        """Nothing to learn."""

    def freeze(self) -> None:
        """Nothing to assign."""

    def encode(self, rows: RawRows) -> tuple[Ids, Bags]:
        """Return ids int64 [n, columns with one id], and each bag's ids int64 [N] with lengths [n]."""
        ones = rows.keys.shape[1]
        bags = tuple(
            (self._ids(keys, key), lengths) for (keys, lengths), key in zip(rows.bags, self._keys[ones:], strict=True)
        )
        return self._ids(rows.keys, self._keys[:ones]), bags

    def ids_of(self, keys: Ids, column: int) -> Ids:
        """Return the ids of keys [N] of the column of this number, in the layout's order."""
        return self._ids(keys, self._keys[column])

    def _ids(self, keys: Ids, of_columns: npt.NDArray[np.uint64] | np.uint64) -> Ids:
        hashed = mix64(keys.astype(np.uint64) ^ of_columns)
        return self.schema.first_value + (hashed % self._buckets).astype(np.int64)

    def table(self, source: Source) -> None:
        """There is no vocabulary."""
