"""Checksums of files: of one that is there, of one while it is written, and of what a JSON file says."""

import json
import os
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

_AT_ONCE = 1 << 22  # bytes


class Digest(Protocol):
    """What adds up bytes: hashlib's objects, and `Crc32`."""

    def update(self, data: Any, /) -> object:
        """Take in bytes."""

    def hexdigest(self) -> str:
        """Return the checksum so far."""


class Crc32:
    """CRC-32, where files are to be told from damaged ones, and not from forged ones."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        """Take in bytes."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """Return the checksum so far."""
        return f"{self._value:08x}"


def checksum(path: Path, digest: Callable[[], Digest] = sha256) -> str:
    """Return the checksum of a file, in hexadecimal."""
    found = digest()
    with path.open("rb") as file:
        while chunk := file.read(_AT_ONCE):
            found.update(chunk)
    return found.hexdigest()


def json_checksum(content: dict[str, Any]) -> str:
    """Return the SHA-256 of an object that was or will be read from JSON, in hexadecimal, in whatever order it is."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class HashedFile:
    """A new file that is written once, from its beginning; its bytes are hashed on the way."""

    def __init__(self, path: Path, digest: Callable[[], Digest] = sha256) -> None:
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
        """Close the file, and before bring it to the disk; return its checksum."""
        if to_disk:
            os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close it as it is."""
        self._file.close()

    def flush(self) -> None:
        """Do nothing: nothing is kept back."""

    @property
    def closed(self) -> bool:
        """Tell whether it is closed."""
        return self._file.closed

    def readable(self) -> bool:
        """No."""
        return False

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """No."""
        return False

    def tell(self) -> int:
        """Return the bytes written."""
        return self.bytes
