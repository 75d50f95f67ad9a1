"""Arrow shards to batches: every file is checked before a row of it is used."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data import ragged
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest, Shard, shard_schema

from hostdev.core.errors import UserError
from hostdev.kernels.counter import key64, permutation
from hostdev.kernels.lookup import first_outside


@dataclass(frozen=True)
class _Rows:
    """A shard's rows; the bags as values end to end [N] and the offsets [n + 1] where each row's begin."""

    label: npt.NDArray[np.float32]  # [n]
    dense: npt.NDArray[np.float32]  # [n, dense columns]
    ids: npt.NDArray[Any]  # [n, columns with one id]
    bags: dict[str, tuple[npt.NDArray[Any], ragged.Offsets]]

    def take(self, order: npt.NDArray[np.int64]) -> Batch:
        bags = {name: ragged.take(*bag, order) for name, bag in self.bags.items()}
        return Batch(self.label[order], self.dense[order], self.ids[order], bags)

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
        self.schema = manifest.schema
        self.rows = manifest.rows(split)

    def require(self, batch_size: int) -> None:
        """Raise UserError unless a batch of this size can be filled."""
        if batch_size > self.rows:
            smaller = max(1, min(1000, self.rows // 20))
            raise UserError(
                f"--batch-size {batch_size} is larger than the {self.rows} training rows of {self._root}; give a "
                f"smaller one, such as --batch-size {smaller}"
            )

    def steps(self, batch_size: int) -> int:
        """Return the number of batches in one pass; the last may be smaller."""
        return -(-self.rows // batch_size)

    def batches(
        self, batch_size: int, *, seed: int | None = None, epoch: int = 0, skip: int = 0, part: tuple[int, int] = (0, 1)
    ) -> Iterator[Batch]:
        """Iterate over every row once; the last batch may be smaller.

        With a seed the shards, and the rows within each, come in an order of that seed and epoch.

        skip  begin after so many batches; shards that these would use up are not read
        part  (i, n): of each batch only the i-th of n parts, which may have no rows; all parts together are the batch

        Raises UserError for a shard that is missing or does not match the manifest, and for a bad id or label.
        """
        order = range(len(self._shards))
        if seed is not None:
            order = permutation(len(self._shards), key64(seed, "shard order", epoch)).tolist()
        pieces: list[Batch] = []
        have, passed = 0, skip * batch_size
        left = self.rows - passed
        size = min(batch_size, left)
        edges = size * part[0] // part[1], size * (part[0] + 1) // part[1]  # of this part in the batch
        for number in order:
            if passed >= self._shards[number].rows:
                passed -= self._shards[number].rows
                continue
            rows = self._load(self._shards[number])
            if seed is not None:
                row_order = permutation(len(rows), key64(seed, "row order", epoch, number))
            else:
                row_order = np.arange(len(rows))
            start, passed = passed, 0
            while start < len(rows):
                taken = min(batch_size - have, len(rows) - start)
                begin, end = (max(0, min(taken, edge - have)) for edge in edges)
                pieces.append(rows.take(row_order[start + begin : start + end]))
                start += taken
                have += taken
                if have == size:
                    yield _joined(pieces, None if part[1] == 1 else size)
                    left -= size
                    size = min(batch_size, left)
                    edges = size * part[0] // part[1], size * (part[0] + 1) // part[1]
                    pieces, have = [], 0

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
        expected = shard_schema(self.schema, self._manifest.id_type)
        if not table.schema.equals(expected):
            raise UserError(f"shard {path} has a wrong schema: {_types(table.schema)}, not {_types(expected)}")
        if len(table) != shard.rows:
            raise UserError(f"shard {path} has {len(table)} rows, not {shard.rows}; preprocess the data again")
        try:
            table.validate(full=True)  # the lists' offsets
        except pa.ArrowInvalid as error:
            raise UserError(f"shard {path} is broken ({error}); preprocess the data again") from None
        if any(chunk.null_count or _inside(chunk).null_count for column in table.columns for chunk in column.chunks):
            raise UserError(f"shard {path} has missing values; preprocess the data again")
        rows = self._rows_of(table)
        self._check_values(path, rows)
        self._intact.add(shard.file)
        return rows

    def _rows_of(self, table: pa.Table) -> _Rows:
        """Return a shard's columns as arrays, most of them without a copy."""
        n = len(table)
        dense, ids = np.zeros((n, 0), np.float32), np.zeros((n, 0), self._manifest.id_type)
        if self.schema.dense:
            dense = _inside(table["dense"].combine_chunks()).to_numpy().reshape(n, -1)
        if self.schema.ids:
            ids = _inside(table["cat"].combine_chunks()).to_numpy().reshape(n, -1)
        bags = {}
        for name in self.schema.bags:
            chunks = table[f"bag:{name}"].chunks  # whose offsets are int32, so that all in one may be too long
            values = [_inside(chunk).to_numpy() for chunk in chunks]
            lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in chunks]
            bags[name] = _joined_arrays(values), ragged.offsets_of(_joined_arrays(lengths))
        return _Rows(table["label"].combine_chunks().to_numpy(), dense, ids, bags)

    def _check_values(self, path: Path, rows: _Rows) -> None:
        size = self.schema.rows

        def outside(row: int, name: str, found: int) -> UserError:
            return UserError(
                f"shard {path}, row {row}, field {name}: id {found} is outside "
                f"0..{size - 1}, the table's rows; preprocess the data again"
            )

        flat = rows.ids.ravel()
        position = first_outside(flat, size)
        if position >= 0:
            row, field = divmod(position, rows.ids.shape[1])
            raise outside(row, self.schema.ids[field], flat[position])
        for name, (values, offsets) in rows.bags.items():
            position = first_outside(values, size)
            if position >= 0:
                raise outside(int(np.searchsorted(offsets, position, "right")) - 1, name, values[position])
        wrong = np.flatnonzero((rows.label != 0) & (rows.label != 1))
        if len(wrong):
            raise UserError(f"shard {path}, row {wrong[0]}: label {rows.label[wrong[0]]} is not 0 or 1")


def _inside(array: Any) -> Any:
    """Return the values of lists end to end; those of a column without lists are its own."""
    return array.flatten() if hasattr(array, "flatten") and pa.types.is_nested(array.type) else array


def _joined_arrays(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _joined(pieces: list[Batch], whole: int | None) -> Batch:
    """Return the rows of all pieces, in order, as a part of so many."""
    if len(pieces) == 1:
        return pieces[0] if whole is None else replace(pieces[0], whole=whole)
    bags = {
        name: (
            np.concatenate([piece.bags[name][0] for piece in pieces]),
            np.concatenate([piece.bags[name][1] for piece in pieces]),
        )
        for name in pieces[0].bags
    }
    return Batch(
        np.concatenate([piece.label for piece in pieces]),
        np.concatenate([piece.dense for piece in pieces]),
        np.concatenate([piece.ids for piece in pieces]),
        bags,
        whole,
    )


def _types(found: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in found)
