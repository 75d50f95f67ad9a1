"""Rows that were in no data set to ids and scaled numbers, as a data set's were made: what a prediction needs.

Stands on what the data set holds, its manifest and its vocabulary. Nothing is learned: a value that the training rows
did not have, or too seldom, gets its space's out-of-vocabulary id.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from hostdev.data import ragged
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.columns import Positive, WrongValueError
from hostdev.data.preprocess.dense import fixed_scaling
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.raw import Layout
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.data.schema import Schema

from hostdev.core.checksums import checksum
from hostdev.core.errors import UserError
from hostdev.kernels.strings import TextMap, hash_texts

Ids = npt.NDArray[np.int64]

_LARGEST = 3e38  # which float32 holds, about


class WrongRowError(UserError):
    """A value that a column may not have.

    row     its number among those given, from 0
    reason  with the column's name
    """

    def __init__(self, row: int, column: str, reason: str) -> None:
        self.row, self.reason = row, f"column {column!r}: {reason}"
        super().__init__(f"row {row + 1}, {self.reason}")


class Encoding:
    """How the rows of a data set became ids and numbers.

    data        its manifest
    vocabulary  its vocabulary's file; None where ids are hashed
    """

    def __init__(self, data: Manifest, vocabulary: Path | None) -> None:
        self._data, self.schema = data, data.schema
        preset = data.options.get("preset")
        self.is_criteo = preset != "table"
        scaled = data.options["dense"]
        self._scaling = fixed_scaling(scaled, self.schema.dense, data.statistics, signed=not self.is_criteo)
        self._most = _largest(scaled, data.statistics, len(self.schema.dense))
        self._separators: Mapping[str, str | None] = data.options.get("bags") or {}
        rule = data.options.get("positive")
        self._positive = Positive.parse(rule) if rule is not None else None
        self._spaces = {space.name: space for space in self.schema.spaces}
        self._path = vocabulary
        self._type = np.dtype(data.id_type)

    @cached_property
    def _known(self) -> "_Values | HashBuckets":
        """What turns values into ids; made when the first are, as it takes time."""
        buckets = self._data.options.get("hash_buckets")
        if buckets is not None:
            columns = self.schema.columns
            ids, bags = (tuple(column for column in columns if column.kind == kind) for kind in ("id", "bag"))
            hashed = criteo.LAYOUT.hashed if self.is_criteo else None
            return HashBuckets(buckets, Layout(self.schema.label, self.schema.dense, ids, bags, hashed))
        assert self._path is not None
        if self._data.vocabulary_sha256 is not None and checksum(self._path) != self._data.vocabulary_sha256:
            raise UserError(f"{self._path} has a wrong checksum: it is damaged or was changed")
        return _Values(self._path, self.schema)

    def prepare(self) -> None:
        """Read the vocabulary now, and not when it is first needed."""
        _ = self._known

    def columns(self) -> list[str]:
        """Return the names of the columns that rows need; a label is not among them."""
        return [*self.schema.dense, *(column.name for column in self.schema.columns)]

    def require(self, have: Sequence[Any]) -> None:
        """Raise UserError unless all columns that are needed are among these, once."""
        known = set(have)
        for name in self.columns():
            if name not in known:
                raise UserError(f"the rows have no column {name!r}; they have {listed(have) or 'none'}")
            if len(known) < len(have) and list(have).count(name) > 1:
                raise UserError(f"the rows have {list(have).count(name)} columns of the name {name!r}")

    def encode(self, rows: pa.RecordBatch) -> Batch:
        """Return rows with named columns as a batch without labels: NaN, whether there is such a column or not.

        Raises UserError for a column that is missing or of another type, and WrongRowError for a value that the column
        may not have.
        """
        self._require_types(rows)
        numbers = np.empty((len(rows), len(self.schema.dense)))
        for i, name in enumerate(self.schema.dense):
            try:
                numbers[:, i] = arrow.as_numbers(_plain(rows[name]))
            except WrongValueError as error:
                raise WrongRowError(error.row, name, str(error)) from None
            if len(large := np.flatnonzero(np.abs(numbers[:, i]) > self._most[i])):
                raise WrongRowError(int(large[0]), name, f"{numbers[large[0], i]:g} is too large a number")
        return self._encoded(rows, np.full(len(rows), np.nan, np.float32), numbers)

    def encode_readable(self, rows: pa.RecordBatch) -> tuple[Batch, Ids]:
        """Return those rows whose numbers can be read as a batch, and which these are, int64 [m], ascending.

        Labels are NaN where they are missing or none. Raises as `encode`, but not for a number or a label.
        """
        self._require_types(rows)
        label = np.full(len(rows), np.nan, np.float32)
        if self.schema.label in rows.schema.names:
            label = arrow.labels_where_readable(_plain(rows[self.schema.label]), self._positive)
        numbers = np.empty((len(rows), len(self.schema.dense)))
        unreadable = np.zeros(len(rows), np.bool_)
        for i, name in enumerate(self.schema.dense):
            numbers[:, i], wrong = arrow.numbers_where_readable(_plain(rows[name]))
            wrong |= np.abs(numbers[:, i]) > self._most[i]
            numbers[wrong, i] = np.nan
            unreadable |= wrong
        batch = self._encoded(rows, label, numbers)
        kept = np.flatnonzero(~unreadable)
        return (batch if len(kept) == len(rows) else _taken(batch, kept)), kept

    def _require_types(self, rows: pa.RecordBatch) -> None:
        """Raise UserError unless the columns that are needed are there, and of types that can be read."""
        self.require(rows.schema.names)
        for name in self.schema.dense:
            if (kind := arrow.kind_of(found := rows.schema.field(name).type)) in ("list", "nested", "other"):
                raise UserError(f"column {name!r} is of type {found}; a number in each row is expected")
        for column in self.schema.columns:
            kind = arrow.kind_of(found := rows.schema.field(column.name).type)
            if column.kind == "id" and kind in ("list", "nested"):
                raise UserError(f"column {column.name!r} is of type {found}; one value in each row is expected")
            if column.kind == "bag" and kind != "list" and (kind == "nested" or not self._separators.get(column.name)):
                raise UserError(f"column {column.name!r} is of type {found}; a list of values in each row is expected")

    def _encoded(self, rows: pa.RecordBatch, label: npt.NDArray[np.float32], numbers: npt.NDArray[Any]) -> Batch:
        """Return rows with these labels [n] and numbers [n, nd] as a batch."""
        ids = np.empty((len(rows), len(self.schema.ids)), np.int64)
        bags = {}
        place = 0
        for column in self.schema.columns:
            try:
                if column.kind == "id":
                    codes, texts = arrow.as_text(_plain(rows[column.name]))
                    ids[:, place] = self.ids(column.space, texts)[codes]
                    place += 1
                else:
                    found = _plain(rows[column.name])
                    codes, texts, lengths = arrow.as_bags(found, self._separators.get(column.name))
                    bags[column.name] = self.ids(column.space, texts)[codes].astype(self._type), lengths
            except WrongValueError as error:
                raise WrongRowError(error.row, column.name, str(error)) from None
        return Batch(label, self._scaling.transform(numbers), ids.astype(self._type), bags)

    def encode_few(self, rows: Mapping[str, Sequence[Any]]) -> Batch | None:
        """Return a few rows as `encode` does, in less time; None for what only that can do.

        rows  columns of as many values each: text and integers for ids, numbers and None
        """
        known, columns = self._known, self.schema.columns
        if isinstance(known, HashBuckets) or self.schema.bags or any(name not in rows for name in self.columns()):
            return None
        given = [rows[column.name] for column in columns]
        n = len(given[0])
        texts = [_text_of(value) for values in given for value in values]
        numbers = [value for name in self.schema.dense for value in rows[name]]
        if not n or any(len(rows[name]) != n for name in self.columns()):
            return None
        if any(type(value) not in (int, float, type(None)) for value in numbers) or None in texts:
            return None
        if any(type(value) is int and abs(value) > _LARGEST for value in numbers):
            return None
        if self.is_criteo:
            texts = [text.lower() for text in texts if text is not None]
        dense = np.array(numbers, np.float64).reshape(len(self.schema.dense), n).T  # None: NaN
        if (np.abs(dense) > self._most).any():
            return None
        spaces = [column.space for column in columns for _ in range(n)]
        try:
            found = known.find_few(spaces, texts)  # type: ignore[arg-type]
        except UnicodeEncodeError:
            return None
        oov = np.array([self._spaces[column.space].oov for column in columns])[:, None]
        ids = found.reshape(len(columns), n)
        ids = np.ascontiguousarray(np.where(ids < 0, oov, ids).T.astype(self._type))
        return Batch(np.full(n, np.nan, np.float32), self._scaling.transform(dense), ids, {})

    def encode_criteo(self, rows: Any) -> Batch:
        """Return Criteo's rows, `raw.RawRows` as its parser makes them, as a batch."""
        ids = np.empty(rows.keys.shape, np.int64)
        known = self._known
        if isinstance(known, HashBuckets):
            ids, _ = known.encode(rows)
        else:
            for i, column in enumerate(self.schema.columns):
                ids[:, i] = self.ids(column.space, criteo.hex_text(np.ascontiguousarray(rows.keys[:, i])))
        return Batch(rows.label, self._scaling.transform(rows.numbers), ids.astype(self._type), {})

    def ids(self, space: str, texts: pa.Array) -> Ids:
        """Return the id of each text [N] in a space."""
        known = self._known
        if self.is_criteo:
            texts = pc.utf8_lower(texts)
        if isinstance(known, HashBuckets):
            column = next(i for i, column in enumerate(self.schema.columns) if column.space == space)
            keys = _criteo_keys(texts) if self.is_criteo else hash_texts(*arrow.bytes_of(texts)).view(np.int64)
            return known.ids_of(keys, column)
        found = known.find(space, texts)
        return np.where(found < 0, self._spaces[space].oov, found)


class _Values:
    """The ids of all values: one map of texts, each with the number of its space before it."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self._texts, self._first = TextMap(), schema.first_value
        try:
            table = pa.ipc.open_file(pa.memory_map(os.fsencode(path))).read_all()
            field = table["field"].combine_chunks()
            names = field.dictionary.to_pylist()
            of_space = field.indices.to_numpy()
            # By the file's own account, as data sets of version 1 do not say which ids are of which space.
            starts = np.flatnonzero(np.diff(of_space[self._first :], prepend=-1)) + self._first
            spaces = [names[of_space[first]] for first in starts]
            self._prefixes = {name: f"{number}\0" for number, name in enumerate(dict.fromkeys(spaces))}
            for name, first, last in zip(spaces, starts, [*starts[1:], len(table)], strict=True):
                for chunk in table["value"].slice(first, last - first).chunks:
                    self._texts.add(*arrow.bytes_of(self._named(name, chunk)))
        except (pa.ArrowException, OSError, KeyError, IndexError) as error:
            raise UserError(f"{path} is broken ({error})") from None
        if len(self._texts) != len(table) - self._first:
            raise UserError(f"{path} is broken (a space has a value twice)")

    def _named(self, space: str, texts: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise(pa.scalar(self._prefixes[space]), texts, pa.scalar(""))

    def find(self, space: str, texts: pa.Array) -> Ids:
        """Return the id of each text, -1 for one that has none."""
        if space not in self._prefixes:  # no value of it is frequent enough
            return np.full(len(texts), -1, np.int64)
        return self._ids(*arrow.bytes_of(self._named(space, texts)))

    def find_few(self, spaces: Sequence[str], texts: Sequence[str]) -> Ids:
        """Return the id of each text in its own space, as `find`."""
        found = [(self._prefixes.get(space, "?") + text).encode() for space, text in zip(spaces, texts, strict=True)]
        offsets = ragged.offsets_of(np.fromiter(map(len, found), np.int64, len(found)))
        return self._ids(offsets, np.frombuffer(b"".join(found), np.uint8))

    def _ids(self, offsets: npt.NDArray[Any], data: npt.NDArray[np.uint8]) -> Ids:
        """The values lie in the order of their ids."""
        found = self._texts.find(offsets, data).astype(np.int64)
        return np.where(found < 0, -1, found + self._first)


def _text_of(value: Any) -> str | None:
    """Return a value as `columns.as_text` writes it; None for a type that is left to that."""
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    return "" if value is None else None


def _plain(array: Any) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _criteo_keys(texts: pa.Array) -> Ids:
    """Return Criteo's 32-bit values as its parser does; UserError for what is none."""
    keys, wrong = criteo.hex_values(texts.cast(pa.binary()))
    if wrong.any():
        shown = texts[int(np.flatnonzero(wrong)[0])].as_py()
        raise UserError(f"{shown[:40]!r} is not 8 hexadecimal digits, nor empty")
    return keys


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """Return the rows [start, stop) of a batch."""
    stop = min(stop, len(batch))
    if (start, stop) == (0, len(batch)):
        return batch
    bags = _bags_of(batch, np.arange(start, stop))
    return Batch(batch.label[start:stop], batch.dense[start:stop], batch.ids[start:stop], bags)


def _taken(batch: Batch, rows: Ids) -> Batch:
    """Return some rows of a batch."""
    return Batch(batch.label[rows], batch.dense[rows], batch.ids[rows], _bags_of(batch, rows))


def _bags_of(batch: Batch, rows: Ids) -> dict[str, Any]:
    return {
        name: ragged.take(values, ragged.offsets_of(lengths), rows) for name, (values, lengths) in batch.bags.items()
    }


def _largest(scaled: str, statistics: Mapping[str, Any], columns: int) -> npt.NDArray[np.float64]:
    """Return the largest number of each column that is one for a model, float64 [nd].

    What float32 cannot hold, now or when it is scaled, unless training had as large ones, or takes logarithms.
    """
    if scaled == "log":
        return np.full(columns, np.finfo(np.float64).max)
    known = np.array(statistics["dense_max" if scaled == "max" else "dense_deviation"], np.float64)
    most: npt.NDArray[np.float64] = _LARGEST * np.minimum(np.where(known > 0, known, 1.0), 1.0)
    return np.maximum(most, known) if scaled == "max" else most
