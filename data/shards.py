"""Arrow shards to batches: every file is checked before a row of it is used."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data.batch import Batch
from hostdev.data.manifest import CATEGORICAL, CATEGORICAL_NAMES, DENSE, FIELDS, Manifest, Shard, schema

from hostdev.core.errors import UserError
from hostdev.kernels.counter import key64, permutation
from hostdev.kernels.lookup import first_outside

_DENSE_IDS = np.arange(DENSE)


@dataclass(frozen=True)
class _Rows:
    label: npt.NDArray[np.float32]  # [n]
    dense: npt.NDArray[np.float32]  # [n, 13]
    cat: npt.NDArray[Any]  # [n, 26]

    def take(self, order: npt.NDArray[np.int64]) -> "_Rows":
        return _Rows(self.label[order], self.dense[order], self.cat[order])

    def __len__(self) -> int:
        return len(self.label)


class ShardReader:
    """The rows of one split of a data set, in batches.

    root      the data set's folder
    manifest  its manifest
    split     "train" or "test"
    """

    def __init__(self, root: Path, manifest: Manifest, split: str) -> None:
        self._root = root
        self._manifest = manifest
        self._shards = manifest.shards(split)
        self._intact: set[str] = set()  # a shard's checksum is computed when it is first read
        self.rows = manifest.rows(split)

    def require(self, batch_size: int) -> None:
        """Raise UserError unless a batch of this size can be filled."""
        if batch_size > self.rows:
            raise UserError(f"--batch-size {batch_size} is larger than the {self.rows} training rows of {self._root}")

    def steps(self, batch_size: int) -> int:
        """Return the number of batches in one pass; the last may be smaller."""
        return -(-self.rows // batch_size)

    def batches(self, batch_size: int, *, seed: int | None = None, epoch: int = 0) -> Iterator[Batch]:
        """Iterate over every row once; the last batch may be smaller.

        With a seed the shards, and the rows within each, come in an order of that seed and epoch.

        Raises UserError for a shard that is missing or does not match the manifest, and for a bad id or label.
        """
        order = range(len(self._shards))
        if seed is not None:
            order = permutation(len(self._shards), key64(seed, "shard order", epoch)).tolist()
        pieces: list[_Rows] = []
        have = 0
        for number in order:
            rows = self._load(self._shards[number])
            if seed is not None:
                row_order = permutation(len(rows), key64(seed, "row order", epoch, number))
            else:
                row_order = np.arange(len(rows))
            start = 0
            while start < len(rows):
                piece = rows.take(row_order[start : start + batch_size - have])
                pieces.append(piece)
                start += len(piece)
                have += len(piece)
                if have == batch_size:
                    yield _batch(pieces)
                    pieces, have = [], 0
        if pieces:
            yield _batch(pieces)

    def _load(self, shard: Shard) -> _Rows:
        path = self._root / shard.file
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"shard {path} is missing; preprocess the data again") from None
        if shard.file not in self._intact and sha256(content).hexdigest() != shard.sha256:
            raise UserError(
                f"shard {path} has a wrong checksum: it is damaged or was changed; preprocess the data again"
            )
        try:
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"shard {path} is not an Arrow file ({error}); preprocess the data again") from None
        expected = schema(self._manifest.id_type)
        if not table.schema.equals(expected):
            raise UserError(f"shard {path} has a wrong schema: {_types(table.schema)}, not {_types(expected)}")
        if len(table) != shard.rows:
            raise UserError(f"shard {path} has {len(table)} rows, not {shard.rows}; preprocess the data again")
        label, dense, cat = (table[name].combine_chunks() for name in expected.names)
        values = [label, dense.flatten(), cat.flatten()]
        if any(array.null_count for array in (dense, cat, *values)):
            raise UserError(f"shard {path} has missing values; preprocess the data again")
        flat_label, flat_dense, flat_cat = (array.to_numpy() for array in values)
        rows = _Rows(flat_label, flat_dense.reshape(-1, DENSE), flat_cat.reshape(-1, CATEGORICAL))
        self._check_values(path, rows)
        self._intact.add(shard.file)
        return rows

    def _check_values(self, path: Path, rows: _Rows) -> None:
        size = self._manifest.vocabulary_size
        flat = rows.cat.ravel()
        position = first_outside(flat, size)
        if position >= 0:
            row, field = divmod(position, rows.cat.shape[1])
            raise UserError(
                f"shard {path}, row {row}, field {CATEGORICAL_NAMES[field]}: id {flat[position]} is outside "
                f"0..{size - 1}, the table's rows; preprocess the data again"
            )
        wrong = np.flatnonzero((rows.label != 0) & (rows.label != 1))
        if len(wrong):
            raise UserError(f"shard {path}, row {wrong[0]}: label {rows.label[wrong[0]]} is not 0 or 1")


def _batch(pieces: list[_Rows]) -> Batch:
    label = np.concatenate([piece.label for piece in pieces])
    ids = np.empty((len(label), FIELDS), pieces[0].cat.dtype)
    weights = np.empty((len(label), FIELDS), np.float32)
    ids[:, :DENSE] = _DENSE_IDS
    ids[:, DENSE:] = np.concatenate([piece.cat for piece in pieces])
    weights[:, :DENSE] = np.concatenate([piece.dense for piece in pieces])
    weights[:, DENSE:] = 1
    return Batch(label, ids, weights)


def _types(found: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in found)
