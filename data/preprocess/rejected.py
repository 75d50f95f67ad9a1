"""Malformed lines, stored compactly because a file in an unexpected format has many of them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_AT_ONCE = 4096  # lines held as objects at a time


class Rejected(NamedTuple):
    """A malformed line: its number in the file (from 1), the reason, and its text."""

    file: str
    line: int
    reason: str
    text: str


class RejectedLines:
    """The malformed lines of a part of a file.

    Args:
        numbers: int64 [n], line numbers within the part, from 1; `after` turns them into line numbers of the file.
        look: Called with i in [0, n) when line i is needed; returns the reason and the text of that line.
    """

    def __init__(
        self, file: str = "", numbers: npt.ArrayLike = (), look: Callable[[int], tuple[str, str]] | None = None
    ) -> None:
        self.file, self.numbers, self._look = file, np.asarray(numbers, np.int64), look

    def __len__(self) -> int:
        """Return n."""
        return len(self.numbers)

    def __getitem__(self, i: int) -> Rejected:
        """Return line `i`; raise IndexError if it does not exist."""
        if not 0 <= i < len(self) or self._look is None:
            raise IndexError(i)
        return Rejected(self.file, int(self.numbers[i]), *self._look(i))

    def __iter__(self) -> Iterator[Rejected]:
        """Iterate lazily over the lines."""
        return (self[i] for i in range(len(self)))

    def after(self, lines: int) -> "RejectedLines":
        """Return these lines with `lines` added to their numbers."""
        return RejectedLines(self.file, self.numbers + lines, self._look)

    def merge(self, other: "RejectedLines") -> "RejectedLines":
        """Return these lines and others from the same part of the file, ordered by line number."""
        first = len(self)
        numbers = np.concatenate([self.numbers, other.numbers])
        order = np.argsort(numbers, kind="stable")

        def look(i: int) -> tuple[str, str]:
            place = int(order[i])
            line = self[place] if place < first else other[place - first]
            return line.reason, line.text

        return RejectedLines(self.file or other.file, numbers[order], look)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns "file" (one value, or none if there are no lines), "line", "reason" and "text"."""
        parts: dict[str, list[pa.Array]] = {"reason": [], "text": []}
        for start in range(0, len(self), _AT_ONCE):
            lines = [self[i] for i in range(start, min(start + _AT_ONCE, len(self)))]
            for name, some in parts.items():
                some.append(pa.array([getattr(line, name) for line in lines], pa.large_string()))
        texts = {name: pa.concat_arrays(some or [pa.array([], pa.large_string())]) for name, some in parts.items()}
        file = self.file.encode(errors="replace").decode()  # a name may not be valid text
        return {"file": pa.array([file][: len(self)], pa.large_string()), "line": pa.array(self.numbers), **texts}


def read_rejected(columns: dict[str, pa.Array]) -> Iterator[Rejected]:
    """Iterate over the lines in the result of `RejectedLines.columns`."""
    [file] = columns["file"].to_pylist() or [""]
    for start in range(0, len(columns["line"]), _AT_ONCE):
        some = (columns[name].slice(start, _AT_ONCE).to_pylist() for name in Rejected._fields[1:])
        for line in zip(*some, strict=True):
            yield Rejected(file, *line)
