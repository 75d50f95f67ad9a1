"""Readers of a data set's shards, in parts, and of its vocabulary; and a counter of ids for several threads."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core import arrow_files
from hostdev.core.checksums import checksum
from hostdev.core.errors import UserError, in_words, raise_if_transient
from hostdev.core.memory import available_bytes, require_memory
from hostdev.core.progress import bar, counted
from hostdev.core.workers import call_all
from hostdev.data.batch import ShardPiece
from hostdev.data.manifest import Manifest, Shard
from hostdev.data.preprocess import columns as arrow
from hostdev.data.schema import Column, Schema, Space, find_wrong, find_wrong_weights
from hostdev.data.shard_files import find_damage, piece_of, types
from hostdev.kernels.arrays import AnyIds
from hostdev.kernels.pool import host_threads
from hostdev.kernels.strings import hash_texts
from hostdev.kernels.unique import tally

T = TypeVar("T")

MOST_ROWS = 1 << 16  # maximum number of rows in a part
REMEDY = "preprocess the data again, or copy it again from an intact source"
_MOST_IDS = 1 << 20  # maximum ids, or values, in a chunk
Counted = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # distinct ids, and how often each occurs


class DamagedError(UserError):
    """A file of a data set is damaged."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}; {REMEDY}")
        self.what = what


@dataclass(frozen=True, kw_only=True)
class StoredRows(ShardPiece):
    """Consecutive rows of a shard, as views of the mapped file."""

    start: int  # number of rows of the shard before this part

    def ids_of(self, schema: Schema, column: Column) -> AnyIds:
        """Return a column's ids: [n], or [N] for a bag."""
        return self.bags[column.name][0] if column.kind == "bag" else self.ids[:, schema.ids.index(column.name)]


def each_shard(look: Callable[[Shard], T], folder: Path, shards: Sequence[Shard], title: str) -> Iterator[T]:
    """Call `look` for shards in parallel with a progress bar; yield the results in order."""
    sizes = [get_size(folder / shard.file) for shard in shards]
    threads = max(1, min(host_threads(), len(shards)))
    with bar(sum(sizes), title, "B", unit_scale=True) as progress:
        results = call_all(threads, "hostdev-shards", [partial(look, shard) for shard in shards])
        for size, result in zip(sizes, results, strict=True):
            progress.update(size)
            yield result


def get_size(path: Path) -> int:
    """Return a file's size in bytes; 0 if it is inaccessible."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_parts(folder: Path, found: Manifest, shard: Shard, *, known: bool = False) -> Iterator[StoredRows]:
    """Iterate over a shard's rows, in parts of bounded size.

    Args:
        known: Whether the shard was checked before; if so, its checksum and values are not checked again.

    Raises:
        DamagedError: The file is missing or no Arrow file, its checksum, schema, lists or number of rows are wrong, or
            values are missing.
    """
    path = folder / shard.file
    if not known:
        require_checksum(path, shard.sha256)
    try:
        file = pa.ipc.open_file(pa.memory_map(os.fsencode(path)))
        batches = [file.get_batch(i) for i in range(file.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise_if_transient(error)
        raise DamagedError(path, f"it is not an Arrow file ({in_words(error)})") from None
    if damage := find_damage(batches, file.schema, found, shard.rows, known=known):
        raise DamagedError(path, f"it {damage}")
    start = 0
    for batch in batches:
        for begin in range(0, batch.num_rows, MOST_ROWS):
            piece = batch.slice(begin, MOST_ROWS)
            yield StoredRows(**vars(piece_of(piece, found)), start=start + begin)
        start += batch.num_rows


def require_checksum(path: Path, expected: str) -> None:
    """Raise DamagedError unless a file exists and has this SHA-256."""
    try:
        if checksum(path) != expected:
            raise DamagedError(path, "it has a wrong checksum: it is damaged or was changed")
    except FileNotFoundError:
        raise DamagedError(path, "it is missing") from None
    except OSError as error:
        raise_if_transient(error)
        raise DamagedError(path, f"it cannot be read ({in_words(error)})") from None


@dataclass(frozen=True)
class Wrong:
    """Invalid values of a part.

    Attributes:
        kind: Kind of the values, such as "label".
        what: The fault, such as "not 0 or 1".
        count: Number of such values.
        first: The first such value, and its row in the shard.
    """

    kind: str
    what: str
    count: int
    first: str

    def text(self) -> str:
        """Format the number of values and the first one."""
        return f"{counted(self.count, self.kind)} {self.what}, the first in {self.first}"


def wrong_values(part: StoredRows, schema: Schema) -> list[Wrong]:
    """Find ids outside their column's range, invalid labels and weights, and numbers that are not finite."""
    found = []
    spaces = {space.name: space for space in schema.spaces}
    for column in schema.columns:
        ids, space = part.ids_of(schema, column), spaces[column.space]
        at = np.flatnonzero(~space.has(ids) & (ids != space.oov))
        if len(at):
            row = int(at[0])
            if column.kind == "bag":
                row = int(np.searchsorted(part.bags[column.name][1], row, "right")) - 1
            allowed = f"{space.oov} or in {space.in_words()}" if space.values else f"{space.oov}"
            first = f"row {part.start + row}: {ids[at[0]]} is not {allowed}"
            found.append(Wrong("id", f"of column {column.name!r} outside its range", len(at), first))
    if wrong := find_wrong(part.label, part.weight, schema.labels, schema.targets):
        name, fault, at, values = wrong
        kind = "weight" if name == schema.targets.weight else "label"
        found.append(Wrong(kind, fault, len(at), f"row {part.start + at[0]}: {values[at[0]]}"))
    for name, weights in part.bag_weights.items():
        if len(at := find_wrong_weights(weights)):
            row = part.start + int(np.searchsorted(part.bags[name][1], at[0], "right")) - 1
            fault = f"of bag {name!r} not finite or below 0"
            found.append(Wrong("weight", fault, len(at), f"row {row}: {weights[at[0]]}"))
    finite = np.isfinite(part.dense)
    if not finite.all():
        row, number = np.argwhere(~finite)[0]
        first = f"row {part.start + row}, column {schema.dense[number]!r}: {part.dense[row, number]}"
        found.append(Wrong("number", "not finite", int((~finite).sum()), first))
    return found


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


def count_bytes(uses: int) -> int:
    """Return the size in bytes of a counter of up to `uses` occurrences: 4 or 8."""
    return 4 if uses < 2**32 else 8


def require_room(folder: Path, ids: int, needed: int) -> None:
    """Raise UserError unless `needed` bytes of memory are free for counting the ids of a data set."""
    require_memory(needed, f"{folder}: counting its {ids:,} ids", "use a machine with more memory")


def add_counts(*parts: Counted) -> Counted:
    """Return the distinct ids of all parts, ascending, and how often each occurs in all; both int64 [K]."""
    ids, inverse = np.unique(np.concatenate([ids for ids, _ in parts]), return_inverse=True)
    total = np.bincount(inverse, np.concatenate([counts for _, counts in parts]), len(ids))
    return ids, total.astype(np.int64)


class Counter:
    """A counter of each id's occurrences. Threads use separate arrays if memory and the amount of work allow.

    Args:
        ids: Number of ids.
        uses: Upper bound on the number of occurrences of all ids together.
    """

    def __init__(self, ids: int, uses: int) -> None:
        size = count_bytes(uses)
        most = min(uses // max(1, ids), available_bytes() // (4 * size * max(1, ids)))
        self._arrays = [np.zeros(ids, f"u{size}") for _ in range(max(1, min(host_threads(), most)))]
        self._free: SimpleQueue[npt.NDArray[Any]] = SimpleQueue()
        for array in self._arrays:
            self._free.put(array)

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Count ids [N], each at least 0 and less than the number of ids."""
        array = self._free.get()
        try:
            tally(ids, array)
        finally:
            self._free.put(array)

    def total(self) -> npt.NDArray[Any]:
        """Return the occurrences of each id, uint32 or uint64 [ids]; call this after the last `add`."""
        total = self._arrays[0]
        for other in self._arrays[1:]:
            total += other
        self._arrays = [total]
        return total
