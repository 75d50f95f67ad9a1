"""A checkpoint's values other than the tables, and the digest of the whole checkpoint."""

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import VERSION, BrokenCheckpointError
from hostdev.checkpoint.merged_keys import key_arrays
from hostdev.checkpoint.tree import Tree, from_tree, read_tensors
from hostdev.core.digest import (
    DigestColumn,
    RangeDigests,
    StateDigest,
    in_order,
    pieces_of,
    ranges_in_order,
    rows_per_range,
)
from hostdev.core.errors import in_words
from hostdev.core.keys import KeyArrays

DENSE = "dense.safetensors"
DigestNames = list[tuple[str, str]]  # for each dense array: its name in the digest, and in the file


def state_digest(
    layers: Layers,
    names: DigestNames,
    tensors: Mapping[str, Tensor],
    *,
    version: int = VERSION,
    known: Mapping[str, RangeDigests] | None = None,
) -> str:
    """Return a checkpoint's `state_sha256`, equal to the digest that training prints at the same step.

    Args:
        layers: The checkpoint's rows.
        names: For each dense array, its name in the digest and its name in the file.
        tensors: The dense arrays, by name in the file.
        version: The format version that defines the digest.
        known: By table, digests of rows, which need not be computed again.
    """
    digest = StateDigest1() if version == 1 else StateDigest()
    for table in sorted(layers.manifest.tables, key=lambda table: table.name):
        length = rows_per_range(table.dim)
        columns = []
        for name in ("weights", *table.slots, *table.row_slots):
            pieces = partial(layers.column, table.name, name)
            width = 1 if name in table.row_slots else table.dim
            columns.append(DigestColumn(name, (table.rows, width), partial(ranges_in_order, pieces, length)))
        keys = None if table.keys is None else key_arrays(layers.merged(table.name), table.keys)
        digest.table(table.name, table.step, columns, None if known is None else known[table.name], keys)
    for name, key in names:
        if key not in tensors:
            raise BrokenCheckpointError(f"{layers.chain[-1].path} is broken (it has no tensor {key!r})")
        values = tensors[key]
        rows = values if values.ndim else values.reshape(1)
        digest.array(name, str(values.dtype).removeprefix("torch."), values.shape, pieces_of(rows, _bits))
    return digest.hexdigest()


def read_dense_tensors(layers: Layers) -> dict[str, Tensor]:
    """Return a checkpoint's tensors other than tables, by name; raise BrokenCheckpointError if they cannot be read."""
    newest = layers.chain[-1]
    if newest.manifest.other(DENSE) is None:
        return {}
    return read_tensors(newest.path / DENSE)


def read_values(layers: Layers, tree: Tree) -> Any:
    """Return the values that a checkpoint's tree represents; raise BrokenCheckpointError if it is invalid."""
    tensors = read_dense_tensors(layers)
    try:
        return from_tree(tree, tensors)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        what = f"tensor {error} is missing" if isinstance(error, KeyError) else in_words(error)
        raise BrokenCheckpointError(f"{layers.chain[-1].path} is broken (its state: {what})") from None


def find_file(layers: Layers, name: str) -> Path | None:
    """Return the path of a file of `Manifest.others` in the newest checkpoint that has it, or None if none has it."""
    for checkpoint in reversed(layers.chain):
        if checkpoint.manifest.other(name) is not None:
            return checkpoint.path / name
    return None


def _bits(values: Tensor) -> Any:
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).contiguous().numpy()


class StateDigest1(StateDigest):
    """The digest of format version 1: it has no first line, and hashes columns' bytes instead of ranges' digests.

    It is computed in the calling thread.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._digest = sha256()

    def table(
        self,
        name: str,
        step: int,
        columns: Sequence[DigestColumn],
        known: RangeDigests | None = None,
        keys: KeyArrays | None = None,
    ) -> None:
        """Add a table; `known` is ignored, and version 1 has no tables by key."""
        del known
        assert keys is None
        self._digest.update(f"table {name} step {step}\n".encode())
        ranges = -(-columns[0].shape[0] // rows_per_range(columns[0].shape[1]))
        for column in in_order(columns):
            pieces = (fetch() for fetch in column.ranges(range(ranges)))
            self.array(f"{name}/{column.name}", "float32", column.shape, pieces)
