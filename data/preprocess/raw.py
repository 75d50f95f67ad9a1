"""Rows as the source has them, before ids and scaling; what a parser and the generator both produce."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

EMPTY = 1 << 32  # the key of an empty categorical: one above every 32-bit value


@dataclass(frozen=True)
class Rejected:
    """A malformed line: where it stands, what is wrong with it, and the line itself."""

    file: str
    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class RawRows:
    """n rows of Criteo's columns, and the malformed lines that were met on the way to them."""

    label: npt.NDArray[np.float32]  # [n], 0 or 1
    integers: npt.NDArray[np.int64]  # [n, 13], 0 where missing
    missing: npt.NDArray[np.bool_]  # [n, 13]
    categories: npt.NDArray[np.int64]  # [n, 26], the 32-bit value or EMPTY
    rejected: list[Rejected] = field(default_factory=list)

    def __len__(self) -> int:
        """Return n."""
        return len(self.label)


class Source(Protocol):
    """Rows in a fixed order, as often as they are asked for."""

    total: int
    """The whole's size in `unit`s, for the progress bar."""
    unit: str
    most_rows: int
    """No more well-formed rows than this."""

    def chunks(self) -> Iterator[tuple[RawRows, int]]:
        """Iterate over all rows in chunks, each with its size in `unit`s."""

    def describe(self) -> list[dict[str, Any]]:
        """Return what the manifest records of where the rows come from."""
