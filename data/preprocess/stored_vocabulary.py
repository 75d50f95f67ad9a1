"""A data set's vocabulary, mapped into memory: the column or id space, value and occurrence count of each id."""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core import arrow_files
from hostdev.core.errors import in_words
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.stored import DamagedError, require_checksum
from hostdev.data.schema import Space
from hostdev.data.shard_files import types
from hostdev.kernels.strings import hash_texts

_MOST_IDS = 1 << 20  # per chunk


class StoredVocabulary:
    """The vocabulary of a data set, which must have one.

    Raises DamagedError if the file is missing or unreadable, or its checksum, columns or number of ids are wrong.
    """

    def __init__(self, folder: Path, found: Manifest) -> None:
        assert found.vocabulary is not None
        self.path = folder / found.vocabulary
        self._schema = found.schema
        self._names = [*found.schema.dense, *(space.name for space in found.schema.spaces)]
        if found.vocabulary_sha256 is not None:
            require_checksum(self.path, found.vocabulary_sha256)
        try:
            self.table = arrow_files.read_table(self.path)
        except FileNotFoundError:
            raise DamagedError(self.path, "it is missing") from None
        except (ValueError, OSError) as error:
            raise DamagedError(self.path, in_words(error)) from None
        schema = self.table.schema
        field = schema.types[0] if schema.types and pa.types.is_dictionary(schema.types[0]) else None
        kinds = [field and field.value_type, *schema.types[1:]]
        if schema.names != ["field", "value", "count"] or kinds != [pa.string(), pa.string(), pa.int64()]:
            raise DamagedError(self.path, f"it has a wrong schema: {types(schema)}")
        if len(self.table) != found.schema.rows:
            raise DamagedError(self.path, f"it has {len(self.table):,} ids, not {found.schema.rows:,}")
        for name in ("field", "count"):
            if self.table[name].null_count:
                raise DamagedError(self.path, f"it has missing values in {name!r}")

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Occurrences of each id in training rows, int64 [V]; a view of the mapped file if it has one batch."""
        chunks = [chunk.to_numpy() for chunk in self.table["count"].chunks]
        return chunks[0] if len(chunks) == 1 else np.concatenate([np.zeros(0, np.int64), *chunks])

    def get_counts(self, space: Space) -> npt.NDArray[np.int64]:
        """Return the occurrences of each value of an id space, int64 [values]; a view if the space has one segment."""
        pieces = [self.counts[first : first + size] for first, size in space.segments]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.int64), *pieces])

    def _owners(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield, for each chunk, its first id and the owner of each id in it.

        An owner is the fixed id of a column or an id space, or -1 if that is unknown.
        """
        numbers = {name: i for i, name in enumerate(self._names)}
        start = 0
        for chunk in self.table["field"].chunks:
            owners_by_code = np.array([numbers.get(name, -1) for name in chunk.dictionary.to_pylist()], np.int64)
            for begin in range(0, len(chunk), _MOST_IDS):
                indices = chunk.indices.slice(begin, _MOST_IDS).to_numpy()
                yield start + begin, owners_by_code[indices]
            start += len(chunk)

    @cached_property
    def spaces(self) -> dict[str, Space]:
        """The id spaces by name, read from the file because manifests of version 1 do not record them.

        Raises DamagedError if ids are not in the order of the id spaces, or contradict the schema of a data set that
        kept earlier ids.
        """
        begins = [first for space in self._schema.spaces for first, _ in space.segments]
        if begins != sorted(begins):
            return self._grown_spaces()
        fixed, dense = self._schema.first_value, len(self._schema.dense)
        sizes, last = np.zeros(fixed, np.int64), dense
        for start, owners in self._owners():
            at = np.arange(start, start + len(owners))
            values = owners[at >= fixed]
            right = owners == at
            right[at >= fixed] = np.diff(values, prepend=last) >= 0
            if not right.all():
                number = int(at[right.argmin()])
                name = self.table["field"][number].as_py()
                raise DamagedError(
                    self.path, f"id {number} belongs to {name!r}, which is not in the schema or has ids out of order"
                )
            sizes += np.bincount(values, minlength=fixed)
            last = int(values[-1]) if len(values) else last
        edges = fixed + np.concatenate([[0], np.cumsum(sizes[dense:])])
        return {
            space.name: Space(space.name, space.oov, int(first), int(end - first))
            for space, (first, end) in zip(self._schema.spaces, pairwise(edges), strict=True)
        }

    def _grown_spaces(self) -> dict[str, Space]:
        """Return the schema's id spaces after checking the file against them; raise the same errors as `spaces`."""
        spaces, fixed = self._schema.spaces, self._schema.first_value
        begins = [(number, number) for number in range(fixed)]
        begins += sorted((first, space.oov) for space in spaces for first, _ in space.segments)
        firsts, owner = (np.array(column, np.int64) for column in zip(*begins, strict=True))
        for start, owners in self._owners():
            ids = np.arange(start, start + len(owners))
            right = owner[np.searchsorted(firsts, ids, "right") - 1]
            if len(wrong := np.flatnonzero(owners != right)):
                number = int(ids[wrong[0]])
                name = self.table["field"][number].as_py()
                raise DamagedError(self.path, f"id {number} belongs to {name!r}, not {self._names[right[wrong[0]]]!r}")
        return {space.name: space for space in spaces}

    def values(self, space: Space) -> pa.ChunkedArray:
        """Return the values of an id space in the order of their ids."""
        pieces = [self.table["value"].slice(first, size) for first, size in space.segments]
        return pa.chunked_array([chunk for piece in pieces for chunk in piece.chunks], pa.string())

    def text(self, number: int) -> str:
        """Describe an id: its column or id space, and its value."""
        field, value = (self.table[name][number].as_py() for name in ("field", "value"))
        return f"{field!r}" if value is None else f"{field!r} value {value!r}"

    def find_repeated_value(self, space: Space) -> tuple[int, int] | None:
        """Return two ids of an id space with the same value, or None; takes 8 bytes of memory per id."""
        values = self.values(space)
        hashes = np.empty(space.values, np.uint64)
        start = 0
        for piece in _pieces(values):
            hashes[start : start + len(piece)] = _hashes(piece)
            start += len(piece)
        hashes.sort()
        alike = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        seen: dict[str, int] = {}  # values with a duplicate hash, which may still differ
        start = 0
        for piece in _pieces(values) if len(alike) else ():
            for at in np.flatnonzero(np.isin(_hashes(piece), alike)).tolist():
                value, number = piece[at].as_py(), space.id_at(start + at)
                if value in seen:
                    return seen[value], number
                seen[value] = number
            start += len(piece)
        return None


def _pieces(values: pa.ChunkedArray) -> Iterator[pa.StringArray]:
    for chunk in values.chunks:
        for begin in range(0, len(chunk), _MOST_IDS):
            yield chunk.slice(begin, _MOST_IDS)


def _hashes(texts: pa.StringArray) -> npt.NDArray[np.uint64]:
    return hash_texts(*arrow.get_buffers(texts))
