"""A checkpoint's values other than the tables, and the digest of the whole checkpoint.

Nested values with tensors, such as a `state_dict`, are stored as JSON and safetensors, without pickle. The tree
represents a tensor as {"$tensor": its name in the file}, a NumPy array as {"$array": its name in the file}, a tuple as
{"$tuple": [...]}, and a dict whose keys are not all strings as {"$dict": [[key, value], ...]}.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save as save_arrays
from safetensors.torch import load, load_file, save
from torch import Tensor

from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import VERSION, BrokenCheckpointError
from hostdev.core.digest import (
    DigestColumn,
    RangeDigests,
    StateDigest,
    in_order,
    pieces_of,
    ranges_in_order,
    rows_per_range,
)
from hostdev.core.errors import in_words, raise_if_transient
from hostdev.core.keys import KeyArrays
from hostdev.core.outputs import is_text

Tree = Any
_MARKS = ("$tensor", "$array", "$tuple", "$dict")
DENSE = "dense.safetensors"
DigestNames = list[tuple[str, str]]  # for each dense array: its name in the digest, and in the file


def to_tree(value: Any, tensors: dict[str, Tensor], path: str = "") -> Tree:
    """Return nested values as JSON values, and add copies of their tensors in host memory to `tensors`.

    Supported types: dicts, lists, tuples, tensors, NumPy arrays and scalars, strings, numbers, bools and None. Other
    types raise a TypeError that names the path of the value.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": _put(value.detach().to("cpu", copy=True).contiguous(), tensors, path)}
    if isinstance(value, np.ndarray):
        return {"$array": _put(torch.from_numpy(np.array(value, order="C")), tensors, path)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [to_tree(each, tensors, _join(path, i)) for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [to_tree(each, tensors, _join(path, i)) for i, each in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [(key, to_tree(each, tensors, _join(path, key))) for key, each in value.items()]
        if all(isinstance(key, str) and key not in _MARKS for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[to_tree(key, tensors, _join(path, "key")), each] for key, each in pairs]}
    raise TypeError(
        f"{path or 'the value'} is of type {type(value).__name__}, which a checkpoint cannot store: pass its "
        "state_dict(), or dicts, lists, tensors, numbers and text"
    )


def from_tree(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Return the values that `to_tree` converted to this tree."""
    if isinstance(tree, list):
        return [from_tree(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((mark, inner),) = tree.items()
        found: dict[str, Callable[[], Any]] = {
            "$tensor": lambda: tensors[inner],
            "$array": lambda: tensors[inner].numpy(),
            "$tuple": lambda: tuple(from_tree(each, tensors) for each in inner),
            "$dict": lambda: {_key(from_tree(key, tensors)): from_tree(each, tensors) for key, each in inner},
        }
        if mark in found:
            return found[mark]()
    return {key: from_tree(each, tensors) for key, each in tree.items()}


def tensors_as_bytes(tensors: dict[str, Tensor]) -> bytes:
    """Return tensors in host memory in safetensors format.

    `safetensors.torch` creates a ctypes type for each new number of bytes, and never frees it; in a long run, arrays
    grow from checkpoint to checkpoint. So it is used only for types that NumPy lacks, such as bfloat16.
    """
    try:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    except TypeError:
        content: bytes = save(tensors)
        return content
    return save_arrays(arrays)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raise BrokenCheckpointError if that fails."""
    try:
        if not is_text(path):  # load_file rejects paths that are not valid UTF-8
            return {name: tensor.clone() for name, tensor in load(path.read_bytes()).items()}
        return load_file(path)
    except (SafetensorError, OSError, MemoryError) as error:
        raise_if_transient(error)
        raise BrokenCheckpointError(f"{path} is broken ({error})") from None


def _put(tensor: Tensor, tensors: dict[str, Tensor], path: str) -> str:
    """Add a tensor under its path, with a suffix if {"a.b": ..} and {"a": {"b": ..}} collide; return its name."""
    name, number = path or "value", 2
    while name in tensors:
        name, number = f"{path}#{number}", number + 1
    tensors[name] = tensor
    return name


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


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
        known: Known digests of rows, by table; they are not computed again.
    """
    digest = StateDigest1() if version == 1 else StateDigest()
    for table in sorted(layers.manifest.tables, key=lambda table: table.name):
        length = rows_per_range(table.dim)
        columns = []
        for name in ("weights", *table.slots, *table.row_slots):
            pieces = partial(layers.column, table.name, name)
            width = 1 if name in table.row_slots else table.dim
            columns.append(DigestColumn(name, (table.rows, width), partial(ranges_in_order, pieces, length)))
        keys = None if table.keys is None else layers.merged(table.name).for_digest(table.keys)
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
    """Return the path of a file of `CheckpointManifest.others` in the newest checkpoint that has it, or else None."""
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
