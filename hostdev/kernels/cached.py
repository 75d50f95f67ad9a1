"""Machine code on disk: numba's cache of it, with checksums, so that a damaged or full folder ends no command.

numba trusts its files: a damaged index fails in every process until somebody removes it, and damaged code would run.
A file whose checksum is wrong is compiled and written again. What cannot be written is compiled in every process.
"""

import io
import pickle
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

_Base: Any = object
try:
    from numba.core.caching import IndexDataCacheFile

    _Base = IndexDataCacheFile
except ImportError:  # another version of numba, with its own ways
    pass

_MARK = b"hostdev1"  # before the checksum, at a file's end, which numba does not read
_SIZE = len(_MARK) + 32
_told: set[str] = set()


def check_cache(dispatcher: Any) -> Any:
    """Let a kernel's cached code be checked; return the kernel."""
    cache = getattr(dispatcher, "_cache", None)
    file = getattr(cache, "_cache_file", None)
    if _Base is not object and type(file) is _Base:
        file.__class__ = _CheckedFile
    return dispatcher


class _CheckedFile(_Base):  # type: ignore[misc]
    """Files of one kernel."""

    def save(self, key: Any, data: Any) -> None:
        """Write code, if there is room for it."""
        try:
            super().save(key, data)
        except OSError as error:
            folder = str(Path(self._index_path).parent)
            if folder not in _told:
                _told.add(folder)
                why = f"compiled kernels are not kept in {folder} ({error.strerror}), and compiled in each process"
                if sys.stderr is not None:
                    print(f"hostdev: warning: {why}", file=sys.stderr)

    def _load_index(self) -> Any:
        try:
            content = _checked(Path(self._index_path).read_bytes())
            version, rest = _unpickled(content)
            stamp, overloads = pickle.loads(rest) if version == self._version else (None, {})
        except (OSError, _WrongError, AttributeError, ImportError):  # the last two: types of an older source are gone
            return {}
        return overloads if stamp == self._source_stamp else {}

    def _save_index(self, overloads: Any) -> None:
        content = pickle.dumps(self._version, protocol=-1) + self._dump((self._source_stamp, overloads))
        self._write(self._index_path, content)

    def _load_data(self, name: str) -> Any:
        try:
            return pickle.loads(_checked(Path(self._data_path(name)).read_bytes()))
        except _WrongError:
            raise FileNotFoundError(name) from None  # which numba takes for code that is not there

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), self._dump(data))

    def _write(self, path: str, content: bytes) -> None:
        with self._open_for_write(path) as file:
            file.write(content + _MARK + sha256(content).digest())


class _WrongError(Exception):
    """A file that is not as it was written."""


def _checked(content: bytes) -> bytes:
    """Return a file's content without its checksum."""
    body, mark = content[:-_SIZE], content[-_SIZE:]
    if mark != _MARK + sha256(body).digest():
        raise _WrongError
    return body


def _unpickled(content: bytes) -> tuple[Any, bytes]:
    """Return the first value of some bytes, and the rest."""
    source = io.BytesIO(content)
    return pickle.load(source), source.read()
