"""Rotation of a text file with a limited total size: full files get numbers, and the oldest are removed."""

import os
from collections.abc import Iterable
from pathlib import Path

LARGEST = 64 << 20  # bytes of one file
_FEWEST = 4  # files, if the limit is small


class RotatedFile:
    """A text file to append to; when full, it is renamed NAME.1, the previous NAME.1 becomes NAME.2, and so on.

    Args:
        path: The file.
        limit: Maximum total bytes of all files; each takes at most a quarter of it and at most 64 MiB.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.dropped_bytes = 0  # bytes of removed files
        self._each = min(LARGEST, max(1, limit // _FEWEST))
        self._older = max(1, limit // self._each - 1)
        self._file = path.open("ab")
        self._size = os.fstat(self._file.fileno()).st_size

    def fit(self) -> None:
        """Apply the limit to the files of an earlier run, which may have had a higher limit."""
        if self._size > self._each:
            self._rotate()
        else:
            self._remove_beyond()

    def writelines(self, lines: Iterable[str]) -> None:
        """Append lines; no line is split across files."""
        part: list[bytes] = []
        room = self._each - self._size
        for line in lines:
            data = line.encode()
            if len(data) > room and (part or self._size):
                self._write(part)
                self._rotate()
                part, room = [], self._each
            part.append(data)
            room -= len(data)
        self._write(part)

    def _write(self, part: list[bytes]) -> None:
        data = b"".join(part)
        self._file.write(data)
        self._size += len(data)

    def _rotate(self) -> None:
        if not self.path.exists():  # the file or its folder was removed
            self._file.flush()
            self._file.truncate(0)
            self.dropped_bytes += self._size
        else:
            self._file.close()
            for number in range(self._older, -1, -1):
                if self._numbered(number).exists():
                    self._numbered(number).replace(self._numbered(number + 1))
            self._remove_beyond()
            self._file = self.path.open("ab")
        self._size = 0

    def _remove_beyond(self) -> None:
        """Remove the oldest files until neither their number nor their total size exceeds the limit."""
        numbers = (
            path.name.removeprefix(f"{self.path.name}.") for path in self.path.parent.glob(f"{self.path.name}.*")
        )
        total = 0
        for number in sorted(int(each) for each in numbers if each.isdecimal()):
            size = self._numbered(number).stat().st_size
            total += size
            if number > self._older or total > self.limit - self._each:
                self._numbered(number).unlink()
                self.dropped_bytes += size

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def flush(self) -> None:
        """Flush the lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
