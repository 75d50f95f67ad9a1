"""Checksums of existing files, of files as they are written, and of JSON content."""

import io
import json
import math
import os
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

from hostdev.core.errors import StoppedError

_AT_ONCE = 1 << 22  # bytes that are read at a time
_MISSING = object()


class Crc32:
    """A CRC-32 checksum, which detects damage but not forgery."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        """Add bytes."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """Return the checksum so far."""
        return f"{self._value:08x}"


class NoDigest:
    """Takes the place of a checksum for a file that is only read, for example into the page cache."""

    def update(self, data: Any) -> None:
        """Ignore bytes."""

    def hexdigest(self) -> str:
        """Return ""."""
        return ""


def hash_stream(
    file: Any,
    *,
    out: Any = None,
    stop: Event | None = None,
    most: int | None = None,
    digest: Callable[[], Any] = sha256,
) -> str:
    """Read an open file to its end, or up to `most` bytes; return the checksum of these bytes, in hexadecimal.

    Args:
        file: A file or other stream, with `readinto`.
        out: A file to which the bytes that were read are written; None for no file.
        stop: Ends the reading early when it is set.
        most: The maximum number of bytes to read; None for all.
        digest: Makes the running checksum.

    Raises:
        StoppedError: `stop` was set meanwhile.
        OSError: The file cannot be read, or `out` cannot be written.
    """
    running, buffer = digest(), memoryview(bytearray(_AT_ONCE))  # large, since each read waits for the GIL
    remaining = math.inf if most is None else most
    while size := file.readinto(buffer[: int(min(remaining, _AT_ONCE))]):
        running.update(buffer[:size])
        if out is not None:
            out.write(buffer[:size])
        remaining -= size
        if stop is not None and stop.is_set():
            raise StoppedError
    return str(running.hexdigest())


def checksum(path: Path, digest: Callable[[], Any] = sha256) -> str:
    """Return the checksum of a file, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        return hash_stream(file, digest=digest)


def json_checksum(content: Any) -> str:
    """Return the SHA-256 of JSON content, in hexadecimal, independent of the order of keys."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_whole_json(text: bytes, *, without: bool = False) -> bool:
    """Return whether a text is a JSON object whose field `sha256` is the checksum of its other fields.

    With `without`, an object that lacks this field also counts as whole.
    """
    try:
        content = json.loads(text)
        given = content.pop("sha256", _MISSING)
        return without if given is _MISSING else bool(given == json_checksum(content))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False


class HashedFile(io.RawIOBase):
    """A new file that is written sequentially and hashed as it is written.

    Args:
        path: The file.
        digest: Makes the running checksum, such as a hashlib object or `Crc32`.
    """

    def __init__(self, path: Path, digest: Callable[[], Any] = sha256) -> None:
        self._file = path.open("xb", buffering=0)
        self._digest = digest()
        self.bytes = 0

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        written = 0
        while written < len(view):
            written += self._file.write(view[written:])
        self.bytes += len(view)
        return len(view)

    def finish(self, *, to_disk: bool = True) -> str:
        """Close the file and return its checksum; with `to_disk`, flush it to disk first."""
        if to_disk:
            os.fsync(self._file.fileno())
        self.close()
        return str(self._digest.hexdigest())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.bytes
