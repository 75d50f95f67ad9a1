"""Reading of JSON files from untrusted sources with a size limit, and parsing into annotated dataclasses."""

import json
import math
import os
import stat
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

MOST_BYTES = 1 << 28
_WIDEST = 2**63  # fields of type int are below this limit (int64), other integers below twice the limit (uint64)
_MOST_DIGITS = 20  # maximum characters of a 64-bit integer, including the sign

T = TypeVar("T")


def read(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a regular file, is larger than `most` bytes, or does not suit `loads`.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not wait
    with os.fdopen(number, "rb") as file:
        found = os.fstat(number)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(21, "it is a folder", str(path))
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size:,} bytes, more than the limit of {most:,}")
        content = file.read(most)
    return loads(content)


def loads(content: str | bytes) -> Any:
    """Return the content of a JSON text; reject numbers of more than 64 bits, so that other code need not handle them.

    Raises:
        ValueError: The text is not JSON, is not UTF-8, is nested too deeply, or has a larger number.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        return json.loads(text, parse_int=_integer, parse_float=_float)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= _MOST_DIGITS else 2 * _WIDEST
    if not -_WIDEST <= value < 2 * _WIDEST:
        raise ValueError("a number has more than 64 bits")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number has more than 64 bits")
    return value


def parse(kind: type[T], content: Any, where: str = "") -> T:
    """Return a value of type `kind`, such as a dataclass, from JSON content; values are checked, not converted.

    Supported types: dataclasses (JSON objects with the same fields, where fields with defaults may be missing), lists,
    tuples of any or a fixed length, named tuples, dicts with string keys, unions, int, float, str, bool, None and Any.

    Raises:
        ValueError: The content does not fit `kind`; the message says where.
    """
    found: T = _parse(kind, content, where)
    return found


def _parse(kind: Any, content: Any, where: str) -> Any:
    if kind is Any:
        return content
    if is_dataclass(kind):
        return _dataclass(kind, content, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(inner, content, where)
    if hasattr(kind, "_fields"):
        return kind(*_parse(tuple[tuple(_hints(kind).values())], content, where))  # type: ignore[misc]
    if origin is list or origin is tuple:
        _require(isinstance(content, list | tuple), content, "a list", where)
        if origin is list or inner[-1] is Ellipsis:
            inner = inner[:1] * len(content)
        _require(len(content) == len(inner), content, f"a list of {len(inner)}", where)
        return origin(
            _parse(kinds, item, f"{where}[{i}]") for i, (kinds, item) in enumerate(zip(inner, content, strict=True))
        )
    if origin is dict:
        _require(isinstance(content, dict), content, "an object", where)
        return {key: _parse(inner[1], each, _join(where, key)) for key, each in content.items()}
    if kind is int:
        _require(type(content) is int and -_WIDEST <= content < _WIDEST, content, "a 64-bit integer", where)
    elif kind is float:
        is_float = type(content) is float and math.isfinite(content)
        is_whole = type(content) is int and -_WIDEST <= content < _WIDEST  # a larger one may overflow a float
        _require(is_float or is_whole, content, "a number", where)
    elif kind is str:
        _require(isinstance(content, str), content, "text", where)
    elif kind is bool:
        _require(isinstance(content, bool), content, "true or false", where)
    elif kind is type(None):
        _require(content is None, content, "null", where)
    elif kind is dict:
        _require(isinstance(content, dict), content, "an object", where)
    else:
        raise TypeError(f"JSON content cannot be parsed as {kind}; see the types that parse() supports")
    return content


def _dataclass(kind: Any, content: Any, where: str) -> Any:
    _require(isinstance(content, dict), content, "an object", where)
    hints = _hints(kind)
    for key in content:
        if key not in hints:
            raise ValueError(f"{_join(where, str(key)[:80])} is not a known field")
    found = {}
    for field in fields(kind):
        if field.name in content:
            found[field.name] = _parse(hints[field.name], content[field.name], _join(where, field.name))
        elif field.name in _needed(kind):
            raise ValueError(f"{_join(where, field.name)} is missing")
    return kind(**found)


def _union(kinds: tuple[Any, ...], content: Any, where: str) -> Any:
    if content is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    for kind in others[:-1]:
        try:
            return _parse(kind, content, where)
        except ValueError:
            pass
    return _parse(others[-1], content, where)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _needed(kind: Any) -> frozenset[str]:
    each = fields(kind)
    return frozenset(field.name for field in each if field.default is MISSING and field.default_factory is MISSING)


def _require(right: bool, content: Any, what: str, where: str) -> None:
    if not right:
        raise ValueError(f"{where or 'the content'} is {_shown(content)}, not {what}")


def _shown(content: Any) -> str:
    if isinstance(content, dict | list):
        return "an object" if isinstance(content, dict) else "a list"
    if isinstance(content, int) and not isinstance(content, bool) and abs(content) >= _WIDEST:
        return "an integer of more than 64 bits"
    text = json.dumps(content)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
