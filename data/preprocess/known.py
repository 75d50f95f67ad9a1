"""Lookup of values' ids in a data set's vocabulary, and a fast encoder of rows that are plain Python values.

The vocabulary's file is checked when it is loaded. For up to thousands of rows, `PlainRows` takes less time than
`encoding.Encoding.encode`, which uses Arrow. It finds the same ids and numbers, and returns None for other rows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data import ragged
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.forms import Written, find_forms, from_json
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.preprocess.scaling import LARGEST, Scaling
from hostdev.data.preprocess.stored import DamagedError, StoredVocabulary
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.kernels.arrays import Lengths, LongIds, Numbers
from hostdev.kernels.strings import TextMap, hash_texts

_PLAIN_INTEGER = re.compile("0|-?[1-9][0-9]{0,17}", re.ASCII)
_NONE = type(None)
_MOST_PLAIN = 1 << 16  # maximum rows of `PlainRows`; for more, `Encoding.encode` takes less memory


class ValueIds:
    """Map from values to ids.

    Attributes:
        written: For each id space, the forms of its values; empty if the manifest has the forms of all the space's
            columns, and for Criteo data.
        rates: For each id space, the share of out-of-vocabulary values in training rows.

    Raises:
        UserError: The file `path` is missing or damaged, or does not match the data set's manifest.
    """

    def __init__(self, path: Path, data: Manifest) -> None:
        schema = data.schema
        # A text is stored after its id space's prefix (`_prefixes`), so that equal texts of two spaces differ.
        self._texts, self._first, self._path = TextMap(), schema.first_value, path
        try:
            stored = StoredVocabulary(path.parent, replace(data, vocabulary=path.name))
            spaces = list(stored.spaces.values())
        except DamagedError as error:
            raise self._broken(error.what) from None
        everything = (self._first, schema.rows - self._first)
        if any((space.first, space.size) != everything for space in schema.spaces):  # in version 1, each spans all ids
            for found, space in zip(spaces, schema.spaces, strict=True):
                if found.segments != space.segments:
                    raise self._broken(f"its ids of {space.name!r} differ from those in the manifest")
        values = stored.table["value"]
        if values.slice(self._first).null_count:
            raise self._broken("it has missing values")
        self._prefixes = {space.name: f"{space.oov}\0" for space in spaces if space.values}
        unrecorded = {column.space for column in schema.columns if column.name not in data.kinds}
        forms: dict[str, frozenset[int]] = {space.name: frozenset() for space in spaces}
        for first, size, name in sorted((*segment, space.name) for space in spaces for segment in space.segments):
            for chunk in values.slice(first, size).chunks if size else ():  # in id order, which `_ids` needs
                self._texts.add(*arrow.get_buffers(self._named(name, chunk)))
                if name in unrecorded and data.is_table:
                    forms[name] |= find_forms(chunk)
        self.written = {name: Written(found) for name, found in forms.items()}
        self.rates: dict[str, float] = {}
        for space in spaces:
            rare, known = int(stored.counts[space.oov]), int(stored.get_counts(space).sum())
            self.rates[space.name] = rare / max(1, known + rare)
        if len(self._texts) != len(values) - self._first:
            raise self._broken("a value has two ids in one id space")

    def _broken(self, why: str) -> UserError:
        return UserError(f"{self._path} is broken ({why})")

    def _named(self, space: str, texts: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise(pa.scalar(self._prefixes[space]), texts, pa.scalar(""))

    def find(self, space: str, texts: pa.Array) -> LongIds:
        """Return the id of each text, -1 for an unknown text."""
        if space not in self._prefixes:  # no value of the id space is frequent enough to have an id
            return np.full(len(texts), -1, np.int64)
        return self._ids(*arrow.get_buffers(self._named(space, texts)))

    def find_few(self, spaces: Sequence[str], texts: Sequence[Sequence[str]]) -> LongIds:
        """Return the ids of `texts[i]` in `spaces[i]` for all i, concatenated; -1 for an unknown text."""
        prefixes = [self._prefixes.get(space, "?").encode() for space in spaces]
        named = [prefix + text.encode() for prefix, some in zip(prefixes, texts, strict=True) for text in some]
        return self._ids(*_buffers(named))

    def _ids(self, offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> LongIds:
        """Return the ids of prefixed texts, -1 for unknown ones; the map numbers texts in the order of their ids."""
        found = self._texts.find(offsets, data).astype(np.int64)
        return np.where(found < 0, -1, found + self._first)


def written_by_space(data: Manifest, inferred: Mapping[str, Written]) -> dict[str, Written]:
    """Return, for each id space, how its values were written in the training files.

    The manifest records this by column; for columns without a record, it is taken from `inferred`, by id space.
    """
    found: dict[str, Written] = {}
    for column in data.schema.columns:
        if column.name not in data.kinds:
            found[column.space] = inferred.get(column.space, Written(frozenset()))
            continue
        written = from_json(data.kinds[column.name])
        before = found.get(column.space)
        found[column.space] = written if before is None else before.merge(written)
    return found


class PlainColumn(NamedTuple):
    """A column with ids.

    Attributes:
        name: The feature's name.
        source: The name of the file's column.
        number: The column's index among the data set's columns with ids.
        space: The name of the column's id space.
        oov: The id of unknown values.
        written: How the id space's values were written in training.
        reading: How the column's values are read; it has no missing-value markers, buckets or weights.
    """

    name: str
    source: str
    number: int
    space: str
    oov: int
    written: Written
    reading: ReadSettings


class PlainRows:
    """Encodes rows of plain Python values faster than `Encoding.encode`, to the same batch.

    Values are text or integers for ids, text or lists for bags, and numbers for numeric columns; None is missing.

    Attributes:
        names: The columns that are read.

    Args:
        data: The data set's manifest; its bags have no weights.
        readings: Reading settings by feature; none has missing-value markers, buckets, vectors or decimal commas.
        written: How the values of each id space were written in training.
        known: The mapping from values to ids.
        scaling: The scaling of numbers.
        largest: The largest number that is accepted in each numeric column, float64 [dense columns].
    """

    def __init__(
        self,
        data: Manifest,
        readings: Mapping[str, ReadSettings],
        written: Mapping[str, Written],
        known: ValueIds | HashBuckets,
        scaling: Scaling,
        largest: Numbers,
    ) -> None:
        schema, oov = data.schema, {space.name: space.oov for space in data.schema.spaces}
        columns: dict[str, list[PlainColumn]] = {"id": [], "bag": []}
        for number, column in enumerate(schema.columns):
            name, space, reading = column.name, column.space, readings[column.name]
            about = PlainColumn(name, reading.column or name, number, space, oov[space], written[space], reading)
            columns[column.kind].append(about)
        self._single, self._bags = columns["id"], columns["bag"]
        self._columns = [*self._single, *self._bags]
        self._numbers = [readings[name].column or name for name in schema.dense]
        self.names = list(dict.fromkeys([*self._numbers, *(column.source for column in self._columns)]))
        self._needed = frozenset(self.names)
        self._spaces = [column.space for column in self._columns]
        self._is_trimmed = any(column.reading.trimmed for column in self._columns)
        self._known, self._scaling, self._largest = known, scaling, largest
        self._is_criteo = not data.is_table
        self._type, self._labels = np.dtype(data.id_type), (len(schema.labels),) if schema.targets.more else ()

    def encode(self, rows: Mapping[Any, Any]) -> Batch | None:
        """Return rows as a batch whose labels are all NaN, or None if only `Encoding.encode` can read them.

        `rows` has columns by name. The needed ones must be lists of the same length, from 1 to 65,536.
        """
        try:
            return self._encode(rows)
        except (_UnusualError, OverflowError, UnicodeEncodeError):
            return None

    def _encode(self, rows: Mapping[Any, Any]) -> Batch:
        """Do the work of `encode`; raise an error for what only `Encoding.encode` can read."""
        if not self._needed <= rows.keys():
            raise _UnusualError
        columns = [rows[name] for name in self.names]
        if set(map(type, columns)) != {list} or len(lengths := set(map(len, columns))) > 1:
            raise _UnusualError
        n = lengths.pop()
        if not 0 < n <= _MOST_PLAIN:
            raise _UnusualError
        numbers = self._read_numbers(list(chain.from_iterable([rows[name] for name in self._numbers])), n)
        texts, bag_lengths = self._read_texts(rows)
        edges = [0, *accumulate(map(len, texts))]
        ids = self._find(texts, edges, n)
        first = len(self._single)
        bags = {}
        for column, of_rows, start, stop in zip(
            self._bags, bag_lengths, edges[first:-1], edges[first + 1 :], strict=True
        ):
            values = ids[start:stop]
            if column.reading.length is not None:
                values, of_rows = column.reading.known(values, of_rows, np.ones(len(values), np.bool_))
            bags[column.name] = values.astype(self._type), of_rows
        single = np.ascontiguousarray(ids[: edges[first]].reshape(first, n).T, dtype=self._type)
        dense = np.ascontiguousarray(self._scaling.transform(numbers))  # C order: the same bits as `Encoding`
        return Batch(np.full((n, *self._labels), np.nan, np.float32), dense, single, bags)

    def _read_numbers(self, values: list[Any], n: int) -> Numbers:
        """Return numbers, float64 [n, numbers], NaN if missing."""
        kinds = set(map(type, values))
        if not kinds <= {int, float, _NONE}:
            raise _UnusualError
        numbers = np.array(values, np.float64).reshape(len(self._numbers), n).T  # None becomes NaN
        sizes = np.abs(numbers)
        if (sizes > self._largest).any() or (int in kinds and (sizes >= LARGEST).any()):
            raise _UnusualError
        return numbers

    def _read_texts(self, rows: Mapping[str, Sequence[Any]]) -> tuple[list[Sequence[str]], list[Lengths]]:
        """Return the texts that each column's values had in training, and each bag's number of values in each row."""
        bags = [_split(column.reading, rows[column.source]) for column in self._bags]
        values = [rows[column.source] for column in self._single] + [flat for flat, _ in bags]
        if self._is_trimmed and not _have_plain_ends(values):
            raise _UnusualError
        texts = [_texts(column.written, some) for column, some in zip(self._columns, values, strict=True)]
        return texts, [lengths for _, lengths in bags]

    def _find(self, texts: Sequence[Sequence[str]], edges: Sequence[int], n: int) -> LongIds:
        """Return the ids of texts, one column after the other; those of column i are at edges[i] to edges[i + 1]."""
        if isinstance(self._known, HashBuckets):
            return self._hash(self._known, texts, edges, n)
        if self._is_criteo:
            texts = [[text.lower() for text in some] for some in texts]
        ids = self._known.find_few(self._spaces, texts)
        if (ids < 0).any():
            for column, start, stop in zip(self._columns, edges[:-1], edges[1:], strict=True):
                is_unknown = ids[start:stop] < 0
                if is_unknown.any():
                    if column.written.has_type:
                        raise _UnusualError  # an unknown value may have been written differently in training
                    ids[start:stop][is_unknown] = column.oov
        return ids

    def _hash(self, known: HashBuckets, texts: Sequence[Sequence[str]], edges: Sequence[int], n: int) -> LongIds:
        """Do the work of `_find` for a data set whose ids are hash buckets."""
        if self._is_criteo:
            keys = criteo.hex_keys(list(chain.from_iterable(texts)))
            if keys is None:
                raise _UnusualError
        else:
            for column, some in zip(self._columns, texts, strict=True):
                _require_as_trained(column.written, some)
            keys = hash_texts(*_buffers([text.encode() for some in texts for text in some])).view(np.int64)
        if not self._bags:
            missing = [0] * len(self._columns)  # which values are missing does not matter here
            return known.encode(keys.reshape(-1, n).T, np.arange(n), missing)[0].T.reshape(-1)
        parts = zip(self._columns, edges[:-1], edges[1:], strict=True)
        return np.concatenate([known.ids_of(keys[start:stop], column.number) for column, start, stop in parts])


def _buffers(texts: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return texts as `columns.get_buffers` does: offsets, int64 [n + 1], and bytes."""
    offsets = ragged.offsets_of(np.fromiter(map(len, texts), np.int64, len(texts)))
    return offsets, np.frombuffer(b"".join(texts), np.uint8)


class _UnusualError(Exception):
    """Only `Encoding.encode` can read the rows."""


def _split(reading: ReadSettings, rows: Sequence[Any]) -> tuple[list[Any], Lengths]:
    """Return the bags' concatenated values without missing ones, and the number of values in each row."""
    kinds = set(map(type, rows)) - {_NONE}
    if kinds == {str} and reading.separator is not None:
        if reading.trimmed and "[" in "".join(filter(None, rows)):
            raise _UnusualError  # the text may be a list in brackets
        lists = [text.split(reading.separator) if text else [] for text in rows]
    elif kinds <= {list}:
        lists = [values or [] for values in rows]
    else:
        raise _UnusualError
    flat = list(chain.from_iterable(lists))
    if set(map(type, flat)) - {_NONE} not in ({str}, {int}, set()):
        raise _UnusualError
    if None in flat or "" in flat:
        lists = [[value for value in values if value is not None and value != ""] for values in lists]
        flat = list(chain.from_iterable(lists))
    return flat, np.fromiter(map(len, lists), np.int32, len(lists))


def _texts(written: Written, values: Sequence[Any]) -> Sequence[str]:
    """Return the texts that values had in training; raise _UnusualError if they are unknown."""
    kinds = set(map(type, values))
    if kinds <= {str}:
        return values
    if kinds - {_NONE} not in ({str}, {int}, set()) or (_NONE in kinds and written.missing is None):
        raise _UnusualError
    if int in kinds:
        some = [value for value in values if value is not None]
        if not written.has_plain_integers or min(some) < -(1 << 63) or max(some) >= 1 << 63:
            raise _UnusualError
    return [
        value if type(value) is str else written.missing if value is None else str(value)  # type: ignore[misc]
        for value in values
    ]


def _require_as_trained(written: Written, texts: Sequence[str]) -> None:
    """Raise _UnusualError if training may have hashed other texts for these values."""
    integers = written.kind == "number" and written.has_plain_integers
    if not all(map(_PLAIN_INTEGER.fullmatch, texts)) if integers else written.has_type:
        raise _UnusualError


def _have_plain_ends(columns: Sequence[Sequence[Any]]) -> bool:
    """Return whether it is certain that no text among the columns' values begins or ends with whitespace."""
    ends = "".join([text[0] + text[-1] for values in columns for text in values if type(text) is str and text])
    if ends.isascii() and ends.isprintable() and " " not in ends:
        return True
    return all(" " < letter <= "~" or letter.isalnum() for letter in set(ends))
