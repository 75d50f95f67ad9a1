"""Encoding of values as ids: by a vocabulary counted on the training rows, or by hash."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hostdev.core import memory
from hostdev.core.errors import TransientError, naming
from hostdev.core.outputs import replacing
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.raw import SourceLayout
from hostdev.data.schema import Schema, Space
from hostdev.kernels.arrays import Array, LongIds, Mask
from hostdev.kernels.columns import hash_keys, hash_rows
from hostdev.kernels.counter import key64
from hostdev.kernels.strings import BYTES_A_TEXT, BYTES_A_VALUE, Dictionary, TextMap

FormatKeys = Callable[[LongIds], pa.Array]
DIGITS = 20  # maximum number of characters of an integer
_WRITTEN_AT_ONCE = 1 << 20  # rows per batch of the vocabulary's file
_WRITTEN_BYTES = 1 << 28  # maximum bytes of text in a batch
_AT_ONCE = 1 << 20  # values handled at a time
_ID_BYTES = 8  # bytes per value for the assigned ids
_WRITTEN_ROW = 64  # bytes per row during writing, plus two copies of its text
MOST_OF_A_BAG = 0.5  # a value above this share of a bag's values is probably padding
_MARGIN = 1.03  # error margin of the estimates (see kernels/cardinality.py)


def make_values(format_keys: FormatKeys | None) -> "IntegerValues | TextValues":
    """Return an empty collection of integers, which `format_keys` formats, or of texts if `format_keys` is None."""
    return TextValues() if format_keys is None else IntegerValues(format_keys)


class IntegerValues:
    """The integer values of an id space."""

    def __init__(self, format_keys: FormatKeys) -> None:
        self._seen, self._format_keys = Dictionary(), format_keys

    @property
    def uses(self) -> LongIds:
        """Occurrences of each value, in order of first occurrence."""
        return self._seen.uses

    def count(self, keys: LongIds, uses: Array) -> None:
        """Add the occurrences `uses` [N] of distinct values."""
        self._seen.count(keys, uses)

    def find(self, keys: LongIds) -> LongIds:
        """Return the index of each value, int64 [N]; -1 for an unknown one."""
        return self._seen.find(keys)

    def texts(self, numbers: LongIds) -> pa.Array:
        """Return the values at these indices as text."""
        return self._format_keys(self._seen.keys[numbers])

    def keys(self, numbers: LongIds) -> LongIds:
        """Return the values at these indices."""
        return self._seen.keys[numbers]

    def lengths(self, numbers: LongIds) -> LongIds:
        """Return an upper bound on the number of bytes of each value's text."""
        return np.full(len(numbers), DIGITS)


class TextValues:
    """The text values of an id space."""

    def __init__(self) -> None:
        self._seen = TextMap()
        self._uses = np.zeros(1024, np.int64)

    @property
    def uses(self) -> LongIds:
        """Occurrences of each value, in order of first occurrence."""
        return self._uses[: len(self._seen)]

    def count(self, keys: pa.LargeStringArray, uses: Array) -> None:
        """Add the occurrences `uses` [N] of distinct values."""
        positions = self._seen.add(*arrow.get_buffers(keys))
        if len(self._seen) > len(self._uses):
            self._uses.resize(len(self._seen) + len(self._seen) // 4, refcheck=False)
        self._uses[positions] += uses  # positions are distinct

    def find(self, keys: pa.LargeStringArray) -> LongIds:
        """Return the index of each value, int64 [N]; -1 for an unknown one."""
        return self._seen.find(*arrow.get_buffers(keys)).astype(np.int64)

    def texts(self, numbers: LongIds) -> pa.Array:
        """Return the values at these indices, which must have less than 2 GiB of text."""
        return arrow.make_texts(*self._seen.take(numbers)).cast(pa.string())

    def keys(self, numbers: LongIds) -> pa.LargeStringArray:
        """Return the values at these indices."""
        return arrow.make_texts(*self._seen.take(numbers))

    def lengths(self, numbers: LongIds) -> LongIds:
        """Return the number of bytes of each value."""
        return self._seen.lengths(numbers)


class KnownIds(NamedTuple):
    """The ids that exist before a vocabulary counts values: none, or those of an earlier data set.

    Attributes:
        spaces: The id spaces with these ids.
        first: The first id that a new value may get.
        grow: Called with an id space, its first new id and its number of new ids; returns the space with the new ids.
    """

    spaces: Sequence[Space]
    first: int
    grow: Callable[[Space, int, int], Space]

    @classmethod
    def none(cls, layout: SourceLayout) -> "KnownIds":
        """Return the ids without an earlier data set: only those of numeric columns, and the out-of-vocabulary ids."""
        dense, first = len(layout.dense), len(layout.dense) + len(layout.spaces)
        spaces = [Space(name, dense + i, first, 0) for i, name in enumerate(layout.spaces)]
        return cls(spaces, first, lambda space, begin, size: Space(space.name, space.oov, begin, size))


class CountedValues:
    """The values of an id space that were counted in memory, in order of first occurrence.

    Args:
        values: All values.
        known: How many values, from the first on, have an id of an earlier data set.
        threshold: The other values get an id if they occur more often than this; None if they get no ids.
    """

    def __init__(self, values: IntegerValues | TextValues, known: int, threshold: int | None) -> None:
        self._values, self._known, self._threshold = values, known, threshold
        self._ids: LongIds = np.zeros(0, np.int64)

    def new(self) -> Iterator[LongIds]:
        """Yield the indices of the values that get new ids, in chunks that bound memory."""
        uses = self._values.uses
        if self._threshold is None:
            return
        for start in range(self._known, len(uses), _AT_ONCE):
            yield start + np.flatnonzero(uses[start : start + _AT_ONCE] > self._threshold)

    def assign(self, earlier: Sequence[Sequence[int]], first: int, oov: int, id_type: str) -> None:
        """Assign an id to each value.

        The earlier data set's values get the ids of its segments, pairs (first, number), in `earlier`. The values of
        `new` get the ids from `first` on, and all other values get the id `oov`.
        """
        # The last element is the id of unseen values, for which `self._values.find` returns -1.
        self._ids = np.full(len(self._values.uses) + 1, oov, id_type)
        done = 0
        for begin, count in earlier:
            self._ids[done : done + count] = np.arange(begin, begin + count)
            done += count
        for kept in self.new():
            self._ids[kept] = np.arange(first, first + len(kept))
            first += len(kept)

    def find(self, keys: Any) -> Array:
        """Return the ids of values [N] after `assign`; thread-safe."""
        found: Array = self._ids[self._values.find(keys)]
        return found

    def written(self, oov: int, indices: Iterable[LongIds]) -> "Iterator[WrittenValues]":
        """Yield the values at some indices, for `write_values`."""
        for kept in indices:
            texts = partial(_take_texts, self._values, kept)
            yield WrittenValues(oov, self._values.lengths(kept), self._values.uses[kept], texts)


def _take_texts(values: Any, numbers: LongIds, start: int, stop: int) -> pa.Array:
    return values.texts(numbers[start:stop])


class WrittenValues(NamedTuple):
    """Some values with consecutive ids.

    Attributes:
        oov: The out-of-vocabulary id of the values' id space.
        lengths: An upper bound on the bytes of each value's text, int64 [n].
        uses: Occurrences in training rows, int64 [n].
        texts: `texts(a, b)` returns the texts of values [a, b), a string array.
    """

    oov: int
    lengths: LongIds
    uses: LongIds
    texts: Callable[[int, int], pa.Array]


def write_values(path: Path, layout: SourceLayout, fixed: Sequence[int], values: "Iterator[WrittenValues]") -> None:
    """Write a vocabulary's file atomically.

    `fixed` has the occurrences of the fixed ids; `values` follow in the order of ids. The file does not depend on how
    the values are divided.
    """
    names = pa.array([*layout.dense, *layout.spaces], pa.string())
    kinds = pa.schema(
        [("field", pa.dictionary(pa.int32(), pa.string())), ("value", pa.string()), ("count", pa.int64())]
    )
    waiting: list[tuple[Array, pa.Array, LongIds]] = [
        (np.arange(len(names)), pa.nulls(len(names), pa.string()), np.array(fixed, np.int64))
    ]
    with (
        naming(path),
        replacing(path) as part,
        pa.OSFile(os.fsencode(part), "wb") as content,
        pa.ipc.new_file(content, kinds) as file,
    ):

        def write() -> None:
            fields, texts, counts = zip(*waiting, strict=True)
            of = pa.DictionaryArray.from_arrays(pa.array(np.concatenate(fields), pa.int32()), names)
            columns = [of, pa.concat_arrays(texts), pa.array(np.concatenate(counts))]
            file.write_batch(pa.RecordBatch.from_arrays(columns, schema=kinds))
            waiting.clear()

        rows_left, bytes_left = _WRITTEN_AT_ONCE - len(names), _WRITTEN_BYTES
        for some in values:
            start = 0
            while start < len(some.uses):
                ends = np.cumsum(some.lengths[start : start + rows_left])
                fitting = int(np.searchsorted(ends, bytes_left, "right"))
                if fitting == 0 and bytes_left == _WRITTEN_BYTES:
                    fitting = 1  # a single text exceeds the limit of a batch
                stop = start + fitting
                if fitting:
                    waiting.append((np.full(fitting, some.oov), some.texts(start, stop), some.uses[start:stop]))
                    rows_left, bytes_left = rows_left - fitting, bytes_left - int(ends[fitting - 1])
                start = stop
                if rows_left == 0 or fitting < len(ends):
                    write()
                    rows_left, bytes_left = _WRITTEN_AT_ONCE, _WRITTEN_BYTES
        if waiting:
            write()


def require_memory(values: float, text_bytes: float | None) -> None:
    """Raise TransientError unless there is enough free memory to count and write this number of distinct values.

    `text_bytes` is the total length of text values; None for integers.
    """
    each = BYTES_A_VALUE if text_bytes is None else BYTES_A_TEXT
    texts = text_bytes or 0.0
    written = _WRITTEN_ROW * min(values, _WRITTEN_AT_ONCE) + 2 * min(texts, _WRITTEN_BYTES)
    needed = int(_MARGIN * (values * (each + _ID_BYTES) + 1.25 * texts) + written)
    memory.require_memory(
        needed,
        f"the training rows have about {values:,.0f} distinct values, and a vocabulary of them",
        "hash them with --hash-buckets N, which needs no vocabulary",
        TransientError,
    )


class HashBuckets:
    """Ids by hashing: first + hash(space, value) mod buckets. Values may collide, and none is out of vocabulary.

    The hash does not depend on the seed, so that equal values have equal ids in separately built data sets.
    """

    def __init__(self, buckets: int, layout: SourceLayout) -> None:
        self._buckets = np.uint64(buckets)
        dense, first = len(layout.dense), len(layout.dense) + len(layout.spaces)
        spaces = tuple(Space(name, dense + i, first, buckets) for i, name in enumerate(layout.spaces))
        self.schema = Schema(layout.label, layout.dense, layout.columns, spaces, first + buckets, layout.targets)
        names = zip(layout.spaces, layout.hashed or layout.spaces, strict=True)
        keys = {space: key64(0, "bucket", name) for space, name in names}
        self._keys = np.array([keys[column.space] for column in layout.columns], np.uint64)

    def encode(self, keys: LongIds, order: LongIds, missing: Sequence[int]) -> tuple[Array, Mask]:
        """Return the ids of the columns with one id per row, [n, columns], and which values are missing, [columns, n].

        Args:
            keys: int64 [n, columns].
            order: int64 [n], the rows' indices in `keys`, in the order of the result.
            missing: For each column, the key of a missing value.
        """
        how = self._keys[: keys.shape[1]], self._buckets, self.schema.first_value, np.array(missing, np.int64)
        return hash_rows(keys, order, *how, self.schema.id_type)

    def ids_of(self, keys: LongIds, column: int) -> LongIds:
        """Return the ids of keys [N] in column number `column` of the layout."""
        return hash_keys(np.ascontiguousarray(keys), self._keys[column], self._buckets, self.schema.first_value)
