"""Readers of a data set's shards for `check` and `info`: several threads map the files and read them in parts."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from hostdev.core.checksums import checksum
from hostdev.core.errors import UserError, in_words, raise_if_transient
from hostdev.core.progress import bar, counted
from hostdev.core.workers import call_all
from hostdev.data.manifest import Manifest, Shard, shard_schema
from hostdev.data.rows import Piece
from hostdev.data.schema import Column, Schema
from hostdev.data.shard_files import find_uneven_weights, inside, piece_of, types
from hostdev.data.targets import find_wrong, find_wrong_weights
from hostdev.kernels.arrays import AnyIds
from hostdev.kernels.pool import host_threads

T = TypeVar("T")

MOST_ROWS = 1 << 16  # maximum number of rows in a part
REMEDY = "preprocess the data again, or copy it again from an intact source"


class DamagedError(UserError):
    """A file of a data set is damaged."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}; {REMEDY}")


@dataclass(frozen=True, kw_only=True)
class StoredRows(Piece):
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
        DamagedError: The checksum, the schema, a list or the number of rows is wrong, or values are missing.
    """
    path = folder / shard.file
    if not known:
        require_checksum(path, shard.sha256)
    batches = _map_batches(path, shard_schema(found.schema, found.id_type))
    rows = sum(batch.num_rows for batch in batches)
    if rows != shard.rows:
        raise DamagedError(path, f"it has {rows:,} rows, not {shard.rows:,}")
    start = 0
    for batch in batches:
        if not known:
            _require_whole(path, batch)
            if (name := find_uneven_weights(batch, shard_schema(found.schema, found.id_type))) is not None:
                raise DamagedError(path, f"bag {name!r} has rows with more ids than weights, or fewer")
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


def _map_batches(path: Path, expected: pa.Schema) -> list[pa.RecordBatch]:
    """Map a shard into memory; raise DamagedError if it is unreadable or has a different schema."""
    try:
        file = pa.ipc.open_file(pa.memory_map(os.fsencode(path)))
        batches = [file.get_batch(i) for i in range(file.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise_if_transient(error)
        raise DamagedError(path, f"it is not an Arrow file ({in_words(error)})") from None
    if not file.schema.equals(expected):
        raise DamagedError(path, f"it has a wrong schema: {types(file.schema)}, not {types(expected)}")
    return batches


def _require_whole(path: Path, batch: pa.RecordBatch) -> None:
    try:
        batch.validate(full=True)  # the lists' offsets
    except pa.ArrowInvalid as error:
        raise DamagedError(path, f"it has broken lists ({in_words(error)})") from None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count or inside(column).null_count:
            raise DamagedError(path, f"it has missing values in {name!r}")


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
