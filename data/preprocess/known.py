"""Lookup of values' ids in a data set's vocabulary, whose file is checked when it is loaded, also for plain rows.

Rows that are plain Python values take less time than Arrow's way for up to thousands of rows. `PlainRows` finds the
same ids and numbers as `Encoding.encode`, and leaves to it what it does not know.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data import ragged
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.forms import Written, find_forms, from_json
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.preprocess.scaling import LARGEST
from hostdev.data.preprocess.stored import DamagedError, StoredVocabulary
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.kernels.arrays import Lengths, LongIds
from hostdev.kernels.strings import TextMap, hash_texts

_PLAIN_INTEGER = re.compile("0|-?[1-9][0-9]{0,17}", re.ASCII)
_NONE = type(None)


class ValueIds:
    """Map from values to ids.

    Attributes:
        written: For each id space, how its values in the vocabulary were written in the training files.
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
        if any((space.first, space.size) != everything for space in schema.spaces):  # not a manifest of version 1
            for found, space in zip(spaces, schema.spaces, strict=True):
                if found.segments != space.segments:
                    raise self._broken(f"its ids of {space.name!r} differ from those in the manifest")
        values = stored.table["value"]
        if values.slice(self._first).null_count:
            raise self._broken("it has missing values")
        self._prefixes = {space.name: f"{space.oov}\0" for space in spaces if space.values}
        forms: dict[str, frozenset[int]] = {space.name: frozenset() for space in spaces}
        for first, size, name in sorted((*segment, space.name) for space in spaces for segment in space.segments):
            forms[name] |= self._add(name, values.slice(first, size))  # in the order of the ids
        self.written = {name: Written(found) for name, found in forms.items()}
        self.rates: dict[str, float] = {}
        for space in spaces:
            rare, known = int(stored.counts[space.oov]), int(stored.get_counts(space).sum())
            self.rates[space.name] = rare / max(1, known + rare)
        if len(self._texts) != len(values) - self._first:
            raise self._broken("a value has two ids in one id space")

    def _add(self, space: str, values: pa.ChunkedArray) -> frozenset[int]:
        """Add values of an id space to the map; return the forms in which they are written."""
        forms: frozenset[int] = frozenset()
        for chunk in values.chunks if len(values) else ():
            self._texts.add(*arrow.get_buffers(self._named(space, chunk)))
            forms |= find_forms(chunk)
        return forms

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
        """Return the id of each text, or -1 for an unknown one, one id space after the other."""
        prefixes = [self._prefixes.get(space, "?").encode() for space in spaces]
        found = [prefix + text.encode() for prefix, some in zip(prefixes, texts, strict=True) for text in some]
        offsets = ragged.offsets_of(np.fromiter(map(len, found), np.int64, len(found)))
        return self._ids(offsets, np.frombuffer(b"".join(found), np.uint8))

    def _ids(self, offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> LongIds:
        """Return the ids of prefixed texts, -1 for unknown ones; the map numbers texts in the order of their ids."""
        found = self._texts.find(offsets, data).astype(np.int64)
        return np.where(found < 0, -1, found + self._first)


def written_by_space(data: Manifest, inferred: Mapping[str, Written]) -> dict[str, Written]:
    """Return, for each id space, how its values were written in the training files.

    This comes from the manifest or, for columns about which the manifest does not record it, from `inferred`.
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
        number: Its position among the data set's columns with ids.
        space: The name of its id space.
        oov: The id of unknown values.
        written: How its values were written in training.
        reading: How its values are read. It has no marks of missing values, no buckets and no weights.
    """

    name: str
    source: str
    number: int
    space: str
    oov: int
    written: Written
    reading: ReadSettings


class EncodedValues(NamedTuple):
    """What was read.

    Attributes:
        numbers: float64 [n, numbers], NaN for a missing one.
        ids: [n, columns].
        bags: By name, values [N] and int32 lengths [n].
    """

    numbers: npt.NDArray[np.float64]
    ids: LongIds
    bags: dict[str, tuple[LongIds, Lengths]]


class PlainRows:
    """Encodes rows whose ids are text or integers.

    Attributes:
        names: The columns that are read.

    Args:
        numbers: The names of the files' columns with the numbers, in order.
        columns: The columns with one id per row, in order.
        bags: The columns with any number of ids per row.
        known: The mapping from values to ids.
        is_criteo: Whether ids are Criteo's hexadecimal digits.
    """

    def __init__(
        self,
        numbers: Sequence[str],
        columns: Sequence[PlainColumn],
        bags: Sequence[PlainColumn],
        known: ValueIds | HashBuckets,
        *,
        is_criteo: bool,
    ) -> None:
        self._numbers, self._single, self._bags, self._columns = numbers, columns, bags, [*columns, *bags]
        self._known, self._is_criteo = known, is_criteo
        self.names = list(dict.fromkeys([*numbers, *(column.source for column in self._columns)]))

    def read(self, rows: Mapping[str, Sequence[Any]], n: int) -> EncodedValues | None:
        """Return what n rows have, or None if only `Encoding.encode` can read them."""
        numbers = self._read_numbers(list(chain.from_iterable([rows[name] for name in self._numbers])), n)
        if numbers is None:
            return None
        values: list[Sequence[Any]] = [rows[column.source] for column in self._single]
        lengths = []
        for column in self._bags:
            found = _split(column.reading, rows[column.source])
            if found is None:
                return None
            values.append(found[0])
            lengths.append(found[1])
        texts = []
        for column, some in zip(self._columns, values, strict=True):
            as_text = _texts(column, some)
            if as_text is None:
                return None
            texts.append(as_text)
        ids = self._find(texts, n)
        if ids is None:
            return None
        single = n * len(self._single)
        parts = _parts(ids[single:], texts[len(self._single) :])
        bags = {
            column.name: column.reading.known(part, of_each, np.ones(len(part), np.bool_))
            for column, part, of_each in zip(self._bags, parts, lengths, strict=True)
        }
        return EncodedValues(numbers, ids[:single].reshape(len(self._single), n).T, bags)

    def _read_numbers(self, values: list[Any], n: int) -> npt.NDArray[np.float64] | None:
        kinds = set(map(type, values))
        if not kinds <= {int, float, _NONE}:
            return None
        try:
            found = np.array(values, np.float64).reshape(len(self._numbers), n).T  # None becomes NaN
        except OverflowError:
            return None
        return None if int in kinds and (np.abs(found) >= LARGEST).any() else found

    def _find(self, texts: Sequence[Sequence[str]], n: int) -> LongIds | None:
        """Return the ids of each column's texts, one column after the other, or None if only `encode` can find them."""
        try:
            if isinstance(self._known, HashBuckets):
                return self._hash(self._known, texts, n)
            if self._is_criteo:
                texts = [[text.lower() for text in some] for some in texts]
            ids = self._known.find_few([column.space for column in self._columns], texts)
        except UnicodeEncodeError:
            return None
        for column, part in zip(self._columns, _parts(ids, texts), strict=True):
            is_unknown = part < 0
            if is_unknown.any():
                if column.written.kind not in ("text", "unknown"):
                    return None  # it may have been written differently in training
                part[is_unknown] = column.oov
        return ids

    def _hash(self, known: HashBuckets, texts: Sequence[Sequence[str]], n: int) -> LongIds | None:
        """Do the work of `_find` for a data set whose ids are hash buckets."""
        if self._is_criteo:
            keys = criteo.hex_keys(list(chain.from_iterable(texts)))
            if keys is None:
                return None
        else:
            if any(_may_be_reformatted(of.written, some) for of, some in zip(self._columns, texts, strict=True)):
                return None
            encoded = [text.encode() for some in texts for text in some]
            offsets = ragged.offsets_of(np.fromiter(map(len, encoded), np.int64, len(encoded)))
            keys = hash_texts(offsets, np.frombuffer(b"".join(encoded), np.uint8)).view(np.int64)
        if not self._bags:
            missing = [0] * len(self._columns)  # which values are missing does not matter here
            return known.encode(keys.reshape(-1, n).T, np.arange(n), missing)[0].T.reshape(-1)
        parts = zip(self._columns, _parts(keys, texts), strict=True)
        return np.concatenate([known.ids_of(part, column.number) for column, part in parts])


def _parts(values: LongIds, texts: Sequence[Sequence[str]]) -> Iterator[LongIds]:
    """Yield the part of `values` [N] that belongs to each column's texts, of which there are N."""
    start = 0
    for some in texts:
        yield values[start : start + len(some)]
        start += len(some)


def _split(reading: ReadSettings, rows: Sequence[Any]) -> tuple[list[Any], Lengths] | None:
    """Return the values of bags that are not missing, one row after the other, and their number in each row."""
    kinds = set(map(type, rows)) - {_NONE}
    if kinds == {str} and reading.separator is not None:
        if reading.trimmed and any("[" in text for text in rows if text):  # it may be a list in text
            return None
        lists = [text.split(reading.separator) if text else [] for text in rows]
    elif kinds <= {list}:
        lists = [values or [] for values in rows]
    else:
        return None
    kinds = {type(value) for values in lists for value in values} - {_NONE}
    if kinds not in ({str}, {int}, set()):
        return None
    lists = [[value for value in values if value is not None and value != ""] for values in lists]
    return [value for values in lists for value in values], np.fromiter(map(len, lists), np.int32, len(lists))


def _texts(column: PlainColumn, values: Sequence[Any]) -> Sequence[str] | None:
    """Return the texts that values had in training, or None if only `encode` can read them."""
    kinds, written = set(map(type, values)), column.written
    if column.reading.trimmed and not _have_plain_ends(values):
        return None
    if kinds <= {str}:
        return values
    if (
        kinds - {_NONE} not in ({str}, {int}, set())
        or (int in kinds and not (written.has_plain_integers and _fit_64_bits(values)))
        or (_NONE in kinds and written.missing is None)
    ):
        return None
    return [
        value if type(value) is str else written.missing if value is None else str(value)  # type: ignore[misc]
        for value in values
    ]


def _fit_64_bits(values: Sequence[int | None]) -> bool:
    some = [value for value in values if value is not None]
    return min(some) >= -(1 << 63) and max(some) < 1 << 63


def _may_be_reformatted(written: Written, texts: Sequence[str]) -> bool:
    """Return whether training may have hashed different texts for these values."""
    if written.kind == "number" and written.has_plain_integers:
        return any(_PLAIN_INTEGER.fullmatch(text) is None for text in texts)
    return written.kind not in ("text", "unknown")


def _have_plain_ends(values: Sequence[Any]) -> bool:
    """Return whether texts certainly neither begin nor end with whitespace."""
    texts = [value for value in values if type(value) is str and value]
    letters = {text[0] for text in texts} | {text[-1] for text in texts}
    return all(" " < letter <= "~" or letter.isalnum() for letter in letters)
