"""Lookup of values' ids in a data set's vocabulary. The vocabulary's file is checked when it is loaded."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core import arrow_files
from hostdev.core.checksums import checksum
from hostdev.core.errors import UserError, in_words
from hostdev.data import ragged
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.forms import Written, find_forms, from_json
from hostdev.kernels.arrays import LongIds
from hostdev.kernels.strings import TextMap


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
        self.written: dict[str, Written] = {}
        self.rates: dict[str, float] = {}
        if not path.is_file():
            raise UserError(f"{path} is missing, or not a file")
        try:
            if data.vocabulary_sha256 is not None and checksum(path) != data.vocabulary_sha256:
                raise self._broken("its checksum is wrong: it is damaged or was changed")
            table = arrow_files.read_table(path)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise self._broken(in_words(error)) from None
        owners = self._owners(table, [*schema.dense, *(space.name for space in schema.spaces)], schema.rows)
        if not np.array_equal(owners[: self._first], np.arange(self._first)):
            raise self._broken("its first ids do not match the data set's columns and id spaces")
        # Read each id's id space from the file, because manifests of version 1 do not record it.
        starts = np.flatnonzero(np.diff(owners[self._first :], prepend=-2)) + self._first
        ends = [*starts.tolist(), len(table)]
        segments: dict[int, list[tuple[int, int]]] = {}
        for first, last in pairwise(ends):
            segments.setdefault(int(owners[first]), []).append((first, last - first))
        by_oov = {space.oov: space for space in schema.spaces}
        if not segments.keys() <= by_oov.keys():
            raise self._broken("an id is assigned to a column that is unknown or has no ids")
        everything = (self._first, schema.rows)
        recorded = any((space.first, space.first + space.size) != everything for space in schema.spaces)
        self._prefixes = {space.name: f"{space.oov}\0" for space in schema.spaces if space.oov in segments}
        forms: dict[str, frozenset[int]] = {space.name: frozenset() for space in schema.spaces}
        known = dict.fromkeys(forms, 0)
        for first, last in pairwise(ends):  # in the order of the ids
            name = by_oov[int(owners[first])].name
            forms[name] |= self._add(name, table["value"].slice(first, last - first))
            known[name] += pc.sum(table["count"].slice(first, last - first)).as_py() or 0
        for space in schema.spaces:
            found = tuple(segments.get(space.oov, ()))
            if found != space.segments if recorded else len(found) > 1:
                raise self._broken(f"its ids of {space.name!r} differ from those in the manifest")
            self.written[space.name] = Written(forms[space.name])
            rare = table["count"][space.oov].as_py()
            self.rates[space.name] = rare / max(1, known[space.name] + rare)
        if len(self._texts) != len(table) - self._first:
            raise self._broken("a value has two ids in one id space")

    def _owners(self, table: pa.Table, names: list[str], rows: int) -> npt.NDArray[np.int64]:
        """Return the column or id space of each id, as an index into `names`; raise UserError for an invalid table."""
        schema = table.schema
        field = schema.types[0] if schema.types and pa.types.is_dictionary(schema.types[0]) else None
        kinds = [field and field.value_type, *schema.types[1:]]
        if schema.names != ["field", "value", "count"] or kinds != [pa.string(), pa.string(), pa.int64()]:
            raise self._broken("its columns are not field, value and count")
        if len(table) != rows:
            raise self._broken(f"it has {len(table):,} ids, not {rows:,}")
        if table["field"].null_count or table["count"].null_count or table["value"].slice(self._first).null_count:
            raise self._broken("it has missing values")
        numbers = {name: number for number, name in enumerate(names)}
        found = [np.zeros(0, np.int64)]
        for chunk in table["field"].chunks:
            owners_by_code = np.array([numbers.get(name, -1) for name in chunk.dictionary.to_pylist()], np.int64)
            found.append(owners_by_code[chunk.indices.to_numpy()])
        return np.concatenate(found)

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
