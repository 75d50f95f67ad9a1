"""Paths that are shown as the user wrote them, and opened by an absolute path."""

from pathlib import Path
from typing import Any

_Base: Any = type(Path())


class PlacedPath(_Base):  # type: ignore[misc]
    """A path whose text is the user's, perhaps relative to a folder of the client's; files are opened at `place`.

    Messages and rejected lines thus name the same file on all machines.
    """

    place: str | None = None

    def __fspath__(self) -> str:
        return str(self) if self.place is None else self.place


def placed(shown: str, place: str) -> Path:
    """Return a path with this text that opens the file at `place`."""
    path = PlacedPath(shown)
    path.place = place
    return path
