"""numba's on-disk cache of machine code, extended by checksums and by a hash of all sources of a kernel.

numba does not check its cache files: a damaged index raises an error in every process until the file is removed, and
damaged code would run. With this module, a kernel whose file has a wrong checksum is compiled again. A kernel that
cannot be written to disk is compiled in every process.

numba's cache checks only the kernel's own file, so it would run old code after a function in another file has changed.
The hash therefore covers the kernel's own file and the files of all functions that are compiled into it.
"""

import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from hostdev.core.locks import lock_state

_PACKAGE = "hostdev"
_CONSTANTS = (bool, int, float, str, tuple, np.generic)  # types of global variables whose values are compiled into code
_MARK = b"hostdev1"  # precedes the checksum at the end of a file; numba ignores both
_SIZE = len(_MARK) + 32


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
    except OSError:  # the file is in an archive, for which numba caches nothing
        return b""


_Base: Any = object
try:
    from numba.core.caching import IndexDataCacheFile

    _Base = IndexDataCacheFile
except ImportError:  # this version of numba lacks the class; caches are not checked
    pass

_reported: set[str] = set()


def check_cache(dispatcher: Any) -> Any:
    """Make a kernel's cache reject code that has a wrong checksum or is from older sources; return the kernel."""
    cache = getattr(dispatcher, "_cache", None)
    file: Any = getattr(cache, "_cache_file", None)
    if _Base is not object and type(file) is _Base:
        file.__class__ = _CheckedFile
        file._function = dispatcher.py_func
    return dispatcher


class _CheckedFile(_Base):  # type: ignore[misc]
    _function: Any  # the kernel in Python

    def _get_stamp(self) -> Any:
        """Return a value that identifies the kernel's sources; call this only after its module has been imported."""
        return self._source_stamp, hash_sources(self._function)

    def load(self, key: Any) -> Any:
        name = self._load_index().get(key)
        try:
            found = None if name is None else self._load_data(name)
        except OSError:  # the file was removed, or is damaged
            return None
        return found[1] if found is not None and found[0] == (key, self._get_stamp()) else None

    def save(self, key: Any, data: Any) -> None:
        try:
            with _locked(self._cache_path):
                overloads = self._load_index()
                free = (name for name in map(self._data_name, count(1)) if name not in overloads.values())
                name = overloads.setdefault(key, next(free))
                self._save_data(name, ((key, self._get_stamp()), data))
                self._save_index(overloads)
        except OSError as error:
            folder = str(Path(self._index_path).parent)
            if folder not in _reported:
                _reported.add(folder)
                why = f"compiled kernels cannot be cached in {folder} ({error.strerror}); each process compiles them"
                if sys.stderr is not None:
                    print(f"hostdev: warning: {why}", file=sys.stderr)

    def _load_index(self) -> Any:
        try:
            content = _checked(Path(self._index_path).read_bytes())
            version, rest = _unpickled(content)
            stamp, overloads = pickle.loads(rest) if version == self._version else (None, {})
        except (OSError, _WrongError, AttributeError, ImportError):  # the last two mean that a pickled type is gone
            return {}
        return overloads if stamp == self._get_stamp() else {}

    def _save_index(self, overloads: Any) -> None:
        content = pickle.dumps(self._version, protocol=-1) + self._dump((self._get_stamp(), overloads))
        self._write(self._index_path, content)

    def _load_data(self, name: str) -> Any:
        try:
            return pickle.loads(_checked(Path(self._data_path(name)).read_bytes()))
        except _WrongError:
            raise FileNotFoundError(name) from None  # numba then compiles the code

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), self._dump(data))

    def _write(self, path: str, content: bytes) -> None:
        with self._open_for_write(path) as file:
            file.write(content + _MARK + sha256(content).digest())


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock a folder of compiled kernels against writes by other processes.

    Without the lock, processes that compile a kernel for different argument types at the same time could overwrite each
    other's index, which could then name code for the wrong types. On file systems without locks, `load` rejects such
    code.
    """
    if os.name != "posix":  # only POSIX systems can open, and so lock, a folder
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        lock_state(number, wait=True)
        yield
    finally:
        os.close(number)


class _WrongError(Exception):
    """A cached kernel's file has a wrong checksum."""


def _checked(content: bytes) -> bytes:
    body, mark = content[:-_SIZE], content[-_SIZE:]
    if mark != _MARK + sha256(body).digest():
        raise _WrongError
    return body


def _unpickled(content: bytes) -> tuple[Any, bytes]:
    source = io.BytesIO(content)
    return pickle.load(source), source.read()
