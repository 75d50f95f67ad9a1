"""numba's on-disk cache of machine code, extended by checksums and by a hash of all sources of a kernel.

numba does not check its cache files: a damaged index raises an error in every process until the file is removed, and
damaged code would run. With this module, a kernel whose file has a wrong checksum is compiled again. A kernel that
cannot be written to disk is compiled in every process.
"""

import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from hostdev.core.locks import lock_state
from hostdev.kernels.sources import hash_sources

_Base: Any = object
try:
    from numba.core.caching import IndexDataCacheFile

    _Base = IndexDataCacheFile
except ImportError:  # an unsupported version of numba
    pass

_MARK = b"hostdev1"  # precedes the checksum at the end of a file; numba ignores both
_SIZE = len(_MARK) + 32
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
        except (OSError, _WrongError, AttributeError, ImportError):  # the last two: a pickled type no longer exists
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
