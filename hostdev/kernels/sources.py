"""A hash of a kernel's sources: its own file, and the files of all functions that are compiled into it.

numba's cache checks only the kernel's own file, so it would run old code after a function in another file has changed.
"""

import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_PACKAGE = "hostdev"
_CONSTANTS = (bool, int, float, str, tuple, np.generic)  # types of global variables whose values are compiled into code


def hash_sources(function: FunctionType) -> bytes:
    """Hash the files of a function and of all package functions that it refers to, directly or indirectly.

    The constants that these functions use are hashed as well.
    """
    files: set[str] = set()
    constants: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        files.add(one.__code__.co_filename)
        constants |= {f"{name}={value!r}" for name, value in _get_globals(one) if isinstance(value, _CONSTANTS)}
        waiting += _find_helpers(one)
    found = sha256("\0".join(sorted(constants)).encode())
    for name, content in sorted((Path(file).name, _hash_file(file)) for file in files):
        found.update(name.encode() + b"\0" + content)
    return found.digest()


def _find_helpers(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the package's functions that a function refers to.

    If one of these functions is not compiled, also yield the overloads in its module, which are compiled in its place.
    """
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in [*(value for _, value in _get_globals(function)), *cells]:
        helper = _as_function(value)
        if helper is None:
            continue
        yield helper
        if helper is value:  # not compiled: its module has overloads, which are functions that return a function
            module = sys.modules.get(helper.__module__)
            for other in map(_as_function, vars(module).values() if module is not None else ()):
                if other is not None and other.__module__ == helper.__module__ and _has_inner(other.__code__):
                    yield other


def _get_globals(function: FunctionType) -> list[tuple[str, Any]]:
    """Return (name, value) of each global that a function uses, from its own or another module of the package."""
    names = _get_names(function.__code__)
    found = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    modules = [value for _, value in found if isinstance(value, ModuleType) and _is_ours(value.__name__)]
    return found + [(name, getattr(one, name)) for one in modules for name in names if hasattr(one, name)]


def _has_inner(code: CodeType) -> bool:
    return any(isinstance(constant, CodeType) for constant in code.co_consts)


def _get_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _get_names(constant)
    return names


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == _PACKAGE


def _as_function(value: Any) -> FunctionType | None:
    """If `value` is a Python function of this package, or is compiled from one, return this function; else None."""
    value = getattr(value, "py_func", getattr(value, "_defn", value))
    if isinstance(value, FunctionType) and _is_ours(value.__module__):
        return value
    return None


@cache
def _hash_file(file: str) -> bytes:
    try:
        return sha256(Path(file).read_bytes()).digest()
    except OSError:  # in an archive: numba caches nothing there
        return b""
