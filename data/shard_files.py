"""Memory-mapped Arrow IPC files; every file is checked before its rows are used.

A file is read sequentially before it is mapped: the first time to verify its checksum, later to load it into the page
cache for random access. Reading raises an error if the file cannot be read, or was shortened or replaced. A file
that has changed since its checksum was computed is hashed again. Shortening a file that is already mapped kills the
process (SIGBUS).
"""

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa

from hostdev.core.arrow_files import as_numpy
from hostdev.core.checksums import NoDigest, hash_stream
from hostdev.core.errors import ChangedError, UserError, in_words, raise_if_transient
from hostdev.data import ragged
from hostdev.data.batch import ShardPiece
from hostdev.data.folder import RemoteFiles
from hostdev.data.manifest import Manifest, Shard, shard_schema
from hostdev.data.schema import find_wrong, find_wrong_weights
from hostdev.kernels.lookup import first_outside


class ShardFiles:
    """The shards of the data set in folder `root`; thread-safe."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self._manifest = manifest
        self._intact: dict[str, tuple[int, ...]] = {}  # by file: its state when it was verified
        self._remote = RemoteFiles.find(root)

    def open(self, shard: Shard, stop: Event) -> list[ShardPiece]:
        """Return a shard's record batches, memory-mapped.

        Raises:
            StoppedError: `stop` is set.
            UserError: The file is missing or does not match the manifest, or an id, label or weight is invalid.
        """
        if self._remote is None:
            return self._open(self._root / shard.file, shard, stop)
        return self._remote.use(shard.file, shard.sha256, lambda path: self._open(path, shard, stop), stop)

    def _open(self, path: Path, shard: Shard, stop: Event) -> list[ShardPiece]:
        state = self._read(path, shard, stop)
        try:
            with pa.memory_map(os.fsencode(path)) as file:
                table = pa.ipc.open_file(file).read_all()
        except (pa.ArrowException, OSError) as error:
            raise_if_transient(error)
            if self._remote is not None and not path.exists():
                raise FileNotFoundError from None
            raise UserError(f"shard {path} is not an Arrow file ({error}); preprocess the data again") from None
        if _state(path.stat()) != state:
            raise _changed(path)
        batches = table.to_batches()
        if damage := find_damage(batches, table.schema, self._manifest, shard.rows):
            raise UserError(f"shard {path} {damage}; preprocess the data again")
        pieces = [piece_of(batch, self._manifest) for batch in batches]
        self._check_values(path, pieces)
        self._intact[shard.file] = state
        return pieces

    def _read(self, path: Path, shard: Shard, stop: Event) -> tuple[int, ...]:
        """Read a file, verify its checksum unless that was already done, and return its state."""
        try:
            with path.open("rb", buffering=0) as file:
                state = _state(os.fstat(file.fileno()))
                known = self._intact.get(shard.file) == state
                digest = hash_stream(file, stop=stop, digest=NoDigest if known else sha256)
                size = file.tell()
        except FileNotFoundError:
            if self._remote is not None:
                raise
            raise UserError(f"shard {path} is missing; preprocess the data again") from None
        except OSError as error:
            raise_if_transient(error)
            raise UserError(f"shard {path} cannot be read: {error.strerror}") from None
        if size != state[0] or (not known and digest != shard.sha256):
            raise _changed(path)
        return state

    def _check_values(self, path: Path, pieces: list[ShardPiece]) -> None:
        schema, first = self._manifest.schema, 0

        def wrong(row: int, what: str) -> UserError:
            return UserError(f"shard {path}, row {first + row}, {what}; preprocess the data again")

        def outside(row: int, name: str, found: int) -> UserError:
            return wrong(row, f"field {name}: id {found} is not one of the data set's ids, 0..{schema.rows - 1}")

        for piece in pieces:
            flat = piece.ids.ravel()
            position = first_outside(flat, schema.rows)
            if position >= 0:
                row, field = divmod(position, piece.ids.shape[1])
                raise outside(row, schema.ids[field], flat[position])
            for name, (values, offsets) in piece.bags.items():
                position = first_outside(values, schema.rows)
                if position >= 0:
                    raise outside(int(np.searchsorted(offsets, position, "right")) - 1, name, values[position])
            for name, weights in piece.bag_weights.items():
                for place in find_wrong_weights(weights)[:1].tolist():
                    row = int(np.searchsorted(piece.bags[name][1], place, "right")) - 1
                    what = f"weights of {name}: {weights[place]} is not a finite weight of at least 0"
                    raise wrong(row, what)
            if found := find_wrong(piece.label, piece.weight, schema.labels, schema.targets):
                column, fault, at, values = found
                raise wrong(at[0], f"{column}: {values[at[0]]} is {fault}")
            first += len(piece)


def _state(found: os.stat_result) -> tuple[int, ...]:
    """Return a file's size, modification time, device and inode."""
    return found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino


def _changed(path: Path) -> ChangedError:
    return ChangedError(f"shard {path} has a wrong checksum: it is damaged or was changed; preprocess the data again")


def piece_of(batch: pa.RecordBatch, found: Manifest) -> ShardPiece:
    """Return a record batch's columns as arrays; only the bags' offsets are copied."""
    n, schema = len(batch), found.schema
    dense, ids = np.zeros((n, 0), np.float32), np.zeros((n, 0), found.id_type)
    if schema.dense:
        dense = as_numpy(inside(batch["dense"])).reshape(n, len(schema.dense))
    if schema.ids:
        ids = as_numpy(inside(batch["cat"])).reshape(n, len(schema.ids))
    bags = {}
    for name in schema.bags:
        column = batch[f"bag:{name}"]
        bags[name] = as_numpy(inside(column)), ragged.offsets_of(np.diff(as_numpy(column.offsets)))
    weights = {name: as_numpy(inside(batch[f"weights:{name}"])) for name in schema.weighted_bags}
    label = as_numpy(inside(batch["label"])).reshape((n, len(schema.labels)) if schema.targets.more else n)
    weight = None if schema.targets.weight is None else as_numpy(batch["weight"])
    return ShardPiece(label, dense, ids, bags, weight, weights)


def find_damage(
    batches: Sequence[pa.RecordBatch], schema: pa.Schema, found: Manifest, rows: int, *, known: bool = False
) -> str | None:
    """Return what is wrong with a shard of `rows` rows, such as "has missing values in 'label'", or None.

    `known` says whether the shard's lists and values were checked before.
    """
    expected = shard_schema(found.schema, found.id_type)
    if not schema.equals(expected):
        return f"has a wrong schema: {types(schema)}, not {types(expected)}"
    if (count := sum(batch.num_rows for batch in batches)) != rows:
        return f"has {count:,} rows, not {rows:,}"
    for batch in () if known else batches:
        try:
            batch.validate(full=True)  # also checks the lists' offsets
        except pa.ArrowInvalid as error:
            return f"has broken lists ({in_words(error)})"
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.null_count or inside(column).null_count:
                return f"has missing values in {name!r}"
        for name in found.schema.weighted_bags:
            if not batch[f"weights:{name}"].offsets.equals(batch[f"bag:{name}"].offsets):
                return f"has rows with more ids than weights, or fewer, in bag {name!r}"
    return None


def inside(array: Any) -> Any:
    """Return the concatenated values of lists; return any other column unchanged."""
    return array.flatten() if hasattr(array, "flatten") and pa.types.is_nested(array.type) else array


def types(found: pa.Schema) -> str:
    """Format the names and types of a schema's fields."""
    try:
        return ", ".join(f"{field.name} {field.type}" for field in found)
    except UnicodeDecodeError:
        return "names that are not UTF-8"
