"""Conversion of nested values with tensors, such as a `state_dict`, to and from JSON and safetensors without pickle.

The tree represents a tensor as {"$tensor": its name in the file}, a NumPy array as {"$array": its name in the file}, a
tuple as {"$tuple": [...]}, and a dict whose keys are not all strings as {"$dict": [[key, value], ...]}.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save as save_arrays
from safetensors.torch import load, load_file, save
from torch import Tensor

from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.core.disk import is_text
from hostdev.core.errors import raise_if_transient

Tree = Any
_MARKS = ("$tensor", "$array", "$tuple", "$dict")


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

    `safetensors.torch` makes a type of ctypes for each number of bytes that it meets, which is never freed; the arrays
    of a run that lasts are longer in each checkpoint. It is used for types that NumPy lacks, such as bfloat16.
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
