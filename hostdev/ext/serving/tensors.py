"""Tensors of the Open Inference Protocol: their data types, and their values in JSON and in binary."""

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.ext.serving.json_input import is_unicode
from hostdev.ext.serving.refused import RefusedError, bad

BYTES = "BYTES"
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
DATATYPES = (*DTYPES, BYTES)

_PIECE = 1 << 16  # values that are converted at once
_LENGTH = struct.Struct("<I")

# An array of the tensor's shape; lists if the values are text, or if some integers or booleans are missing.
Values = npt.NDArray[Any] | list[Any]


class Tensor(NamedTuple):
    """A named tensor of one value per row, shape [n], or of k values per row, shape [n, k]."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values


def where(index: int, shape: Sequence[int], name: str) -> str:
    """Return the place of the element `index` of a tensor in row-major order, for messages."""
    columns = math.prod(shape[1:])
    return f"row {index // max(columns, 1) + 1}, column {name!r}"


def from_binary(name: str, datatype: str, shape: tuple[int, ...], content: bytes) -> Values:
    """Return the values of a tensor in binary: little-endian, or, for BYTES, a length of 4 bytes before each text.

    Raises:
        RefusedError: The length does not fit the shape, or a text is not UTF-8.
    """
    count = math.prod(shape)
    if datatype == BYTES:
        return _nested(_split_texts(name, shape, count, content), shape)
    dtype = DTYPES[datatype]
    if len(content) != count * dtype.itemsize:
        raise bad(
            f"input {name!r} has {len(content):,} bytes; {datatype} {list(shape)} needs {count * dtype.itemsize:,}"
        )
    if datatype == "BOOL" and content.translate(None, b"\0\1"):
        raise bad(f"input {name!r}: a BOOL in binary is 0 or 1")
    return np.frombuffer(content, dtype).reshape(shape)


def _split_ascii(count: int, content: bytes) -> list[str] | None:
    """Split texts in binary, all of whose bytes are ASCII; return None if a length does not fit."""
    letters, texts, start, length_at = content.decode("ascii"), [], 0, _LENGTH.unpack_from
    try:
        for _ in range(count):
            stop = start + 4 + length_at(content, start)[0]
            texts.append(letters[start + 4 : stop])
            start = stop
    except struct.error:
        return None
    return texts if start == len(content) else None


def _split_texts(name: str, shape: tuple[int, ...], count: int, content: bytes) -> list[str]:
    if len(content) < 4 * count:
        raise bad(f"input {name!r} has {len(content):,} bytes; BYTES {list(shape)} needs at least {4 * count:,}")
    if content.isascii() and (texts := _split_ascii(count, content)) is not None:
        return texts
    texts, start, length_at = [], 0, _LENGTH.unpack_from
    for index in range(count):
        stop = start + 4
        if stop <= len(content):
            start, stop = stop, stop + length_at(content, start)[0]
        if stop > len(content):
            raise bad(f"{where(index, shape, name)}: the text ends outside the tensor's {len(content):,} bytes")
        try:
            texts.append(content[start:stop].decode())
        except UnicodeDecodeError:
            raise bad(f"{where(index, shape, name)}: the text is not UTF-8") from None
        start = stop
    if start != len(content):
        raise bad(f"input {name!r} has {len(content) - start:,} bytes after its last text")
    return texts


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Values:
    """Return the values of a tensor in JSON: a flat list, or one nested as `shape`; null is a missing value.

    Raises:
        RefusedError: The number of values differs from the shape, or a value does not fit the data type.
    """
    if not isinstance(data, list):
        raise bad(f"input {name!r} has no list `data`")
    flat = _flatten(name, shape, data)
    if datatype == BYTES:
        _require_texts(name, shape, flat)
        return _nested(flat, shape)
    kinds = (int, float) if datatype.startswith("FP") else (bool,) if datatype == "BOOL" else (int,)
    for index, value in enumerate(flat):
        if value is not None and type(value) not in kinds:
            raise _unfit(name, datatype, shape, index, value)
    pieces = [flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE)]  # other threads run between pieces
    if not datatype.startswith("FP") and any(None in piece for piece in pieces):
        _require_range(name, datatype, shape, flat)
        return _nested(flat, shape)
    found = np.empty(len(flat), DTYPES[datatype])
    try:
        with np.errstate(over="ignore"):
            for number, piece in enumerate(pieces):
                found[number * _PIECE :][: len(piece)] = np.array(
                    [math.nan if value is None else value for value in piece], DTYPES[datatype]
                )
    except OverflowError:
        _require_range(name, datatype, shape, flat)
        raise bad(f"input {name!r} has a number that {datatype} cannot hold") from None
    if datatype.startswith("FP") and len(large := np.flatnonzero(np.isinf(found))):
        raise _unfit(name, datatype, shape, int(large[0]), flat[int(large[0])])
    return found.reshape(shape)


def _flatten(name: str, shape: tuple[int, ...], data: list[Any]) -> list[Any]:
    """Return the values of flat or nested lists in row-major order."""
    if len(shape) == 2 and data and all(type(row) is list for row in data):
        for number, row in enumerate(data):
            if len(row) != shape[1]:
                raise bad(f"row {number + 1}, column {name!r}: {len(row)} values, but the shape is {list(shape)}")
        if len(data) != shape[0]:
            raise bad(f"input {name!r} has {len(data):,} rows, but the shape is {list(shape)}")
        return [value for row in data for value in row]
    if len(data) != math.prod(shape):
        raise bad(f"input {name!r} has {len(data):,} values, but the shape is {list(shape)}")
    return data


def _require_texts(name: str, shape: tuple[int, ...], flat: list[Any]) -> None:
    for index, value in enumerate(flat):
        if value is None:
            continue
        if type(value) is not str:
            raise _unfit(name, BYTES, shape, index, value)
        if not is_unicode([value]):
            raise bad(f"{where(index, shape, name)}: the text has half of a surrogate pair")


def _require_range(name: str, datatype: str, shape: tuple[int, ...], flat: list[Any]) -> None:
    if datatype == "BOOL":
        return
    if datatype.startswith("FP"):
        low, high = -float(np.finfo(DTYPES[datatype]).max), float(np.finfo(DTYPES[datatype]).max)
    else:
        low, high = np.iinfo(DTYPES[datatype]).min, np.iinfo(DTYPES[datatype]).max
    for index, value in enumerate(flat):
        if value is not None and not low <= value <= high:
            raise _unfit(name, datatype, shape, index, value)


def _unfit(name: str, datatype: str, shape: tuple[int, ...], index: int, value: Any) -> RefusedError:
    return bad(f"{where(index, shape, name)}: {shown(value)} is not a value of type {datatype}")


def shown(value: Any) -> str:
    """Return a value for a message, cut to some characters."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if type(value) is int and value.bit_length() > 200:
        return "an integer of many digits"
    text = {True: "true", False: "false"}[value] if type(value) is bool else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _nested(flat: list[Any], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return flat
    return [flat[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])]
